"""The one fleet that a process keeps warm."""

import sys
import threading
from collections.abc import Callable, Hashable
from types import ModuleType

from .controller import MGPUController

# The version is part of the name: two releases in one process must not share a table that they read differently.
_TABLE_NAME = "_mgpu_fleet_table_v1"


def current(key: Hashable, start: Callable[[], MGPUController]) -> MGPUController:
    """Returns the running fleet if it was started for an equal key, else ends it and returns what `start` gives."""
    table = _table()
    with table.lock:
        if table.controller is not None and table.key == key and table.controller.is_alive:
            return table.controller
        _end_held(table)
        table.controller, table.key = start(), key
        return table.controller


def stop() -> None:
    """Ends the running fleet, if there is one."""
    table = _table()
    with table.lock:
        _end_held(table)


def _end_held(table: ModuleType) -> None:
    held, table.controller, table.key = table.controller, None, None
    if held is not None:
        held.shutdown()


def _table() -> ModuleType:
    """Returns the table of this process, which is one even when this package was imported under two names."""
    fresh = ModuleType(_TABLE_NAME)
    fresh.lock, fresh.controller, fresh.key = threading.Lock(), None, None
    return sys.modules.setdefault(_TABLE_NAME, fresh)
