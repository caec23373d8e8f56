"""How long a rank waits for the others, and what it says when it stops waiting."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .errors import ExchangeError, peers_gone, timed_out

if TYPE_CHECKING:
    from .processes import Processes  # which waits itself

LOOK = 0.25  # seconds between looks at the other processes
GRACE = 1.0  # seconds for what a rank sent before its process ended to arrive


class Wait:
    """One wait for other ranks. Whoever waits calls `check` now and then; it raises when waiting is over.

    `missing` returns the ranks that have not arrived, as far as it can tell. With `wait_while_busy` it goes on for
    another timeout where every missing rank is known, works, and (`waiting`) does not itself wait for others. With
    `stopped_after` it ends before the timeout where a rank's process has been stopped for so many seconds.
    `global_ranks` are the members' ranks in the world, where `processes` do not tell them.
    """

    def __init__(
        self,
        rank: int,
        what: str,
        timeout: float,
        missing: Callable[[], Sequence[int]],
        *,
        processes: "Processes | None" = None,
        wait_while_busy: bool = False,
        waiting: Callable[[int], bool] = lambda rank: False,
        stopped_after: float | None = None,
        global_ranks: Sequence[int] = (),
    ) -> None:
        self._rank, self._what, self._timeout = rank, what, timeout
        self._missing, self._waiting = missing, waiting
        self._processes, self._wait_while_busy = processes, wait_while_busy
        self._began = time.monotonic()
        self._deadline = self._began + timeout
        self._next_look = self._began + LOOK
        self._asked: set[int] = set()
        self._first_gone: float | None = None
        self._stopped_after = stopped_after
        self._stopped_since: dict[int, float] = {}  # by rank
        self._global_ranks = global_ranks if processes is None else processes.global_ranks

    def elapsed(self) -> float:
        """Returns the seconds since this wait began."""
        return time.monotonic() - self._began

    def check(self) -> None:
        """Returns while waiting makes sense. Raises PeerGone or ExchangeTimeout when it does not any more."""
        now = time.monotonic()
        if now < self._next_look and now < self._deadline:
            return
        self._next_look = now + LOOK
        missing = list(self._missing())
        self._raise_if_gone(missing)
        self._raise_if_stopped(now)
        if now >= self._deadline:
            if not (self._wait_while_busy and self._all_busy(missing)):
                raise self._over(missing)
            self._deadline = now + self._timeout
        elif self._wait_while_busy and self._processes is not None:
            for rank in set(missing) - self._asked:  # from here on it is asked what they have done since
                self._processes.was_busy(rank)
                self._asked.add(rank)

    def check_gone(self) -> None:
        """Raises PeerGone where the process of another rank has ended or ends just now: its sockets close first."""
        for _ in range(10 if self._processes is not None else 0):
            gone = self._gone()
            if gone:
                raise peers_gone(self._rank, self._what, gone, self._global_ranks)
            time.sleep(0.05)

    def _raise_if_gone(self, missing: list[int]) -> None:
        gone = self._gone()
        if gone and self._first_gone is None:
            self._first_gone = time.monotonic()
        lost = [rank for rank in gone if rank in missing]
        if not lost and gone and time.monotonic() - self._first_gone > GRACE:
            lost = gone
        if lost:
            raise peers_gone(self._rank, self._what, lost, self._global_ranks)

    def _raise_if_stopped(self, now: float) -> None:
        if self._stopped_after is None or self._processes is None:
            return
        stopped = [rank for rank in self._others() if self._processes.is_stopped(rank)]
        self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in stopped}
        long = [rank for rank, since in self._stopped_since.items() if now - since >= self._stopped_after]
        if long:
            raise timed_out(self._rank, self._what, self._stopped_after, long, long, self._global_ranks)

    def _gone(self) -> list[int]:
        processes = self._processes
        return [] if processes is None else [rank for rank in self._others() if processes.is_gone(rank)]

    def _all_busy(self, missing: list[int]) -> bool:
        processes = self._processes
        if processes is None or not missing:
            return False
        busy = [processes.was_busy(rank) and not self._waiting(rank) for rank in missing]  # each must be asked
        return all(busy)

    def _over(self, missing: list[int]) -> ExchangeError:
        processes = self._processes
        stopped = [] if processes is None else [r for r in missing or self._others() if processes.is_stopped(r)]
        return timed_out(self._rank, self._what, self._timeout, missing or stopped, stopped, self._global_ranks)

    def _others(self) -> list[int]:
        assert self._processes is not None
        return [rank for rank in range(self._processes.world_size) if rank != self._rank]
