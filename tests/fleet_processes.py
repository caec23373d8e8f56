"""What the tests ask the kernel about processes."""

import time
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended; one that nobody has reaped has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def left_after(pids: list[int], seconds: float) -> list[int]:
    """Returns which of the processes still run when the time is over, or [] as soon as none does."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def children_of(pid: int) -> list[int]:
    """Returns the ids of the children of all threads of a process."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text(encoding="utf-8").split()]


def shared_memory_of(pid: int) -> list[str]:
    """Returns the lines of the memory map that lie in /dev/shm."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return [line for line in maps if "/dev/shm/" in line]
