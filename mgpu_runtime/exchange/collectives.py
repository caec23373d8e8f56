"""The exchange over torch.distributed's collectives: NCCL on CUDA, gloo on the CPU."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from .agree import PATIENCE, device_of, gather_texts, wait_for
from .all2all import DEFAULT_TIMEOUT, All2All, Done, Pending, result_shape
from .board import Board
from .errors import ExchangeError, ExchangeTimeout, unusable
from .first_calls import FirstCalls
from .layout import Geometry, Move
from .posting import Scratch, Sent, collect, trade
from .processes import Processes
from .stream_order import StreamOrder, is_capturing, mark
from .waiting import Wait

OPEN_TIMEOUT = 60.0  # seconds


class Collectives(All2All):
    """Exchanges by one collective of bytes over a process group.

    On the CPU a rank that does not arrive raises ExchangeTimeout in `wait`. On CUDA nothing waits on the host: see
    `StreamOrder` for what is promised there. Results are tensors of their own always.
    """

    transport = "collectives"

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        device: torch.device | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        wait_while_busy: bool = False,
        processes: Processes | None = None,
        board: Board | None = None,
        has_all_to_all: bool = True,
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout=timeout)
        self.group = group
        self.device = device or device_of(group)
        self.transport = _backend(group, self.device)
        self.description = self.transport
        self._wait_while_busy = wait_while_busy
        self._processes, self._board = processes, board
        self._first_calls: FirstCalls | None = None
        self._has_all_to_all = has_all_to_all
        self._order = StreamOrder(self._begin_wait) if self.device.type == "cuda" else None
        self._scratch = Scratch(keep=8 if self.device.type == "cpu" else 0)  # CUDA's allocator keeps memory itself
        self._count = 0
        self._broken = ""

    @classmethod
    def open(
        cls,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        processes: Processes | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        wait_while_busy: bool = False,
    ) -> Self:
        """Makes the exchange of a group whose collectives take tensors of `device`. Collective.

        `processes` are the group's, where they are known. Raises ExchangeError where the group has no collectives for
        the device, and what `gather_texts` raises where a rank does not take part.
        """
        _backend(group, device)
        if processes is None:
            processes = Processes.of(group)
        exchange = cls(group, device=device, timeout=timeout, wait_while_busy=wait_while_busy, processes=processes)
        exchange._board = Board.of(group, processes, patience=timeout)
        if exchange._board is None:
            exchange._first_calls = FirstCalls.of(group)
        exchange._has_all_to_all = _has_all_to_all(group, device, processes, timeout)
        return exchange

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None
        self._scratch = Scratch(keep=0)
        self._broken = self._broken or "it has been closed"

    def _start(self, geometry: Geometry, x: Tensor) -> Pending:
        self._check(x)
        x = x.detach().resolve_conj().resolve_neg()  # the bytes that lie there are another number's
        what = self.begin(geometry, x.dtype)
        if x.numel() == 0 and not any(geometry.result_bytes(rank) for rank in range(self.world_size)):
            return Done(x.new_empty(result_shape(geometry, self.rank, x)))
        both_ways = self._has_all_to_all and geometry.move is not Move.ALLGATHER
        watched = self._order is not None and not is_capturing()
        try:
            if watched:
                self._order.make_room()
                arrived = mark(x.device)
            sent = (trade if both_ways else collect)(self.group, geometry, self.rank, x, self._scratch)
        except (RuntimeError, OSError) as error:  # torch's word for a rank that has left the group is RuntimeError
            raise self._fail(error, self._count, what) from error
        if watched:
            self._order.add(self._count, what, arrived, sent.work, self.timeout)
        return _Posted(self, sent, self._count, what)

    def begin(self, geometry: Geometry, dtype: torch.dtype) -> str:
        """Counts an exchange and says on every rank what it is; returns that for messages.

        Raises ExchangeError where another rank's is another one: gloo would end the process on its sizes.
        """
        self._refuse_if_broken()
        self._count += 1
        what = f"{geometry.move.value} number {self._count} over {self.transport}"
        try:
            if self._board is not None:
                self._board.started(self._count, geometry, dtype)
                self._board.refuse_unlike(self._count, what)
            elif self._first_calls is not None:
                self._first_calls.meet(
                    self._count,
                    geometry,
                    dtype,
                    what,
                    lambda missing: self._begin_wait(self._count, what, missing=missing),
                )
        except ExchangeError as error:
            self._fail(error, self._count, what)
            raise
        return what

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise unusable(self._broken)

    def _check(self, x: Tensor) -> None:
        if x.device.type != self.device.type:
            raise ValueError(f"{self.transport} moves {self.device.type} tensors, got one on {x.device}")

    def _fail(self, error: RuntimeError | OSError, number: int, what: str) -> ExchangeError:
        """Closes the exchange to further use and returns what to raise."""
        if not isinstance(error, ExchangeError):
            error = self._explained(error, number, what)
        self._broken = str(error)
        return error

    def _explained(self, error: RuntimeError | OSError, number: int, what: str) -> ExchangeError:
        """Returns an error that names the ranks that are at odds, or have ended, if that is behind it."""
        try:
            if self._board is not None:
                self._board.refuse_unlike(number, what)
            self._begin_wait(number, what).check_gone()
        except ExchangeError as reason:
            return reason
        return ExchangeError(f"rank {self.rank} cannot finish {what}: {error}")

    def _finish(self, work: dist.Work, number: int, what: str) -> None:
        """Waits for a collective; the exchange is broken when that fails."""
        self._refuse_if_broken()
        try:
            if self._order is not None:
                work.wait()  # orders the stream; the host does not wait
            else:
                self._poll(work, number, what)
        except (RuntimeError, OSError) as error:
            raise self._fail(error, number, what) from error

    def _poll(self, work: dist.Work, number: int, what: str) -> None:
        """Waits on the host, by looking: gloo's own wait would end the whole group when its time is up."""
        if work.is_completed():
            work.wait()
            return
        board, wait = self._board, self._begin_wait(number, what)
        if board is not None:
            board.wait_begins()
        try:
            while not work.is_completed():
                wait.check()
                time.sleep(min(1e-3, max(2e-5, wait.elapsed() / 20)))  # never a twentieth late
        finally:
            if board is not None:
                board.wait_ends()
        work.wait(timedelta(seconds=1))  # raises what the collective met

    def _begin_wait(
        self, number: int, what: str, least: float = 0.0, missing: Callable[[], Sequence[int]] = tuple
    ) -> Wait:
        """Begins to wait for an exchange, for `least` seconds or the timeout, whichever is more.

        `missing` tells who has not come where no board does.
        """
        board = self._board

        def missing_on_board() -> list[int]:
            board.refuse_unlike(number, what)
            return board.missing(number)

        return Wait(
            self.rank,
            what,
            max(self.timeout, least),
            missing_on_board if board is not None else missing,
            processes=self._processes,
            wait_while_busy=self._wait_while_busy,
            waiting=board.waits if board is not None else (lambda rank: False),
            stopped_after=self._stopped_after,
        )


class _Posted:
    """A collective on its way."""

    def __init__(self, exchange: Collectives, sent: Sent, number: int, what: str) -> None:
        self._exchange, self._sent, self._number, self._what = exchange, sent, number, what

    def wait(self) -> Tensor:
        self._exchange._finish(self._sent.work, self._number, self._what)
        return self._sent.result()


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Returns the name of what moves a group's tensors of a device. Raises ExchangeError where nothing does it well."""
    try:
        name = group._get_backend(device).name().lower()
    except RuntimeError as error:
        raise ExchangeError(f"the process group has no backend for {device.type} tensors") from error
    if device.type == "cuda" and name == "gloo":  # which knows CUDA tensors, but copies them through the CPU
        raise ExchangeError("the process group's backend is gloo; make it with the backend nccl")
    return name


def _has_all_to_all(
    group: dist.ProcessGroup, device: torch.device, processes: Processes | None = None, patience: float = PATIENCE
) -> bool:
    """Tells, the same on every rank, whether the group's backend has a single-tensor all-to-all; gloo by its version.

    Collective. Raises ExchangeError where a rank is missing.
    """
    what = "a first all-to-all"
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    sent = torch.full((world_size,), rank, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    try:
        wait = Wait(rank, what, OPEN_TIMEOUT, lambda: (), processes=processes, stopped_after=patience)
        wait_for(dist.all_to_all_single(received, sent, group=group, async_op=True), wait)
        works = received.tolist() == list(range(world_size))
    except RuntimeError as error:
        # A peer that is gone must not be taken for a missing feature; one that has another version may be.
        if "support" not in str(error) and (not isinstance(error, ExchangeTimeout) or error.missing):
            raise
        works = False
    timeout = 2 * OPEN_TIMEOUT  # others may have waited in vain before they come here
    said = gather_texts(group, "yes" if works else "no", timeout=timeout, processes=processes, patience=patience)
    return all(text == "yes" for text in said)
