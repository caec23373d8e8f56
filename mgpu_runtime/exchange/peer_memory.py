"""The exchange between GPUs of one machine: rows written straight into the peers' memory by csrc/exchange_cuda.cu.

Everything is queued on streams; the host waits for nothing but growth of the banks, which is rare. Pushes run on a
stream of their own, so that the caller's stream goes on computing the next tensor while one moves.

Why no barrier is needed. A push of the bank that opens now may overwrite results that a peer got two banks ago. It may
only run when that peer has read them:
1. A push waits for the stream that started it and for those that waited since the last start, hence for the wait
   kernels of the bank before. (A bank opens only when everything in the one before has been waited for.)
2. Such a wait kernel ended because every peer's push of the bank before had completed.
3. By 1, that push of the peer waited for all that the peer's streams held when it was started, the readers of results
   two banks ago among them: by the rule of `copy_out`, whoever still wants a result reads it before that start.
So a number posted by a peer says that its streams, not only its host, have come so far.

Why nothing waits in a circle. In the order in which a rank queues its kernels the push of an exchange stands before the
wait for it, and no push waits for a later kernel. So all ranks get on even where a GPU runs one kernel at a time, where
two streams share a hardware queue, or where the host stands still behind a wait kernel because loading a new kernel
waits for the GPU. Ranks that share one GPU take turns on it (time slices); a wait then costs slices, never progress.

A wait that runs out cannot raise where it happens. The kernel notes who is missing in host memory, later kernels return
at once with garbage in the results, and the next start, wait or `check` raises. Call `check` before using what a job
has computed.

CUDA graphs: the number of an exchange and its bank are arguments of its kernels, so a replay would reuse both; capture
is refused.
"""

import ctypes
import logging
import time

import torch
import torch.distributed as dist
from torch import Tensor

from .all2all import DEFAULT_TIMEOUT, All2All, Pending, result_shape
from .board import KEPT, Board
from .errors import ExchangeError, peers_gone, timed_out, unusable
from .layout import Banks, Geometry
from .peer_buffers import NoRoom, PeerBuffers
from .processes import Processes
from .rows import rows_to_all, with_whole_rows
from .stream_order import refuse_capture

FIRST_USE = 60.0  # seconds a wait lasts at least after the banks have grown: new sizes mean kernels to load or tune
_LOOK = 0.5  # seconds between looks at whether the peers' processes live
_LEAVING = 1.0  # seconds the others of a broken exchange are waited for before it is closed
_MAX_PLANS = 256

log = logging.getLogger("mgpu_runtime.exchange")


class PeerMemory(All2All):
    """Writes this rank's rows into the peers' GPU memory and posts counters there. For CUDA tensors.

    Results with `copy_out=False` are to be read on the stream that `wait` was called on, or on others that this one
    waits for before the next start. After `wait`, `x` may be changed on that stream, and freed.
    """

    transport = "csrc"

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, processes: Processes, *, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        """Opens the exchange of a group, on a device with an index.

        Collective; raises ExchangeError on every rank where it cannot work.
        """
        self._buffers: PeerBuffers | None = None  # until they are there, `timeout` has nobody to tell
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout=timeout)
        self.description = "csrc (GPU peer memory)"
        self.device = device
        self._processes = processes
        self._next_look = 0.0
        self._banks = Banks(self.world_size)
        self._plans: dict[tuple[Geometry, tuple[int, int, int]], ctypes.Array] = {}
        self._calls = 0  # exchanges asked for, of which those that found no room were not started
        self._number = 0  # of the exchange started last
        self._waited: dict[torch.cuda.Stream, int] = {}  # by stream: what it waits for, of waits since the last start
        # what pushes may still read: the number of the exchange, the tensor, and who made it
        self._sources: list[tuple[int, Tensor, torch.cuda.Stream]] = []
        self._first_in_grown = 0  # number of the first exchange in banks that have grown, until that is waited for
        self._broken = ""
        self._board = Board.of(group, processes, patience=timeout)
        buffers = PeerBuffers(group, self.device)
        self._stream = torch.cuda.Stream(self.device, priority=-1)  # peers wait for it: ahead of this rank's arithmetic
        self._buffers = buffers
        buffers.set_timeout(timeout)

    @property
    def timeout(self) -> float:
        """Seconds a wait lasts at most. Waits under way take on a longer one; a shorter one is for later waits."""
        return self._timeout

    @timeout.setter
    def timeout(self, timeout: float) -> None:
        self._timeout = timeout
        if self._buffers is not None:
            self._buffers.set_timeout(timeout)

    def check(self) -> None:
        """Raises ExchangeTimeout or PeerGone if a wait has run out on the GPU, ExchangeError if a rank is out of step.

        Does not wait for the GPU.
        """
        if self._broken:
            raise unusable(self._broken)
        failure = self._open_buffers().failure()
        if failure is None:
            return
        self._refuse_unlike()  # which explains better why a rank does not arrive
        what = f"exchange number {failure.number} over csrc"
        gone = [rank for rank in failure.missing if self._processes.is_gone(rank)]
        if gone:
            raise self._break_off(peers_gone(self.rank, what, gone, self._processes.global_ranks))
        stopped = [rank for rank in failure.missing if self._processes.is_stopped(rank)]
        seconds, names = round(failure.seconds, 1), self._processes.global_ranks
        raise self._break_off(timed_out(self.rank, what, seconds, failure.missing, stopped, names))

    def close(self) -> None:
        """Waits for this GPU, and gives the banks back once no other rank can write to them any more.

        The others are waited for, `timeout` seconds at most, as they close theirs. Where one does not, the banks stay
        till the process ends. Results that are views of them are lost.
        """
        seconds = _LEAVING if self._broken else self.timeout
        self._broken = self._broken or "it was closed"
        buffers, self._buffers = self._buffers, None
        board, self._board = self._board, None
        if buffers is not None:
            buffers.leave()
            alone = False
            if board is not None:
                board.leave()
                alone = board.wait_until_all_left(seconds, self._processes)
            if not alone:
                log.warning(
                    "exchange: rank %d keeps %.0f MB of its GPU's memory until it ends, as another rank has not closed "
                    "the exchange and may still write there",
                    self.rank,
                    2 * buffers.bank_bytes / 1e6,
                )
            buffers.close(free=alone)
        if board is not None:
            board.close()
        self._sources.clear()

    def _start(self, geometry: Geometry, x: Tensor) -> Pending:
        if x.device != self.device:
            raise ValueError(f"this exchange moves tensors of {self.device}, got one on {x.device}")
        refuse_capture(self.transport)
        self.check()
        self._look_at_the_others()
        self._compare(geometry, x.dtype)
        reason = f"{geometry.move.value} was not started to its end"
        try:
            pending = self._push(geometry, *with_whole_rows(geometry, x.detach()))
            reason = ""
        except NoRoom:  # all ranks are as they were before
            reason = ""
            raise
        except RuntimeError as error:
            reason = str(error)
            raise
        finally:
            if reason:
                self._break_off(ExchangeError(reason))
        return pending

    def _push(self, geometry: Geometry, x: Tensor, strides: tuple[int, int, int]) -> Pending:
        buffers = self._open_buffers()
        current = torch.cuda.current_stream(self.device)
        bank, offsets = self._banks.place(geometry)
        if max(self._banks.used) > buffers.bank_bytes:
            try:
                self._grow(buffers, current)
            except NoRoom:  # every GPU stands still, so either bank may come next; who is under way is given up
                self._banks = Banks(self.world_size)
                raise
        self._number += 1
        for stream in {current, *self._waited}:  # of those that waited, for whoever reads the results
            self._stream.wait_stream(stream)
        self._waited.clear()
        rows = self._rows(geometry, strides)
        buffers.push(rows, x.data_ptr(), bank, offsets, self._number, self._stream)
        self._sources.append((self._number, x, current))
        return _Arriving(self, geometry, x, bank, offsets[self.rank], self._number, self._stream.record_event())

    def _finish(self, number: int, pushed: torch.cuda.Event, banks: Banks) -> PeerBuffers:
        """Makes the current stream wait for an exchange, and so for those that were started before it."""
        self.check()
        buffers = self._open_buffers()
        current = torch.cuda.current_stream(self.device)
        if self._waited.get(current, 0) < number:
            current.wait_event(pushed)  # first, so that the push has the GPU to itself; and `x` is free after it
            is_first = 0 < self._first_in_grown <= number
            buffers.wait(number, max(self.timeout, FIRST_USE) if is_first else self.timeout, current)
            self._waited[current] = number
            if is_first:
                self._first_in_grown = 0
            # Keeping x until here, in place of record_stream: its memory is free again in the order of the stream, not
            # only when the host sees an event, by when it would have allocated the next layers' tensors.
            for started, x, maker in self._sources:
                if started <= number and maker != current:
                    x.record_stream(self._stream)
            self._sources = [source for source in self._sources if source[0] > number]
        banks.waited()
        return buffers

    def _grow(self, buffers: PeerBuffers, current: torch.cuda.Stream) -> None:
        """Makes room for the open bank on every rank. Collective: sizes are known to all, so all come here together."""
        failure, patience = "", max(self.timeout, FIRST_USE)
        try:
            buffers.wait(self._number, patience, current)
            torch.cuda.synchronize(self.device)
            self.check()
        except RuntimeError as error:
            failure = str(error)
        if buffers.bank_bytes > 0:  # the first banks are those of the self test, where nobody is late
            self._first_in_grown = self._number + 1
        buffers.grow(max(self._banks.used), failure, patience)

    def _rows(self, geometry: Geometry, strides: tuple[int, int, int]) -> ctypes.Array:
        rows = self._plans.get((geometry, strides))
        if rows is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            rows = self._plans[geometry, strides] = rows_to_all(geometry, self.rank, strides)
        return rows

    def _compare(self, geometry: Geometry, dtype: torch.dtype) -> None:
        """Counts a call. Raises ExchangeError where another rank is known to make another one, and writes nothing."""
        self._calls += 1
        if self._board is not None:
            self._board.started(self._calls, geometry, dtype)
            self._refuse_unlike(1)

    def _refuse_unlike(self, last: int = KEPT) -> None:
        """Raises ExchangeError where another rank has made another one of the last calls."""
        board = self._board
        try:
            for call in range(max(1, self._calls - last + 1), self._calls + 1) if board is not None else ():
                board.refuse_unlike(call, f"exchange number {call} over csrc")
        except ExchangeError as error:
            self._break_off(error)
            raise

    def _look_at_the_others(self) -> None:
        """Raises PeerGone if a peer's process has ended, ExchangeError if one is out of step. Not at every call."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK
        self._refuse_unlike()
        gone = [rank for rank in range(self.world_size) if rank != self.rank and self._processes.is_gone(rank)]
        if gone:
            what = f"exchange number {self._number + 1} over csrc"
            raise self._break_off(peers_gone(self.rank, what, gone, self._processes.global_ranks))

    def _break_off(self, error: ExchangeError) -> ExchangeError:
        """Ends this exchange for good, with the waits its kernels are in; the first reason counts."""
        if not self._broken:
            self._broken = str(error)
            self._open_buffers().stop()
        return error

    def _open_buffers(self) -> PeerBuffers:
        assert self._buffers is not None, "a closed exchange is broken, which is looked at first"
        return self._buffers


class _Arriving:
    """An exchange whose push is queued."""

    def __init__(
        self,
        exchange: PeerMemory,
        geometry: Geometry,
        x: Tensor,
        bank: int,
        offset: int,
        number: int,
        pushed: torch.cuda.Event,
    ) -> None:
        self._exchange, self._number, self._banks, self._pushed = exchange, number, exchange._banks, pushed
        self._bank, self._offset, self._size = bank, offset, geometry.result_bytes(exchange.rank)
        self._dtype, self._shape = x.dtype, result_shape(geometry, exchange.rank, x)

    def wait(self) -> Tensor:
        exchange = self._exchange
        buffers = exchange._finish(self._number, self._pushed, self._banks)
        if self._size == 0:  # there may be no bank yet
            return torch.empty(self._shape, dtype=self._dtype, device=exchange.device)
        bank = buffers.bank(self._bank)
        result = bank[self._offset : self._offset + self._size].view(self._dtype).view(self._shape)
        return result.clone() if exchange.copy_out else result
