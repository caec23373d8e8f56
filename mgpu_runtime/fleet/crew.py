"""The workers as the supervisor sees them: process, connection, and what they printed last."""

import os
import socket
import time
from collections import deque
from multiprocessing.context import SpawnContext

from .frames import Frame, Port
from .lines import NUM_LAST_LINES, LineSplitter
from .records import Phase
from .worker import main as worker_main

_CHUNK = 1 << 16
_MAX_READS = 32  # more than the pipe can hold


class Member:
    """One worker process."""

    def __init__(self, context: SpawnContext, rank: int, device: str, num_threads: int) -> None:
        self.rank = rank
        self.device = device
        self.lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self.phase = "starting its process"
        mine, theirs = socket.socketpair()
        reader, writer = context.Pipe(duplex=False)
        self.port = Port(mine)
        self.output = reader
        self._splitter = LineSplitter()
        os.set_blocking(reader.fileno(), False)
        self.process = context.Process(
            target=worker_main, args=(theirs, writer, os.getpid(), num_threads), name=f"mgpu-rank-{rank}"
        )
        self.process.start()
        # Only the worker may hold its ends, or their closing would tell nothing.
        theirs.close()
        writer.close()

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended; reaps it."""
        return self.process.exitcode is not None

    def pull(self) -> list[Frame]:
        """Returns the frames that have come, except phases, which are noted here."""
        frames = []
        for frame in self.port.pull():
            if isinstance(frame.record, Phase):
                self.phase = frame.record.text
            else:
                frames.append(frame)
        return frames

    def pull_lines(self) -> list[str]:
        """Returns the whole lines that the worker has printed since the last call, and keeps the last twenty."""
        if self.output.closed:
            return []
        try:
            data = os.read(self.output.fileno(), _CHUNK)
        except BlockingIOError:
            return []
        if not data:
            self.output.close()
        lines = self._splitter.feed(data, is_end=not data)
        self.lines.extend(lines)
        return lines

    def drain_lines(self) -> None:
        """Reads what a dead worker has left in its pipe."""
        for _ in range(_MAX_READS):
            self.pull_lines()


def start_crew(context: SpawnContext, devices: list[str]) -> list[Member]:
    """Starts one worker per device; CPU workers share the cores."""
    num_threads = max(1, len(os.sched_getaffinity(0)) // len(devices))
    return [Member(context, rank, device, num_threads) for rank, device in enumerate(devices)]


def kill_crew(crew: list[Member], timeout: float) -> list[int]:
    """Kills all workers and reaps them; returns the pids of those that are still there after the deadline."""
    for member in crew:
        member.process.kill()
    deadline = time.monotonic() + timeout
    for member in crew:
        member.process.join(max(0.0, deadline - time.monotonic()))
    return [member.process.pid for member in crew if not member.is_dead]
