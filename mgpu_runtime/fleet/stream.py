"""What a running job says, as it says it, and its result."""

import os
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .errors import FleetError
from .owner import check_owner


@dataclass(frozen=True)
class Event:
    """Something a rank said: kind is progress, preview, latent, frames or log; data is what the call was given."""

    kind: str
    job_id: str
    rank: int
    data: dict


@dataclass
class Mailbox:
    """The server's side of one job: events, and at last a result or an error, in the order they came."""

    job_id: str
    is_cancelled: bool = False
    pid: int = field(default_factory=os.getpid)
    _items: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)

    def put_event(self, event: Event) -> None:
        """Adds an event."""
        self._items.put(event)

    def put_result(self, result: object) -> None:
        """Ends the job with its result."""
        self._items.put((result, None))

    def put_error(self, error: FleetError) -> None:
        """Ends the job with an error."""
        self._items.put((None, error))

    def take(self, timeout: float | None) -> "Event | tuple[object, FleetError | None] | None":
        """Returns the next event, or the end as (result, error), or None after `timeout` seconds.

        Raises FleetError in a forked child, where nothing would ever come.
        """
        check_owner(self.pid)
        try:
            return self._items.get(timeout=timeout)
        except queue.Empty:
            return None


class Stream:
    """The events of one job, for one reader; leaving it early cancels the job.

    Iterating, `next_event` and `drain` raise what the job failed with: SymmetricRunnerError, AsymmetricRunnerError,
    JobCancelled or FleetError. A wait ends at the latest when the supervisor ends, or with the job's own time limit.
    """

    def __init__(self, mailbox: Mailbox, cancel: Callable[[str], None], *, owner: object) -> None:
        """Reads the mailbox; a stream in use keeps its owner, the controller, and so the fleet."""
        self._owner = owner
        self._mailbox = mailbox
        self._cancel = cancel
        self._end: tuple[object, FleetError | None] | None = None

    @property
    def job_id(self) -> str:
        """The name of the job."""
        return self._mailbox.job_id

    @property
    def done(self) -> bool:
        """Whether the end of the job was read from this stream."""
        return self._end is not None

    @property
    def result(self) -> object:
        """What rank 0 returned; raises the job's error, or FleetError while the job is not done."""
        if self._end is None:
            raise FleetError(f"Job {self.job_id} has no result yet; read its stream to the end, or call drain().")
        result, error = self._end
        if error is not None:
            raise error
        return result

    def next_event(self, timeout: float | None = None) -> Event | None:
        """Waits for the next event at most `timeout` seconds (None: for as long as the job may take).

        Returns None when none came in time, and at the end of the job, which `done` tells.
        """
        if self._end is None:
            item = self._mailbox.take(timeout)
            if isinstance(item, Event) or item is None:
                return item
            self._end = item
        if self._end[1] is not None:
            raise self._end[1]
        return None

    def drain(self, timeout: float | None = None) -> object:
        """Reads to the end and returns the result; FleetError when it is not there after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if self.next_event(left) is None and not self.done and left == 0.0:
                raise FleetError(
                    f"Job {self.job_id} did not end within {timeout:g} s. Allow it more time, or cancel it."
                )
        return self.result

    def cancel(self) -> None:
        """Asks all ranks to leave the job at the next step boundary; read on to see it end."""
        if self._end is None and not self._mailbox.is_cancelled:
            self._mailbox.is_cancelled = True
            self._cancel(self.job_id)

    def close(self) -> None:
        """Cancels the job if it is not done; its events are not read any more."""
        self.cancel()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        event = self.next_event()
        if event is None:
            raise StopIteration
        return event

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
