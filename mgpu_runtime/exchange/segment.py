"""One rank's part of the memory that the processes of a machine exchange through.

A segment is a memfd, a file without a name, which peers open through /proc: counters and a note in the first pages,
then the banks for results. The banks are as large as the machine's memory could ever fill, and mapped once; only pages
that were touched exist, so growing needs no new mapping and no agreement.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from .errors import ExchangeError

SLOT_BYTES = 128  # one counter, as in csrc/exchange_cpu.c
MAX_RANKS = 64
BANKS = 3  # as many as `layout.Banks` deals; the third has memory only where something is made piece by piece
_NOTE = SLOT_BYTES * MAX_RANKS  # where the note lies
_NOTE_BYTES = 512
_TOKEN = _NOTE + _NOTE_BYTES
_TOKEN_BYTES = 16
_HEADER = 65536  # the largest page size in use
_GRAIN = 65536
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # a peer that shrank it would crash all others


class Segment:
    """A mapping of one rank's memory, the own or a peer's. Holds one descriptor, an own one two."""

    def __init__(self, descriptor: int) -> None:
        """Maps what a descriptor names, which the caller goes on owning. Raises OSError."""
        size = os.fstat(descriptor).st_size
        self.bank_bytes = (size - _HEADER) // BANKS
        self.descriptor: int | None = None
        self._map: mmap.mmap | None = mmap.mmap(descriptor, size)
        self._map.madvise(mmap.MADV_DONTDUMP)  # a core file would be as large as the machine's memory, three times
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._present = [0] * BANKS  # bytes of each bank

    @classmethod
    def create(cls) -> Self:
        """Makes a rank's own memory. Raises OSError."""
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        descriptor = os.memfd_create("mgpu-exchange", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, _HEADER + BANKS * (-(-pages // _GRAIN) * _GRAIN))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            segment = cls(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        segment.descriptor = descriptor
        segment._map[_TOKEN : _TOKEN + _TOKEN_BYTES] = os.urandom(_TOKEN_BYTES)
        return segment

    @classmethod
    def of_peer(cls, pid: int, descriptor: int, token: str) -> Self:
        """Maps a peer's memory by its process and descriptor. Raises OSError, ExchangeError if it is another's."""
        own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            segment = cls(own)
        except ValueError as error:  # an empty file
            raise ExchangeError(f"process {pid} is not the one that was meant: {error}") from error
        finally:
            os.close(own)
        if segment.token != token:
            segment.close()
            raise ExchangeError(f"process {pid} is not the one that was meant")
        return segment

    @property
    def token(self) -> str:
        """Tells this segment from any other; hexadecimal."""
        return self._map[_TOKEN : _TOKEN + _TOKEN_BYTES].hex()

    @property
    def mapping(self) -> mmap.mmap | None:
        """What keeps the memory mapped for whoever holds it; None after `close`."""
        return self._map

    @property
    def note(self) -> str:
        """Why the owner takes part no longer; empty while it does, and after `close`."""
        memory = self._map  # another thread may close
        return "" if memory is None else memory[_NOTE : _NOTE + _NOTE_BYTES].rstrip(b"\0").decode(errors="ignore")

    @note.setter
    def note(self, text: str) -> None:
        self._map[_NOTE : _NOTE + _NOTE_BYTES] = text.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")

    def slot(self, rank: int) -> int:
        """Returns the address of the counter of one sender."""
        return self._address + rank * SLOT_BYTES

    @property
    def sleeps(self) -> bool:
        """Tells whether the owner sleeps until another rank arrives."""
        memory = self._map
        return memory is not None and any(
            memory[rank * SLOT_BYTES + 4] for rank in range(MAX_RANKS)
        )  # Slot.waiting, 0 or 1

    def place(self, bank: int, offset: int) -> int:
        """Returns the address of a place in a bank."""
        return self._address + _HEADER + bank * self.bank_bytes + offset

    def lacks(self, bank: int, size: int) -> int:
        """Returns how many of a bank's first `size` bytes this process has not made present yet."""
        return max(0, size - self._present[bank])

    def make_present(self, populate: Callable[[int, int], int], bank: int, size: int) -> int:
        """Has a bank's first `size` bytes present through csrc's `exchange_populate`. Returns 0, or an errno."""
        lacking = -(-self.lacks(bank, size) // _GRAIN) * _GRAIN
        failure = populate(self.place(bank, self._present[bank]), lacking) if lacking else 0
        if failure in (0, errno.EINVAL):  # kernels before 5.14 cannot: there a page is made when it is first used
            self._present[bank] += lacking
            return 0
        return failure

    def to_come(self, bank: int, size: int) -> int:
        """Returns the memory that an own segment has yet to take for a bank's first `size` bytes.

        Peers make pages present as well, so what the segment holds by now is not counted again.
        """
        others = sum(self._present) - self._present[bank]
        return max(0, size + others - os.fstat(self.descriptor).st_blocks * 512)

    def view(self, bank: int, offset: int, size: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """Returns `size` bytes of a bank as a tensor, which keeps the mapping alive."""
        start = _HEADER + bank * self.bank_bytes + offset
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=start).view(dtype).view(shape)

    def close(self) -> None:
        """Closes the descriptor and lets the mapping go, which lasts as long as views of it. May be called twice."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        # Not `mmap.close`: a tensor keeps the object alive but no export of its memory, so that would unmap it at once.
        self._map = None


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes that this process could still take, by the machine's and its container's account."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text(encoding="ascii").splitlines())
    return min([int(fields["MemAvailable"].split()[0]) * 1024, *_left_in_cgroups(proc, cgroups)])


def _left_in_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yields what the process's control groups leave it, each within its parents, by versions 1 and 2 of them."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for number, names, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if number == "0":
            root, files = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in names.split(","):
            root, files = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = root / path.strip("/")  # not there in a container that sees its own group as the root
        for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(root))):
            left = _left_in(folder, *files)
            if left is not None:
                yield left


def _left_in(folder: Path, limit_file: str, used_file: str, cached_name: str) -> int | None:
    """Returns what one control group leaves; None where it has no limit."""
    try:
        limit, used = (folder / limit_file).read_text(), (folder / used_file).read_text()
        cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit.strip() == "max":
        return None
    return max(0, int(limit) - int(used) + int(cached.get(cached_name, 0)))
