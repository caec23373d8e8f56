"""A page of memory that the ranks of one host share, where each says how far it has come."""

import contextlib
import mmap
import os
import stat
import time
import zlib
from collections.abc import Sequence
from typing import Self

import torch
import torch.distributed as dist

from .agree import PATIENCE, gather_texts
from .errors import ExchangeError, ranks
from .layout import Geometry
from .processes import Processes

_NAME = "ltx-mgpu-board"
_NONE = "none"
_TOKEN_BYTES = 16  # at the beginning of the page
KEPT = 16  # last exchanges of a rank whose marks the page holds
_STARTED, _WAITS, _LEFT, _CALLS, _DTYPES = 0, 1, 2, 3, 3 + KEPT  # places among a rank's words
_WORDS = _DTYPES + KEPT  # of one rank
_SECONDS = 30.0  # the ranks wait for each other in a step of opening, which takes a moment


class Board:
    """For each rank the number of exchanges it has started, what the last ones were, and whether it waits or has left.

    Only for telling who is missing or at odds: a rank writes its own words and reads the others', without any order to
    other memory.
    """

    def __init__(self, rank: int, world_size: int, page: mmap.mmap, global_ranks: Sequence[int] = ()) -> None:
        self._rank, self._world_size, self._global_ranks = rank, world_size, global_ranks
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
                board, page = cls(rank, world_size, page, processes.global_ranks), None
                return board
            return None
        finally:
            if file is not None:
                os.close(file)
            if page is not None:
                page.close()

    def started(self, count: int, geometry: Geometry, dtype: torch.dtype) -> None:
        """Says that this rank has started `count` exchanges in all, the last of them this one."""
        self._say(_CALLS + count % KEPT, _mark(count, call_in_words(geometry)))
        self._say(_DTYPES + count % KEPT, _mark(count, str(dtype)))
        self._say(_STARTED, count)

    def refuse_unlike(self, count: int, what: str) -> None:
        """Raises ExchangeError where exchange number `count`, which is `what`, is another one on another rank.

        Each rank says what it does before it looks. So of two that are at odds the later one finds this out before it
        has sent anything, and the earlier one while it waits.
        """
        unlike = self._unlike(_CALLS, count)
        dtypes = {rank: _dtype_in_words(mark) for rank, mark in self._unlike(_DTYPES, count).items()}
        if unlike or dtypes:
            own = _dtype_in_words(self._asked(self._rank, _DTYPES + count % KEPT))
            raise unlike_calls(self._rank, what, list(unlike), own, dtypes, self._global_ranks)

    def wait_begins(self) -> None:
        self._say(_WAITS, 1)

    def wait_ends(self) -> None:
        self._say(_WAITS, 0)

    def leave(self) -> None:
        """Says that this rank will touch no other rank's memory any more."""
        self._say(_LEFT, 1)

    def wait_until_all_left(self, seconds: float, processes: Processes) -> bool:
        """Tells whether all ranks have left within so many seconds, or have ended."""
        deadline = time.monotonic() + seconds
        while True:
            here = [rank for rank in range(self._world_size) if not self._asked(rank, _LEFT)]
            if all(processes.is_gone(rank) for rank in here):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)

    def missing(self, count: int) -> list[int]:
        """Returns the ranks that have started fewer than `count` exchanges."""
        return [rank for rank in range(self._world_size) if self._asked(rank, _STARTED) < count]

    def waits(self, rank: int) -> bool:
        """Tells whether a rank waits for others."""
        return self._asked(rank, _WAITS) == 1

    def close(self) -> None:
        """Gives the page back. May be called once."""
        self._numbers.release()
        self._page.close()

    def _say(self, place: int, word: int) -> None:
        self._numbers[_WORDS * self._rank + place] = word

    def _asked(self, rank: int, place: int) -> int:
        return self._numbers[_WORDS * rank + place]

    def _unlike(self, first: int, count: int) -> dict[int, int]:
        """Returns the marks of exchange number `count` that are another than this rank's, by rank."""
        marks = [self._asked(rank, first + count % KEPT) for rank in range(self._world_size)]
        own = marks[self._rank]
        # A mark holds its number, so that one that is older or newer, or not yet there, says nothing.
        return {rank: mark for rank, mark in enumerate(marks) if mark != own and mark >> 32 == own >> 32}


def call_in_words(geometry: Geometry) -> str:
    """Returns what every rank must mean alike in an exchange."""
    sizes = [int(size) for size in (geometry.batch, *geometry.tokens, *geometry.heads, geometry.head_bytes)]
    return f"{geometry.move.value} {sizes}"


def unlike_calls(
    rank: int, what: str, unlike: Sequence[int], dtype: str, dtypes: dict[int, str], global_ranks: Sequence[int]
) -> ExchangeError:
    """Returns the error of a rank in `what` where the ranks `unlike` make another call.

    `dtype` is that of this rank's tensor, `dtypes` those of the ranks that give another.
    """
    faults = []
    if unlike:
        faults.append(f"{ranks(unlike, global_ranks)} called another method there, or one with other sizes")
    if dtypes:
        others = ", ".join(f"{ranks([other], global_ranks)} {name}" for other, name in dtypes.items())
        faults.append(f"this rank gives {dtype} there, {others}")
    return ExchangeError(
        f"{ranks([rank], global_ranks)} cannot do {what}: {', and '.join(faults)}. All ranks must make the same calls "
        "in the same order, and mean the same tokens, heads and dtype"
    )


def _mark(count: int, text: str) -> int:
    """Returns a word for an exchange: its number above, a checksum of a text below."""
    return (count & 0xFFFFFFFF) << 32 | zlib.crc32(text.encode())


def _dtype_in_words(mark: int) -> str:
    """Returns the dtype that a mark was made of."""
    names = (str(value) for value in vars(torch).values() if isinstance(value, torch.dtype))
    return next((name for name in names if zlib.crc32(name.encode()) == mark & 0xFFFFFFFF), "another dtype")


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
