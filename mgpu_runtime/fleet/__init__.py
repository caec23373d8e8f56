"""One warm process per device, in lockstep: start a fleet, send it jobs, read their streams.

The names below are loaded on first use. A supervisor and its workers import this package before they have
asked to die with their parent, so importing it must not cost the seconds that importing torch takes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .controller import MGPUController
    from .devices import parse_devices
    from .errors import (
        AsymmetricRunnerError,
        ControllerBusyError,
        FleetError,
        FleetStartError,
        JobCancelled,
        RunnerError,
        SymmetricRunnerError,
    )
    from .runner import JobContext, MGPURunner, RankInfo
    from .stream import Event, Stream
    from .table import current, stop

_HOMES = {
    "AsymmetricRunnerError": "errors",
    "ControllerBusyError": "errors",
    "Event": "stream",
    "FleetError": "errors",
    "FleetStartError": "errors",
    "JobCancelled": "errors",
    "JobContext": "runner",
    "MGPUController": "controller",
    "MGPURunner": "runner",
    "RankInfo": "runner",
    "RunnerError": "errors",
    "Stream": "stream",
    "SymmetricRunnerError": "errors",
    "current": "table",
    "parse_devices": "devices",
    "stop": "table",
}

__all__ = [
    "AsymmetricRunnerError",
    "ControllerBusyError",
    "Event",
    "FleetError",
    "FleetStartError",
    "JobCancelled",
    "JobContext",
    "MGPUController",
    "MGPURunner",
    "RankInfo",
    "RunnerError",
    "Stream",
    "SymmetricRunnerError",
    "current",
    "parse_devices",
    "stop",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
