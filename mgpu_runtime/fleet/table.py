"""The one fleet that a process keeps warm."""

import os
import sys
import threading
from collections.abc import Callable, Hashable
from types import ModuleType

from .controller import MGPUController

# The version is part of the name: two releases in one process must not share a table that they read differently.
_TABLE_NAME = "_mgpu_fleet_table_v1"


def current(key: Hashable, start: Callable[[], MGPUController]) -> MGPUController:
    """Returns the running fleet if it was started for an equal key, else ends it and returns what `start` gives.

    Raises ControllerBusyError, and leaves the running fleet alone, when that one was started for another key and does
    a job.
    """
    table = _table()
    with table.lock:
        if table.controller is not None:
            if table.key == key and table.controller.is_alive:
                return table.controller
            table.controller.retire()
            table.controller, table.key = None, None
        table.controller, table.key = start(), key
        return table.controller


def stop() -> None:
    """Ends the running fleet, if there is one, and with it the job that it does."""
    table = _table()
    with table.lock:
        held, table.controller, table.key = table.controller, None, None
        if held is not None:
            held.shutdown()


def _table() -> ModuleType:
    """Returns the table of this process, which is one even when this package was imported under two names."""
    fresh = ModuleType(_TABLE_NAME)
    _empty(fresh)
    table = sys.modules.setdefault(_TABLE_NAME, fresh)
    if table is fresh:
        # A forked child finds a table of its own: the fleet is its parent's, and so is who holds the lock.
        os.register_at_fork(after_in_child=lambda: _empty(table))
    return table


def _empty(table: ModuleType) -> None:
    table.lock, table.controller, table.key = threading.Lock(), None, None
