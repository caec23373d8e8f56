"""Watches collectives that a GPU works off on its own, without making the host wait for each."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from .errors import ExchangeError
from .waiting import Wait

AHEAD = 16  # exchanges the host may be ahead of the GPU: several blocks of a transformer, so the GPU never runs dry


class Finished(Protocol):
    """A torch.distributed Work."""

    def is_completed(self) -> bool: ...


class Event(Protocol):
    """A torch.cuda.Event."""

    def query(self) -> bool: ...


@dataclass
class _Entry:
    number: int
    what: str
    arrived: Event
    work: Finished
    timeout: float
    wait: Wait | None = None


class StreamOrder:
    """The collectives in flight on a GPU's streams.

    What is promised: the host looks at them whenever an exchange starts, and is never more than AHEAD exchanges before
    the GPU. A collective that is not done `timeout` seconds after this rank's GPU came to it raises ExchangeTimeout
    there. It is the timeout of when it was posted: the host may have left `patience` long before the GPU comes to what
    it was for. The host cannot look while it waits for the GPU in some other call; then the process group's own timeout
    holds, after which torch's NCCL watchdog ends the process. Nothing is watched while a CUDA graph is captured.
    """

    def __init__(self, begin_wait: Callable[[int, str, float], Wait], *, ahead: int = AHEAD) -> None:
        self._begin_wait = begin_wait
        self._ahead = ahead
        self._flying: deque[_Entry] = deque()

    def make_room(self) -> None:
        """Lets the GPU catch up where the host is too far ahead. Raises what a Wait raises."""
        began = time.monotonic()
        while self._flying:
            if self._is_done(self._flying[0]):
                self._flying.popleft()
            elif len(self._flying) < self._ahead:
                return
            else:
                time.sleep(min(1e-3, max(2e-5, (time.monotonic() - began) / 20)))

    def add(self, number: int, what: str, arrived: Event, work: Finished, timeout: float) -> None:
        """Notes a collective that was posted; `arrived` is done when this rank's GPU comes to it."""
        self._flying.append(_Entry(number, what, arrived, work, timeout))

    def _is_done(self, entry: _Entry) -> bool:
        if entry.work.is_completed():
            return True
        if entry.wait is not None:
            entry.wait.check()
        elif entry.arrived.query():
            entry.wait = self._begin_wait(entry.number, entry.what, entry.timeout)
        return False


def is_capturing() -> bool:
    """Tells whether a CUDA graph is being captured: events cannot be asked about then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def refuse_capture(transport: str) -> None:
    """Raises ExchangeError while a CUDA graph is captured: a replay would use the places of one exchange again."""
    if is_capturing():
        raise ExchangeError(
            f"transport {transport} cannot be captured into a CUDA graph: compile without mode='reduce-overhead', or "
            "choose transport nccl"
        )


def mark(device: torch.device) -> torch.cuda.Event:
    """Returns an event that is done when the GPU has worked off what its current stream holds now."""
    return torch.cuda.current_stream(device).record_event()
