"""The exchange between processes of one machine: rows copied straight into the peers' memory by csrc/exchange_cpu.c."""

import ctypes
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from . import native
from .agree import gather_texts
from .all2all import DEFAULT_TIMEOUT, All2All, Pending, result_shape
from .errors import ExchangeError, peers_gone, timed_out
from .layout import Banks, Block, Geometry, Move
from .processes import Processes
from .segment import MAX_RANKS, Segment, free_memory

_OPENING = 120.0  # seconds the ranks wait for each other at first; one of them may be compiling
_LOOK = 0.2  # seconds between looks at whether missing ranks still live
_SPIN_NS = 100_000  # a wait this long costs less than going to sleep and being woken
_THREAD_BYTES = 2 << 20  # below this a helper thread costs more than it copies
_STREAM_BYTES = 1 << 20  # from here on copies go past the caches, which the result would not fit in
_FRESH_BYTES = 32 << 20  # from here on malloc takes fresh memory from the system and gives it back
_MAX_PLANS = 256


class _Rows(ctypes.Structure):
    """A Block as csrc/exchange_cpu.c reads it, with the strides of both sides, all in bytes."""

    _fields_ = [
        ("batch", ctypes.c_uint64),
        ("tokens", ctypes.c_uint64),
        ("row_bytes", ctypes.c_uint64),
        ("source_first", ctypes.c_uint64),
        ("source_batch_stride", ctypes.c_uint64),
        ("source_token_stride", ctypes.c_uint64),
        ("target_first", ctypes.c_uint64),
        ("target_batch_stride", ctypes.c_uint64),
        ("target_token_stride", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class _Plan:
    """What follows from an exchange's shapes alone: the rows this rank sends, and those it finds in its bank."""

    sent: ctypes.Array
    received: list[_Rows]  # from the bank into a result, which have one layout
    sent_bytes: int
    result_bytes: int


class SharedMemory(All2All):
    """Copies this rank's rows into the peers' memory, one copy in all, and waits on counters."""

    transport = "csrc"

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        copy_out: bool = True,
        wait_while_busy: bool = False,
    ) -> None:
        """Opens the exchange of a group. Collective.

        Raises ExchangeError where it cannot work; that may be on some ranks only, so ranks must agree before use.
        """
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout=timeout, copy_out=copy_out)
        self.wait_while_busy = wait_while_busy
        self.description = "csrc (shared memory)"
        self._processes = Processes.of(group)
        self._library, self._segments = _open(group, self._processes)
        self._own = self._segments[self.rank]
        self._close = weakref.finalize(self, _release, self._segments, self._own, os.getpid())
        self._slots = (ctypes.c_void_p * self.world_size)(*(part.slot(self.rank) for part in self._segments))
        self._banks = Banks(self.world_size)
        self._plans: dict[tuple[Geometry, tuple[int, int, int]], _Plan] = {}
        self._number = 0  # of the exchange started last
        self._broken = ""
        # With fewer cores than ranks, who spins takes the core from the rank it waits for.
        self._spin = _SPIN_NS if len(os.sched_getaffinity(0)) >= self.world_size else 0

    def close(self) -> None:
        self._broken = self._broken or "it was closed"
        self._close()

    def _start(self, geometry: Geometry, x: Tensor) -> Pending:
        if x.device.type != "cpu":
            raise ValueError(f"this exchange moves tensors of the CPU, got one on {x.device}")
        self._check_usable()
        x, strides = _with_whole_rows(geometry, x)
        plan = self._plan_of(geometry, strides)
        started = False
        try:
            bank, offsets = self._banks.place(geometry)
            self._make_room(bank)
            targets = [part.place(bank, offset) for part, offset in zip(self._segments, offsets, strict=True)]
            in_bank, shape = targets[self.rank], result_shape(geometry, self.rank, x)
            if self.copy_out or plan.result_bytes == 0:
                result = x.new_empty(shape)
                targets[self.rank] = result.data_ptr()  # only the peers' rows must go through the bank
                if plan.result_bytes >= _FRESH_BYTES:
                    self._library.exchange_prefer_large_pages(result.data_ptr(), plan.result_bytes)
            else:
                result = self._own.view(bank, offsets[self.rank], plan.result_bytes, x.dtype, shape)
            self._send(plan, x, targets)
            started = True
        finally:
            if not started:
                self._break_off(f"{geometry.move.value} could not be started")
        return _Arriving(self, geometry.move, self._number, result, plan if self.copy_out else None, in_bank)

    def _send(self, plan: _Plan, x: Tensor, targets: Sequence[int]) -> None:
        self._number = (self._number + 1) & 0xFFFFFFFF
        self._library.exchange_send(
            plan.sent,
            x.data_ptr(),
            (ctypes.c_void_p * self.world_size)(*targets),
            self._slots,
            self.rank,
            self.world_size,
            self._number,
            max(1, min(torch.get_num_threads(), plan.sent_bytes // _THREAD_BYTES)),
            plan.sent_bytes >= _STREAM_BYTES,
        )

    def _plan_of(self, geometry: Geometry, strides: tuple[int, int, int]) -> _Plan:
        plan = self._plans.get((geometry, strides))
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            ranks = range(self.world_size)
            sent = [_rows_sent(geometry.block(self.rank, rank, strides), strides) for rank in ranks]
            plan = self._plans[geometry, strides] = _Plan(
                sent=(_Rows * self.world_size)(*sent),
                received=[
                    _rows_in_place(geometry.block(rank, self.rank, (0, 0, 0))) for rank in ranks if rank != self.rank
                ],
                sent_bytes=sum(rows.batch * rows.tokens * rows.row_bytes for rows in sent),
                result_bytes=geometry.result_bytes(self.rank),
            )
        return plan

    def _make_room(self, bank: int) -> None:
        """Has the pages for all results of a bank present: a lack of memory is an error here, and a crash later."""
        needs = [(part, size) for part, size in zip(self._segments, self._banks.used, strict=True)]
        if not any(part.lacks(bank, size) for part, size in needs):
            return
        if any(size > part.bank_bytes for part, size in needs):
            raise self._break_off("the results are larger than this machine's memory")
        more, free = self._own.to_come(bank, self._banks.used[self.rank]), free_memory()
        if more > free:
            raise self._break_off(
                f"it needs {more / 1e6:.0f} MB more memory, and {free / 1e6:.0f} MB are free: use fewer tokens, or "
                "close other programs"
            )
        for part, size in needs:
            failure = part.make_present(self._library.exchange_populate, bank, size)
            if failure:
                raise self._break_off(f"{size / 1e6:.0f} MB for results cannot be had: {os.strerror(failure)}")

    def _finish(self, number: int, move: Move) -> None:
        """Waits until all ranks have posted an exchange. Raises ExchangeTimeout, PeerGone or ExchangeError."""
        self._check_usable()
        what = f"{move.value} number {number} over csrc"
        arrived = False
        try:
            self._wait(number, what)
            self._banks.waited()
            arrived = True
        finally:
            if not arrived:
                self._break_off(f"{what} was not waited for to its end")

    def _wait(self, number: int, what: str) -> None:
        until, asked = time.monotonic() + self.timeout, False
        while True:
            missing = self._missing(number, min(until - time.monotonic(), self.timeout / 4, _LOOK))
            if not missing:
                return
            self._check_alive(number, missing, what)
            if time.monotonic() < until:
                if self.wait_while_busy and not asked:
                    self._busy(missing)  # from here on it is asked what they have done since
                    asked = True
            elif self.wait_while_busy and self._busy(missing):
                until += self.timeout
            else:
                stopped = [rank for rank in missing if self._processes.is_stopped(rank)]
                error = timed_out(self.rank, what, self.timeout, missing, stopped)
                self._break_off(str(error))
                raise error

    def _missing(self, number: int, seconds: float) -> list[int]:
        left = int(max(0.0, seconds) * 1e9)
        bits = self._library.exchange_wait(self._own.slot(0), self.world_size, number, left, self._spin)
        return [rank for rank in range(self.world_size) if bits >> rank & 1]

    def _busy(self, ranks: Sequence[int]) -> bool:
        return all([self._processes.was_busy(rank) and not self._segments[rank].sleeps for rank in ranks])

    def _check_alive(self, number: int, ranks: Sequence[int], what: str) -> None:
        """Raises PeerGone or ExchangeError if one of the ranks will never arrive."""
        for rank in ranks:
            note, gone = self._segments[rank].note, self._processes.is_gone(rank)
            if not (note or gone) or rank not in self._missing(number, 0.0):  # it may have arrived before its end
                continue
            error = peers_gone(self.rank, what, [rank])
            if note:
                error = ExchangeError(f"rank {self.rank} cannot finish {what}: on rank {rank}, {note}")
            self._break_off(str(error))
            raise error

    def _break_off(self, reason: str) -> ExchangeError:
        """Ends this exchange for good and tells the peers; the first reason counts."""
        if not self._broken:
            self._broken = self._own.note = reason
        return ExchangeError(reason)

    def _check_usable(self) -> None:
        if self._broken:
            raise ExchangeError(f"this exchange cannot be used any more: {self._broken}")


class _Arriving:
    """An exchange whose own rows are sent; `to_copy` tells which rows to take from the bank into the result."""

    def __init__(
        self, exchange: SharedMemory, move: Move, number: int, result: Tensor, to_copy: _Plan | None, in_bank: int
    ) -> None:
        self._exchange, self._move, self._number = exchange, move, number
        self._result, self._to_copy, self._in_bank = result, to_copy, in_bank

    def wait(self) -> Tensor:
        exchange, plan = self._exchange, self._to_copy
        exchange._finish(self._number, self._move)
        for rows in plan.received if plan else ():
            exchange._library.exchange_copy(
                ctypes.byref(rows), self._in_bank, self._result.data_ptr(), plan.result_bytes >= _STREAM_BYTES
            )
        return self._result


def _open(group: dist.ProcessGroup, processes: Processes) -> tuple[ctypes.CDLL, list[Segment]]:
    """Returns the library and every rank's memory. Collective; raises ExchangeError, maybe on some ranks only."""
    rank, own, reason = dist.get_rank(group), None, ""
    try:
        library = _declared(native.cpu_library())
        own = Segment.create()
        offer = f"{own.descriptor} {own.token}"
    except (ExchangeError, OSError) as error:
        reason = str(error)
        offer = f"! {reason}"
    segments: list[Segment] = []
    try:
        offers = gather_texts(group, offer, timeout=_OPENING)
        if reason:
            raise ExchangeError(reason)
        for peer, text in enumerate(offers):
            segments.append(own if peer == rank else _of_peer(peer, text, processes))
        return library, segments
    except (ExchangeError, OSError, RuntimeError) as error:
        for part in {own, *segments} - {None}:
            part.close()
        raise error if isinstance(error, ExchangeError) else ExchangeError(str(error)) from error


def _of_peer(rank: int, offer: str, processes: Processes) -> Segment:
    first, _, rest = offer.partition(" ")
    if first == "!":
        raise ExchangeError(f"rank {rank}: {rest}")
    pid = processes.pid(rank)
    if pid is None:
        raise ExchangeError(f"the process of rank {rank} is on another host, or in another container")
    if rank >= MAX_RANKS:
        raise ExchangeError(f"more than {MAX_RANKS} ranks")
    try:
        return Segment.of_peer(pid, int(first), rest)
    except OSError as error:
        raise ExchangeError(f"the memory of rank {rank} (process {pid}) cannot be opened: {error}") from error


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    word, size, address = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
    library.exchange_send.argtypes = [address] * 4 + [word] * 4 + [ctypes.c_int]
    library.exchange_send.restype = None
    library.exchange_copy.argtypes = [address] * 3 + [ctypes.c_int]
    library.exchange_copy.restype = None
    library.exchange_wait.argtypes = [address, word, word, ctypes.c_int64, ctypes.c_int64]
    library.exchange_wait.restype = size
    library.exchange_populate.argtypes = [address, size]
    library.exchange_prefer_large_pages.argtypes = [address, size]
    library.exchange_prefer_large_pages.restype = None
    library.exchange_populate.restype = ctypes.c_int
    return library


def _release(segments: list[Segment], own: Segment, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the same memory: it is not the child's to declare closed
        own.note = own.note or "it was closed there"
    for part in segments:
        part.close()


def _with_whole_rows(geometry: Geometry, x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Returns x, or a copy whose rows are contiguous, with its strides of (B, T, H) in bytes."""
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    one_head = geometry.move is not Move.ALLGATHER and max(geometry.heads) <= 1
    if not _is_dense(x, 3 if one_head else 2):
        x = x.contiguous()
    strides, size = x.stride(), x.element_size()
    head_stride = 0 if geometry.move is Move.ALLGATHER else strides[2]
    return x, (strides[0] * size, strides[1] * size, head_stride * size)


def _is_dense(x: Tensor, first_dim: int) -> bool:
    """Tells whether the dims from `first_dim` on lie one after another without gaps."""
    dense = 1
    for size, stride in zip(reversed(x.shape[first_dim:]), reversed(x.stride()[first_dim:]), strict=True):
        if size != 1 and stride != dense:
            return x.numel() == 0
        dense *= size
    return True


def _rows_sent(block: Block, strides: tuple[int, int, int]) -> _Rows:
    return _Rows(
        batch=block.batch,
        tokens=block.tokens,
        row_bytes=block.row_bytes,
        source_first=block.source_first,
        source_batch_stride=strides[0],
        source_token_stride=strides[1],
        target_first=block.target_first,
        target_batch_stride=block.target_batch_stride,
        target_token_stride=block.target_token_stride,
    )


def _rows_in_place(block: Block) -> _Rows:
    rows = _rows_sent(block, (block.target_batch_stride, block.target_token_stride, 0))
    rows.source_first = block.target_first
    return rows
