"""Memory of GPUs of one machine that each rank's kernels write to: csrc/exchange_cuda.cu, opened and grown together."""

import ctypes
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from . import native
from .agree import gather_or_fail
from .errors import ExchangeError

MAX_RANKS = 32  # as in csrc/exchange_rows.h
OPENING = 600.0  # seconds the ranks wait for each other at first; one of them may be compiling
_HANDLE_BYTES = 64
_BUS_BYTES = 32


class _Page(ctypes.Structure):
    """Host memory that kernels read and write while they run."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("timeout_ns", "stop", "failed", "number", "missing", "waited_ns")]


@dataclass(frozen=True)
class Failure:
    """A wait that ran out."""

    number: int  # of the exchange
    missing: tuple[int, ...]  # ranks
    seconds: float


class NoRoom(ExchangeError):
    """A GPU has too little memory for the results. Exchanges under way are lost; later ones that need less work."""


class PeerBuffers:
    """One rank's part: counters and two banks that its peers write to, and its view of theirs.

    Opening and growing are collective and fail on every rank or on none, with the reason of the first that failed.
    `push` and `wait` only queue kernels; the calling thread's current device does not matter and stays as it is.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Opens the buffers of a group, without banks. Collective; raises ExchangeError on every rank alike."""
        self.device = device
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._handle: int | None = None
        self._banks: list[Tensor] = []
        self.bank_bytes = 0
        offer, reason = b"", ""
        try:
            offer = self._make()
        except (ExchangeError, RuntimeError, OSError) as error:
            reason = str(error)
        try:
            said = gather_or_fail(group, reason, offer.hex(), timeout=OPENING)
            gather_or_fail(group, self._open([bytes.fromhex(text) for text in said]), timeout=OPENING)
        except RuntimeError:
            self.close()
            raise

    def grow(self, bank_bytes: int, failure: str, timeout: float) -> None:
        """Makes room for `bank_bytes` in each bank; what the banks hold is kept, views of them are lost.

        Collective; no kernel of the exchange may be under way on any rank. `failure` is a reason why this rank cannot
        grow, or empty. `timeout` is in seconds. Raises NoRoom on every rank where one has too little memory, and
        ExchangeError, or ExchangeTimeout for ranks that do not come, after which the buffers are of no more use.
        """
        handle, full = ctypes.create_string_buffer(_HANDLE_BYTES), ""
        if not failure:
            full = _text(self._library.exchange_grow(self._handle, bank_bytes, handle))
        if full:
            torch.cuda.empty_cache()  # torch may hold memory that it does not need
            full = _text(self._library.exchange_grow(self._handle, bank_bytes, handle))
        said = gather_or_fail(self._group, failure, f"{full}?{handle.raw.hex()}", timeout=timeout)
        parts = [text.rpartition("?") for text in said]
        for rank, (reason, _, _) in enumerate(parts):
            if reason:
                self._library.exchange_abandon(self._handle)
                needed = f"two banks of {bank_bytes / 1e6:.0f} MB for results cannot be had on rank {rank} ({reason})"
                raise NoRoom(f"{needed}: use fewer tokens, or free memory of its GPU")
        handles = b"".join(bytes.fromhex(text) for _, _, text in parts)
        gather_or_fail(self._group, _text(self._library.exchange_open_grown(self._handle, handles)), timeout=timeout)
        self._library.exchange_drop_old(self._handle)  # by now no peer has it open
        self.bank_bytes = self._library.exchange_bank_bytes(self._handle)
        self._banks = [
            _view(self._library.exchange_bank(self._handle, bank), self.bank_bytes, self.device) for bank in (0, 1)
        ]

    def bank(self, bank: int) -> Tensor:
        """Returns a bank of this rank as a uint8 tensor (bank_bytes,)."""
        return self._banks[bank]

    def push(
        self, rows: ctypes.Array, source: int, bank: int, offsets: Sequence[int], number: int, stream: torch.cuda.Stream
    ) -> None:
        """Queues exchange `number`: rows[r] of the memory at `source` go to offsets[r] of rank r's bank."""
        places = (ctypes.c_int64 * self.world_size)(*offsets)
        library, handle = self._library, self._handle
        _check(library.exchange_push(handle, rows, source, bank, places, number, stream.cuda_stream))

    def wait(self, number: int, timeout: float, stream: torch.cuda.Stream) -> None:
        """Queues a wait for every rank's exchange `number`, for `timeout` seconds or those of `set_timeout` if more."""
        _check(self._library.exchange_wait(self._handle, number, _nanoseconds(timeout), stream.cuda_stream))

    def set_timeout(self, timeout: float) -> None:
        """Lets waits last `timeout` seconds at least, those under way among them."""
        self._page.timeout_ns = _nanoseconds(timeout)

    def stop(self) -> None:
        """Ends waits that are under way or queued at once; the buffers are of no more use."""
        if self._handle is not None:
            self._page.stop = 1

    def failure(self) -> Failure | None:
        """Returns what the first wait that ran out has noted in host memory, or None; nothing is waited for."""
        page = self._page
        if not page.failed:
            return None
        missing = tuple(rank for rank in range(self.world_size) if page.missing >> rank & 1)
        return Failure(page.number, missing, page.waited_ns / 1e9)

    def leave(self) -> None:
        """Waits for this GPU and lets go of the peers' memory, so that they may give it back. To be closed after."""
        if self._handle is not None:
            self._library.exchange_leave(self._handle)

    def close(self, *, free: bool = True) -> None:
        """Waits for this GPU and gives the memory back; tensors that view it are lost. May be called twice.

        Where a peer may still write to it, it must not be given back: without `free` it stays till the process ends.
        """
        if self._handle is not None:
            self._handle, self._banks = None, []
            if free:
                self._free()
            else:
                self._free.detach()

    def _make(self) -> bytes:
        """Returns what the peers need to know: this machine, this GPU's address, the handle of its counters."""
        if self.world_size > MAX_RANKS:
            raise ExchangeError(f"it joins {MAX_RANKS} ranks at most, not {self.world_size}")
        major, minor = torch.cuda.get_device_capability(self.device)
        self._library = library = _declared(native.cuda_library(f"{major}{minor}"))
        made = ctypes.c_void_p()
        handle, bus = ctypes.create_string_buffer(_HANDLE_BYTES), ctypes.create_string_buffer(_BUS_BYTES)
        index = self.device.index
        _check(library.exchange_make(index, self.rank, self.world_size, ctypes.byref(made), handle, bus))
        self._handle = made.value
        self._free = weakref.finalize(self, _free, library, made.value, os.getpid())
        self._free.atexit = False  # the process's end frees all, and CUDA may be gone by then
        self._page = _Page.from_address(library.exchange_page(made.value))
        return handle.raw + bus.raw + _machine()

    def _open(self, offers: list[bytes]) -> str:
        """Opens the peers' counters; returns why that cannot be, or nothing."""
        handles = b"".join(offer[:_HANDLE_BYTES] for offer in offers)
        for rank, offer in enumerate(offers):
            bus, machine = offer[_HANDLE_BYTES:][:_BUS_BYTES], offer[_HANDLE_BYTES + _BUS_BYTES :]
            if machine != _machine():
                return f"rank {rank} is on another machine"
            refused = _text(self._library.exchange_reaches(self._handle, self.device.index, bus))
            if refused:
                return f"{refused} (rank {rank}'s)"
        return _text(self._library.exchange_open_controls(self._handle, handles))


def _free(library: ctypes.CDLL, handle: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child can use neither CUDA nor what it inherits of it
        library.exchange_free(handle)


class _Memory:
    """Lends memory of a GPU to torch, which has no word for an address alone."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


def _view(address: int, size: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # else its views could not be written to outside of that mode
        tensor = torch.as_tensor(_Memory(address, size), device=device)
    if tensor.data_ptr() != address:
        raise ExchangeError(f"torch copied the memory for results, as it takes it for another device's than {device}")
    return tensor


def _machine() -> bytes:
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()


def _nanoseconds(seconds: float) -> int:
    return min(int(seconds * 1e9), 2**63)


def _text(failure: bytes | None) -> str:
    return (failure or b"").decode(errors="replace")


def _check(failure: bytes | None) -> None:
    if failure is not None:
        raise ExchangeError(_text(failure))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    address, text, number, word = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint64
    size = ctypes.c_int64
    for name, result, arguments in (
        ("exchange_make", text, [number, number, number, address, text, text]),
        ("exchange_reaches", text, [address, number, text]),
        ("exchange_open_controls", text, [address, text]),
        ("exchange_grow", text, [address, size, text]),
        ("exchange_open_grown", text, [address, text]),
        ("exchange_abandon", None, [address]),
        ("exchange_drop_old", None, [address]),
        ("exchange_page", address, [address]),
        ("exchange_bank", address, [address, number]),
        ("exchange_bank_bytes", size, [address]),
        ("exchange_push", text, [address, address, address, number, address, word, address]),
        ("exchange_wait", text, [address, word, word, address]),
        ("exchange_leave", None, [address]),
        ("exchange_free", None, [address]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
