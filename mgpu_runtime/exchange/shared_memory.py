"""The exchange between processes of one machine: rows copied straight into the peers' memory by csrc/exchange_cpu.c."""

import ctypes
import hashlib
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from .all2all import DEFAULT_TIMEOUT, All2All, Make, Once, Pending, check_memory, result_shape
from .errors import ExchangeError, peers_gone, ranks, timed_out, unusable
from .layout import Banks, Geometry, Move, starts
from .processes import Processes
from .rows import Rows, rows_in_place, rows_sent, with_whole_rows
from .segment import BANKS, Segment, free_memory
from .shared_opening import open_segments

_LOOK = 0.2  # seconds between looks at whether missing ranks still live
_SPIN_NS = 100_000  # a wait this long costs less than going to sleep and being woken
_THREAD_BYTES = 2 << 20  # below this a helper thread costs more than it copies
_STREAM_BYTES = 1 << 20  # from here on copies go past the caches, which the result would not fit in
_FRESH_BYTES = 32 << 20  # from here on malloc takes fresh memory from the system and gives it back
_MAX_PLANS = 256
_64_BITS = (1 << 64) - 1
_MULTIPLIER = 6364136223846793005  # odd: hashes of calls in another order differ


@dataclass(frozen=True)
class _Plan:
    """What follows from an exchange's shapes alone: the rows this rank sends, and those it finds in its bank."""

    sent: list[Rows]  # in turn
    received: list[Rows]  # from the bank into a result, which have one layout
    sent_bytes: int
    result_bytes: int
    hash: int  # of what all ranks must agree on; 64 bits


class SharedMemory(All2All):
    """Copies this rank's rows into the peers' memory, one copy in all, and waits on counters.

    Where a rank writes follows from the calls it has made so far, so each posts a hash of them with every exchange.
    Who waits compares it with its own: a rank that is out of step would have written to other places.

    `close` from another thread, or from a signal handler, ends a wait with ExchangeError.
    """

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
        self._library, self._segments = open_segments(group, self._processes)
        self._own = self._segments[self.rank]
        self._close = weakref.finalize(self, _release, self._segments, self._own, os.getpid())
        self._slots = [part.slot(self.rank) for part in self._segments]
        self._turns = [(self.rank + 1 + turn) % self.world_size for turn in range(self.world_size)]  # the own rank last
        self._banks = Banks(self.world_size)
        self._plans: dict[tuple[Geometry, torch.dtype, tuple[int, int, int]], _Plan] = {}
        self._maps = tuple(part.mapping for part in self._segments)
        self._number = 0  # of the exchange started last
        self._calls = 0  # the hash of all calls
        self._is_making = False  # whether pieces of an exchange are being made
        self._strays = (ctypes.c_uint64 * 1)()
        self._broken = ""
        # With fewer cores than ranks, who spins takes the core from the rank it waits for.
        self._spin = _SPIN_NS if len(os.sched_getaffinity(0)) >= self.world_size else 0

    def close(self) -> None:
        self._broken = self._broken or "it was closed"
        self._maps = ()
        self._close()

    def _refused(self) -> None:
        self._tell_apart(1)

    def _start_made(self, make: Make, tokens: tuple[int, ...], num_heads: int | None) -> Pending:
        if not all(tokens):  # who has nothing of it has no tokens to be made
            return super()._start_made(make, tokens, num_heads)
        first = self._turns[0]
        try:
            x = make(starts(tokens)[first], tokens[first])
            _check_piece(x, x, tokens[first])
            whole = torch.Size((x.shape[0], sum(tokens), *x.shape[2:]))
            shares = self._shares(Move.GATHER_HEADS, whole, tokens, num_heads)
        except ValueError:
            self._refused()
            raise
        return Once(
            self._start(Geometry(Move.GATHER_HEADS, x.shape[0], *shares, x.shape[3] * x.element_size()), x, make)
        )

    def _start(self, geometry: Geometry, x: Tensor, make: Make | None = None) -> Pending:
        """Starts an exchange of x; with `make`, x holds the tokens of the first peer in turn."""
        if x.device.type != "cpu":
            self._refused()
            raise ValueError(f"this exchange moves tensors of the CPU, got one on {x.device}")
        maps, started, failure = self._maps, False, ""  # the maps before the check, as another thread may close
        self._check_usable()
        self._refuse_in_make()
        try:
            x, strides = with_whole_rows(geometry, x)
            plan = self._plan_of(geometry, x.dtype, strides)
            bank, offsets = self._banks.place(geometry, in_pieces=make is not None)
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
            self._tell_apart(plan.hash + bank + (0 if make is None else BANKS))
            self._number = (self._number + 1) & 0xFFFFFFFF
            if make is None:
                self._send(self._turns, plan.sent, x, targets, plan.sent_bytes)
            else:
                self._send_pieces(geometry, x, make, targets, plan.sent_bytes)
            started = True
        except (RuntimeError, MemoryError) as error:  # torch's words for memory that cannot be had
            failure = f": {error}"
            raise
        finally:
            if not started:
                self._break_off(f"{geometry.move.value} could not be started{failure}")
        return _Arriving(self, geometry, result, plan if self.copy_out else None, in_bank, maps)

    def _refuse_in_make(self) -> None:
        """Raises ExchangeError in the middle of `_send_pieces`, whose posts another exchange would overtake."""
        if self._is_making:
            raise self._break_off("what makes the tokens of a gather_heads used the exchange itself")

    def _tell_apart(self, call: int) -> None:
        self._calls = (self._calls * _MULTIPLIER + call) & _64_BITS

    def _send_pieces(self, geometry: Geometry, x: Tensor, make: Make, targets: Sequence[int], sent_bytes: int) -> None:
        """Sends x to the first peer in turn, and what is made for each of the others then."""
        like, first = x, starts(geometry.tokens)
        for turn, rank in enumerate(self._turns):
            if turn:
                self._is_making = True
                try:
                    x = make(first[rank], geometry.tokens[rank])
                finally:
                    self._is_making = False
                _check_piece(x, like, geometry.tokens[rank])
            x, strides = with_whole_rows(geometry, x)
            block = replace(geometry.block(self.rank, rank, strides), source_first=0)
            self._send([rank], [rows_sent(block, strides)], x, targets, sent_bytes)

    def _send(
        self, turns: Sequence[int], rows: Sequence[Rows], x: Tensor, targets: Sequence[int], sent_bytes: int
    ) -> None:
        """Sends rows of x to ranks, one after the other; `sent_bytes` of the whole exchange tell how."""
        count = len(turns)
        self._library.exchange_send(
            (Rows * count)(*rows),
            x.data_ptr(),
            (ctypes.c_void_p * count)(*(targets[rank] for rank in turns)),
            (ctypes.c_void_p * count)(*(self._slots[rank] for rank in turns)),
            count,
            self._number,
            self._calls,
            max(1, min(torch.get_num_threads(), sent_bytes // _THREAD_BYTES)),
            sent_bytes >= _STREAM_BYTES,
        )

    def _plan_of(self, geometry: Geometry, dtype: torch.dtype, strides: tuple[int, int, int]) -> _Plan:
        plan = self._plans.get((geometry, dtype, strides))
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            ranks = range(self.world_size)
            sent = [rows_sent(geometry.block(self.rank, rank, strides), strides) for rank in self._turns]
            plan = self._plans[geometry, dtype, strides] = _Plan(
                sent=sent,
                received=[
                    rows_in_place(geometry.block(rank, self.rank, (0, 0, 0))) for rank in ranks if rank != self.rank
                ],
                sent_bytes=sum(rows.batch * rows.tokens * rows.row_bytes for rows in sent),
                result_bytes=geometry.result_bytes(self.rank),
                hash=int.from_bytes(hashlib.sha256(repr((geometry, dtype)).encode()).digest()[:8]),
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

    def _finish(self, pending: "_Arriving") -> None:
        """Waits until all ranks have posted an exchange. Raises ExchangeTimeout, PeerGone or ExchangeError."""
        self._check_usable()
        self._refuse_in_make()
        what = f"{pending.geometry.move.value} number {pending.number} over csrc"
        arrived = False
        try:
            self._wait(pending, what)
            self._banks.waited()
            arrived = True
        finally:
            if not arrived:
                self._break_off(f"{what} was not waited for to its end")

    def _wait(self, pending: "_Arriving", what: str) -> None:
        until, asked = time.monotonic() + self.timeout, False
        stopped_since: float | None = None  # as seen from here: this rank may have been stopped as well
        while True:
            missing = self._missing(pending, min(until - time.monotonic(), self.timeout / 4, _LOOK), what)
            if not missing:
                return
            self._check_usable()  # it may have been closed meanwhile
            self._check_alive(pending, missing, what)
            stopped = [rank for rank in missing if self._processes.is_stopped(rank)]
            stopped_since = (stopped_since or time.monotonic()) if stopped else None
            if self._stopped_after is not None and stopped and time.monotonic() - stopped_since >= self._stopped_after:
                raise self._timed_out(what, self._stopped_after, stopped, stopped)
            if time.monotonic() < until:
                if self.wait_while_busy and not asked:
                    self._busy(missing)  # from here on it is asked what they have done since
                    asked = True
            elif self.wait_while_busy and self._busy(missing):
                until += self.timeout
            else:
                raise self._timed_out(what, self.timeout, missing, stopped)

    def _timed_out(self, what: str, seconds: float, missing: Sequence[int], stopped: Sequence[int]) -> ExchangeError:
        error = timed_out(self.rank, what, seconds, missing, stopped, self._processes.global_ranks)
        self._break_off(str(error))
        return error

    def _missing(self, pending: "_Arriving", seconds: float, what: str) -> list[int]:
        """Returns who has not posted an exchange `seconds` later. Raises ExchangeError for ranks out of step."""
        left, slots = int(max(0.0, seconds) * 1e9), self._own.slot(0)
        bits = self._library.exchange_wait(
            slots, self.world_size, pending.number, pending.calls, self._strays, left, self._spin
        )
        if self._strays[0]:
            raise self._break_off(_out_of_step(self.rank, what, self._ranks_in(self._strays[0]), pending.geometry))
        return self._ranks_in(bits) if bits else []

    def _ranks_in(self, bits: int) -> list[int]:
        return [rank for rank in range(self.world_size) if bits >> rank & 1]

    def _busy(self, ranks: Sequence[int]) -> bool:
        return all([self._processes.was_busy(rank) and not self._segments[rank].sleeps for rank in ranks])

    def _check_alive(self, pending: "_Arriving", missing: Sequence[int], what: str) -> None:
        """Raises PeerGone or ExchangeError if one of the missing ranks will never arrive."""
        notes = {rank: self._segments[rank].note for rank in missing}
        gone = [rank for rank in missing if not notes[rank] and self._processes.is_gone(rank)]
        if not gone and not any(notes.values()):
            return
        still = self._missing(pending, 0.0, what)  # who is gone may have arrived before its end
        lost, told = [rank for rank in gone if rank in still], [rank for rank in still if notes.get(rank)]
        if lost:  # what others noted follows from it
            error: ExchangeError = peers_gone(self.rank, what, lost, self._processes.global_ranks)
        elif told:
            error = ExchangeError(f"rank {self.rank} cannot finish {what}: on rank {told[0]}, {notes[told[0]]}")
        else:
            return
        self._break_off(str(error))
        raise error

    def _break_off(self, reason: str) -> ExchangeError:
        """Ends this exchange for good and tells the peers; the first reason counts."""
        if not self._broken:
            self._broken = self._own.note = reason
        return ExchangeError(reason)

    def _check_usable(self) -> None:
        if self._broken:
            raise unusable(self._broken)


class _Arriving:
    """An exchange whose own rows are sent; `to_copy` tells which rows to take from the bank into the result."""

    def __init__(
        self,
        exchange: SharedMemory,
        geometry: Geometry,
        result: Tensor,
        to_copy: _Plan | None,
        in_bank: int,
        maps: tuple[object, ...],
    ) -> None:
        self.geometry, self.number, self.calls = geometry, exchange._number, exchange._calls
        self._exchange, self._result, self._to_copy, self._in_bank = exchange, result, to_copy, in_bank
        self._maps = maps  # so that closing during a wait does not take the memory away under it

    def wait(self) -> Tensor:
        exchange, plan = self._exchange, self._to_copy
        exchange._finish(self)
        for rows in plan.received if plan else ():
            exchange._library.exchange_copy(
                ctypes.byref(rows), self._in_bank, self._result.data_ptr(), plan.result_bytes >= _STREAM_BYTES
            )
        return self._result


def _check_piece(x: Tensor, like: Tensor, count: int) -> None:
    """Raises ValueError for tokens made that are not `count` of the kind of `like`."""
    check_memory(x, Move.GATHER_HEADS)
    wanted = (like.shape[0], count, *like.shape[2:])
    if x.dim() != 4 or x.shape != wanted or (x.dtype, x.device) != (like.dtype, like.device):
        raise ValueError(
            f"gather_heads got {tuple(x.shape)} in {x.dtype} on {x.device}, made of {count} tokens: "
            f"(B, tokens, heads, channels) was wanted, {wanted} in {like.dtype} on {like.device}"
        )


def _out_of_step(rank: int, what: str, strays: Sequence[int], geometry: Geometry) -> str:
    return (
        f"{ranks(strays)} {'is' if len(strays) == 1 else 'are'} out of step with rank {rank} at {what} (batch "
        f"{geometry.batch}, {geometry.num_tokens} tokens, {geometry.num_heads} heads of {geometry.head_bytes} bytes): "
        "it made other calls so far, had one refused, or waits at other places; all ranks must make the same calls in "
        "the same order"
    )


def _release(segments: list[Segment], own: Segment, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the same memory: it is not the child's to declare closed
        own.note = own.note or "it was closed there"
    for part in segments:
        part.close()
