"""What /proc tells of the other ranks' processes: whether they live, and whether they work."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch.distributed as dist

from .agree import gather_texts

_TICK = 1.0 / os.sysconf("SC_CLK_TCK")  # seconds, the unit of CPU time in /proc
BUSY_SHARE = 0.05  # of one core; a process with several idle gloo groups takes a hundredth


@dataclass(frozen=True)
class _Stat:
    state: str
    cpu: float  # seconds, of all threads
    started: int  # clock ticks after boot; tells a process from a later one with its pid


class Processes:
    """The processes of a group's ranks, as far as this rank can see them: on its host and in its pid namespace."""

    def __init__(self, rank: int, records: list[str]) -> None:
        self.rank = rank
        here = records[rank].split()[2:]
        self._pids: list[int | None] = []
        self._started: list[int] = []
        self._asked: list[tuple[float, float]] = []
        for record in records:
            pid, started, *where = record.split()
            stat = _read(int(pid)) if where == here else None
            visible = stat is not None and stat.started == int(started)
            self._pids.append(int(pid) if visible else None)
            self._started.append(int(started))
            self._asked.append((time.monotonic(), stat.cpu if stat and visible else 0.0))

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Self:
        """Gets to know the processes of a group. Collective."""
        stat = _read(os.getpid())
        try:
            namespace = os.readlink("/proc/self/ns/pid")
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:  # a hardened container; no other rank can be known to live on this host
            namespace, boot = "hidden", os.urandom(16).hex()
        record = f"{os.getpid()} {stat.started if stat else 0} {boot} {namespace}"
        return cls(dist.get_rank(group), gather_texts(group, record))

    @property
    def world_size(self) -> int:
        return len(self._pids)

    def pid(self, rank: int) -> int | None:
        """Returns a rank's process id; None where it is on another host or hidden from this process."""
        return self._pids[rank]

    def all_here(self) -> bool:
        """Tells whether every rank's process can be seen from this one."""
        return None not in self._pids

    def is_gone(self, rank: int) -> bool:
        """Tells whether a rank's process has certainly ended; False where that cannot be known."""
        pid = self._pids[rank]
        if pid is None:
            return False
        stat = _read(pid)
        return stat is None or stat.started != self._started[rank] or stat.state in "ZX"

    def is_stopped(self, rank: int) -> bool:
        """Tells whether a rank's process has been stopped by a signal; False where that cannot be known."""
        pid = self._pids[rank]
        stat = _read(pid) if pid is not None else None
        return stat is not None and stat.started == self._started[rank] and stat.state in "Tt"

    def was_busy(self, rank: int) -> bool:
        """Tells whether a rank's process has worked since this was last asked about it, and is not stopped.

        Work is CPU time of at least BUSY_SHARE, or a main thread that has a core, queues for one or waits for the disk.
        False where that cannot be known.
        """
        pid = self._pids[rank]
        stat = _read(pid) if pid is not None else None
        if stat is None or stat.started != self._started[rank]:
            return False
        now = time.monotonic()
        before, cpu = self._asked[rank]
        self._asked[rank] = now, stat.cpu
        least = max(2 * _TICK, (now - before) * BUSY_SHARE)
        return stat.state not in "TtZX" and (stat.state in "RD" or stat.cpu - cpu >= least)


def _read(pid: int) -> _Stat | None:
    """Returns what /proc says of a process; None where it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold spaces and brackets; fields[0] is the 3rd
    return _Stat(fields[0], (int(fields[11]) + int(fields[12])) * _TICK, int(fields[19]))
