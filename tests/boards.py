"""The board of two ranks in one process."""

import mmap
import os

from mgpu_runtime.exchange.board import Board


def two_boards() -> tuple[Board, Board]:
    """Returns the board of two ranks, as each has it."""
    file = os.memfd_create("board")
    try:
        os.truncate(file, mmap.PAGESIZE)
        return Board(0, 2, mmap.mmap(file, mmap.PAGESIZE)), Board(1, 2, mmap.mmap(file, mmap.PAGESIZE))
    finally:
        os.close(file)
