"""A page of memory that the ranks of one host share, where each says how far it has come."""

import contextlib
import mmap
import os
from typing import Self

import torch.distributed as dist

from .agree import gather_texts
from .processes import Processes

_NONE = "none"


class Board:
    """For each rank the number of exchanges it has started, and whether it waits now.

    Only for telling who is missing: a rank writes its own two numbers and reads the others', without any order to other
    memory.
    """

    def __init__(self, rank: int, world_size: int, page: mmap.mmap) -> None:
        self._rank = rank
        self._page = page
        self._numbers = memoryview(page).cast("q")[: 2 * world_size]

    @classmethod
    def of(cls, group: dist.ProcessGroup, processes: Processes) -> Self | None:
        """Makes the page of a group; None, on every rank, where its processes cannot share one. Collective."""
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if not all(text == "here" for text in gather_texts(group, "here" if processes.all_here() else _NONE)):
            return None
        size = -(-16 * world_size // mmap.PAGESIZE) * mmap.PAGESIZE
        file = _create(size) if rank == 0 else None
        try:
            places = gather_texts(group, _NONE if file is None else str(file))
            page = _map(processes.pid(0), places[0], size) if places[0] != _NONE else None
            complete = _NONE not in gather_texts(group, _NONE if page is None else "mapped")
        finally:
            if file is not None:
                os.close(file)
        if page is not None and complete:
            return cls(rank, world_size, page)
        if page is not None:
            page.close()
        return None

    def started(self, count: int) -> None:
        """Says that this rank has started `count` exchanges in all."""
        self._numbers[2 * self._rank] = count

    def wait_begins(self) -> None:
        self._numbers[2 * self._rank + 1] = 1

    def wait_ends(self) -> None:
        self._numbers[2 * self._rank + 1] = 0

    def missing(self, count: int) -> list[int]:
        """Returns the ranks that have started fewer than `count` exchanges."""
        return [rank for rank in range(len(self._numbers) // 2) if self._numbers[2 * rank] < count]

    def waits(self, rank: int) -> bool:
        """Tells whether a rank waits for others."""
        return self._numbers[2 * rank + 1] == 1

    def close(self) -> None:
        """Gives the page back. May be called once."""
        self._numbers.release()
        self._page.close()


def _create(size: int) -> int | None:
    try:
        file = os.memfd_create("ltx-mgpu-board", os.MFD_CLOEXEC)
    except (OSError, AttributeError):  # a kernel or a system without memfds
        return None
    os.truncate(file, size)
    return file


def _map(pid: int | None, file: str, size: int) -> mmap.mmap | None:
    with contextlib.suppress(OSError):  # a container may forbid to look into another process's files
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(opened, size)
        finally:
            os.close(opened)
    return None
