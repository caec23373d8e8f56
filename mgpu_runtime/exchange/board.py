"""A page of memory that the ranks of one host share, where each says how far it has come."""

import contextlib
import mmap
import os
import stat
import zlib
from typing import Self

import torch.distributed as dist

from .agree import PATIENCE, gather_texts
from .layout import Geometry
from .processes import Processes

_NAME = "ltx-mgpu-board"
_NONE = "none"
_TOKEN_BYTES = 16  # at the beginning of the page
_KEPT = 16  # last exchanges of a rank whose marks the page holds
_WORDS = 2 + _KEPT  # per rank: exchanges started, whether it waits, marks
_SECONDS = 30.0  # the ranks wait for each other in a step of opening, which takes a moment


class Board:
    """For each rank the number of exchanges it has started, what the last ones were, and whether it waits now.

    Only for telling who is missing or at odds: a rank writes its own words and reads the others', without any order to
    other memory.
    """

    def __init__(self, rank: int, world_size: int, page: mmap.mmap) -> None:
        self._rank = rank
        self._page = page
        self._numbers = memoryview(page)[_TOKEN_BYTES:].cast("Q")[: _WORDS * world_size]

    @classmethod
    def of(cls, group: dist.ProcessGroup, processes: Processes, *, patience: float = PATIENCE) -> Self | None:
        """Makes the page of a group; None, on every rank, where its processes cannot share one.

        Collective; `patience` and what it raises are those of `gather_texts`.
        """

        def gather(text: str) -> list[str]:
            return gather_texts(group, text, timeout=_SECONDS, processes=processes, patience=patience)

        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if not all(text == "here" for text in gather("here" if processes.all_here() else _NONE)):
            return None
        size = -(-(_TOKEN_BYTES + 8 * _WORDS * world_size) // mmap.PAGESIZE) * mmap.PAGESIZE
        token = os.urandom(_TOKEN_BYTES)
        file = _create(size, token) if rank == 0 else None
        page = None
        try:
            place = gather(_NONE if file is None else f"{file} {token.hex()}")[0]
            page = _map(processes.pid(0), place, size) if place != _NONE else None
            complete = _NONE not in gather(_NONE if page is None else "mapped")
            if page is not None and complete:
                board, page = cls(rank, world_size, page), None
                return board
            return None
        finally:
            if file is not None:
                os.close(file)
            if page is not None:
                page.close()

    def started(self, count: int, geometry: Geometry) -> None:
        """Says that this rank has started `count` exchanges in all, the last of them this one."""
        first = _WORDS * self._rank
        self._numbers[first + 2 + count % _KEPT] = _mark(count, geometry)
        self._numbers[first] = count

    def unlike(self, count: int) -> list[int]:
        """Returns the ranks whose exchange number `count` is another than this rank's, as far as the page tells."""
        place = 2 + count % _KEPT
        marks = [self._numbers[_WORDS * rank + place] for rank in range(len(self._numbers) // _WORDS)]
        own = marks[self._rank]
        # A mark holds its number, so that one that is older or newer, or not yet there, says nothing.
        return [rank for rank, mark in enumerate(marks) if mark != own and mark >> 32 == own >> 32]

    def wait_begins(self) -> None:
        self._numbers[_WORDS * self._rank + 1] = 1

    def wait_ends(self) -> None:
        self._numbers[_WORDS * self._rank + 1] = 0

    def missing(self, count: int) -> list[int]:
        """Returns the ranks that have started fewer than `count` exchanges."""
        return [rank for rank in range(len(self._numbers) // _WORDS) if self._numbers[_WORDS * rank] < count]

    def waits(self, rank: int) -> bool:
        """Tells whether a rank waits for others."""
        return self._numbers[_WORDS * rank + 1] == 1

    def close(self) -> None:
        """Gives the page back. May be called once."""
        self._numbers.release()
        self._page.close()


def _mark(count: int, geometry: Geometry) -> int:
    """Returns a word for an exchange: its number above, a checksum of what every rank must mean alike below."""
    sizes = [int(size) for size in (geometry.batch, *geometry.tokens, *geometry.heads, geometry.head_bytes)]
    said = f"{geometry.move.value} {sizes}"
    return (count & 0xFFFFFFFF) << 32 | zlib.crc32(said.encode())


def _create(size: int, token: bytes) -> int | None:
    """Makes the page and returns its descriptor; None where that cannot be."""
    try:
        file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    except (OSError, AttributeError):  # a kernel or a system without memfds, or no descriptors left
        return None
    try:
        os.truncate(file, size)
        if os.pwrite(file, token, 0) == len(token):
            return file
    except OSError:
        pass
    os.close(file)
    return None


def _map(pid: int | None, place: str, size: int) -> mmap.mmap | None:
    """Maps what rank 0 says; None where that cannot be, or is not its page: a pid may mean another process here."""
    file, _, token = place.partition(" ")
    path = f"/proc/{pid}/fd/{file}"
    # A container may forbid to look into another process's files, and descriptors may have run out.
    with contextlib.suppress(OSError, ValueError):
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # to open a device or a pipe may do something
            return None
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(opened)
            if stat.S_ISREG(status.st_mode) and status.st_size == size and os.pread(opened, 16, 0).hex() == token:
                return mmap.mmap(opened, size)
        finally:
            os.close(opened)
    return None
