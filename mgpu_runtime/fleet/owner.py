"""Which process a fleet belongs to: a forked child inherits the handle, but not the threads that read and write."""

import os

from .errors import FleetError


def check_owner(pid: int) -> None:
    """Raises FleetError unless this is the process of that id, which started the fleet."""
    if os.getpid() != pid:
        raise FleetError(
            f"This fleet belongs to process {pid}; process {os.getpid()}, a fork of it, cannot use it. "
            "Start another fleet here, with a new controller."
        )
