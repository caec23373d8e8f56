"""What /proc tells of the other ranks' processes: whether they live, and whether they work."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch.distributed as dist

from .agree import FIRST_SECONDS, gather_texts, global_ranks
from .errors import AgreementLost

_TICK = 1.0 / os.sysconf("SC_CLK_TCK")  # seconds, the unit of CPU time in /proc
BUSY_SHARE = 0.05  # of one core; a process with several idle gloo groups takes a hundredth


@dataclass(frozen=True)
class _Stat:
    state: str
    cpu: float  # seconds, of all threads
    started: int  # clock ticks after boot; tells a process from a later one with its pid


_UNKNOWN = _Stat("?", 0.0, -1)  # of a process that may live or not


class Processes:
    """The processes of a group's ranks, as far as this rank can see them: on its host and in its pid namespace.

    Attributes:
        global_ranks: the members' ranks in the world, where those are not the ranks in the group; else empty.
    """

    global_ranks: Sequence[int] = ()

    def __init__(self, rank: int, records: list[str], global_ranks: Sequence[int] = ()) -> None:
        """`records` holds what each rank's `_record` says. Raises AgreementLost where one is something else."""
        self.rank = rank
        self.global_ranks = tuple(global_ranks)
        parsed = [_parsed(peer, record) for peer, record in enumerate(records)]
        here = parsed[rank][2:]
        self._pids: list[int | None] = []
        self._started: list[int] = []
        self._asked: list[tuple[float, float]] = []
        for pid, started, *where in parsed:
            stat = _read(pid) if tuple(where) == here else None
            visible = stat is not None and stat is not _UNKNOWN and stat.started == started
            self._pids.append(pid if visible else None)
            self._started.append(started)
            self._asked.append((time.monotonic(), stat.cpu if visible else 0.0))

    @classmethod
    def of(cls, group: dist.ProcessGroup, *, timeout: float = FIRST_SECONDS) -> Self:
        """Gets to know the processes of a group. Collective; raises as `gather_texts` does.

        Nothing is known of the others before, so this waits `timeout` seconds also for one that has ended or is
        stopped; where the group has a store it is named.
        """
        records = gather_texts(group, _record(), timeout=timeout)
        return cls(dist.get_rank(group), records, global_ranks(group))

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
        if stat is _UNKNOWN:
            return False
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


def _record() -> str:
    """Returns this process's pid, its start, and where both mean something: a boot of a machine, a pid namespace."""
    stat: _Stat | None = _UNKNOWN
    namespace, boot = "hidden", os.urandom(16).hex()  # equal to no other rank's: none can be known to be near
    try:
        # /proc may be that of another pid namespace, where the same numbers are other processes.
        if os.readlink("/proc/self") == str(os.getpid()):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            namespace, stat = os.readlink("/proc/self/ns/pid"), _read(os.getpid())
    except OSError:  # no /proc, a hardened container, or no descriptors left
        namespace, boot = "hidden", os.urandom(16).hex()
    return f"{os.getpid()} {(stat or _UNKNOWN).started} {boot} {namespace}"


def _parsed(rank: int, record: str) -> tuple[int, int, str, str]:
    try:
        pid, started, boot, namespace = record.split()
        return int(pid), int(started), boot, namespace
    except ValueError as error:
        raise AgreementLost(f"the ranks are out of step: rank {rank} says {record[:80]!r} of its process") from error


def _read(pid: int) -> _Stat | None:
    """Returns what /proc says of a process; None where it has ended, _UNKNOWN where that cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:  # not allowed, or no descriptors left
        return _UNKNOWN
    fields = text.rpartition(")")[2].split()  # the name before may hold spaces and brackets; fields[0] is the 3rd
    return _Stat(fields[0], (int(fields[11]) + int(fields[12])) * _TICK, int(fields[19]))
