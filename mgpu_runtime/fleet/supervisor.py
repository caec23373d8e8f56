"""The process between the server and the workers: starts them, watches them, ends them.

Run as `python -m mgpu_runtime.fleet.supervisor FD SERVER_PID` by `link.py`. The loop never blocks: it waits at once
for the server, every worker, every worker's output and the nearest deadline.
"""

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import NoReturn

from .crew import Member, kill_crew, start_crew
from .descriptors import naming_the_limit
from .errors import FleetError
from .frames import Frame, Port
from .ledger import Ledger
from .lines import read_last_lines
from .records import Answer, Cancel, Emit, Ended, Job, Join, Line, Setup, Start, Stop
from .verdict import ENDED, say_death, say_moment

_EXIT_GRACE_S = 0.3  # after a death its peers complain first; by then the dead one's exit code is there
_TICK_S = 1.0
_MAX_WAITING = 64  # frames the server has not read yet, before workers are made to wait
_KILL_TIMEOUT_S = 3.0
_TERMINATE_TIMEOUT_S = 2.0
_FLUSH_TIMEOUT_S = 2.0


class Supervisor:
    """The loop, and the end of the fleet in every way it can come."""

    def __init__(self, host: Port, host_pid: int) -> None:
        self._host = host
        self._host_exit = _open_pidfd(host_pid)
        self._crew: list[Member] = []
        self._ledger = Ledger(host, self._crew, self.end)
        self._dead: list[Member] = []
        self._verdict_at: float | None = None
        self._stop_steps: list[tuple[float, Callable[[], None]]] | None = None

    def run(self) -> NoReturn:
        """Serves until the server is gone or the fleet has ended; ends the process."""
        try:
            with naming_the_limit():
                while True:
                    self._serve_ready()
                    self._note_deaths()
                    self._act_on_time()
        except FleetError as error:
            self.end("descriptors", f"{error} {ENDED}")
        finally:
            # Only a mistake of ours leads here. Without this multiprocessing would wait for the workers, for ever.
            kill_crew(self._crew, _KILL_TIMEOUT_S)

    def _serve_ready(self) -> None:
        watched = self._watched()
        poll = select.poll()
        for fd, (events, _) in watched.items():
            poll.register(fd, events)
        for fd, _ in poll.poll(self._wait_ms()):
            watched[fd][1]()

    def end(self, reason: str, text: str, trace: str = "") -> NoReturn:
        """Kills the workers, tells the server why, and ends this process."""
        if survivors := kill_crew(self._crew, _KILL_TIMEOUT_S):
            text = f"{text} Processes that did not end: {', '.join(map(str, survivors))}.".strip()
        self._host.post(Frame(Ended(reason, text, trace)))
        deadline = time.monotonic() + _FLUSH_TIMEOUT_S
        while self._host.num_waiting and time.monotonic() < deadline:
            select.select([], [self._host.sock], [], _FLUSH_TIMEOUT_S)
            self._host.flush()
        _leave()

    def _watched(self) -> dict[int, tuple[int, Callable[[], None]]]:
        host_events = select.POLLIN | (select.POLLOUT if self._host.num_waiting else 0)
        watched = {self._host.sock.fileno(): (host_events, self._serve_host)}
        if self._host_exit is not None:
            watched[self._host_exit] = (select.POLLIN, self._lose_host)
        listening = self._host.num_waiting < _MAX_WAITING
        for member in self._crew:
            events = (select.POLLIN if listening else 0) | (select.POLLOUT if member.port.num_waiting else 0)
            if member.port.is_open and events:
                watched[member.port.sock.fileno()] = (events, lambda m=member: self._serve_member(m))
            if listening and not member.output.closed:
                watched[member.output.fileno()] = (select.POLLIN, lambda m=member: self._serve_lines(m))
            if not member.is_dead:
                watched[member.process.sentinel] = (select.POLLIN, lambda: None)
        return watched

    def _serve_host(self) -> None:
        self._host.flush()
        for frame in self._host.pull():
            record = frame.record
            if isinstance(record, Start):
                self._start(frame)
            elif isinstance(record, Stop):
                self._stop(record)
            elif self._stop_steps is not None:
                frame.close()
            elif isinstance(record, Job):
                self._ledger.begin_job(frame)
            else:
                assert isinstance(record, Cancel), record
                self._ledger.cancel(record)
        if not self._host.is_open:
            self._lose_host()

    def _serve_member(self, member: Member) -> None:
        member.port.flush()
        for frame in member.pull():
            if self._stop_steps is not None:
                frame.close()
            elif isinstance(frame.record, Emit):
                self._ledger.note_event(frame.record)
                self._host.post(frame)
            else:
                assert isinstance(frame.record, Answer), frame.record
                self._ledger.add(frame)

    def _serve_lines(self, member: Member) -> None:
        for line in member.pull_lines():
            self._host.post(Frame(Line(member.rank, line)))

    def _start(self, frame: Frame) -> None:
        start = frame.record
        # torch.multiprocessing has the same one, and would load torch into this process too, which never holds a tensor
        self._crew.extend(start_crew(get_context("spawn"), start.devices))
        # The ranks meet at a file that has no name and so can never stay behind; the workers open it by descriptor.
        store = os.memfd_create("mgpu-store", os.MFD_CLOEXEC)
        for member in self._crew:
            join = Join(member.rank, len(self._crew), member.device, start.runner, start.timeout, start.group_timeout)
            member.port.post(Frame(join, block=os.dup(store)))
            copy = frame.copy()
            member.port.post(Frame(Setup(), copy.payload, copy.take_block()))
        os.close(store)
        frame.close()
        self._ledger.begin_start(start.deadline, start.timeout)

    def _stop(self, stop: Stop) -> None:
        for member in self._crew:
            member.port.post(Frame(stop))
        terminate_at = time.monotonic() + stop.graceful_timeout
        self._stop_steps = [
            (terminate_at, lambda: [member.process.terminate() for member in self._crew]),
            (terminate_at + _TERMINATE_TIMEOUT_S, lambda: self.end("stopped", "")),
        ]

    def _note_deaths(self) -> None:
        for member in self._crew:
            if member.is_dead and member not in self._dead:
                self._dead.append(member)
        if self._stop_steps is not None:
            if len(self._dead) == len(self._crew):
                self.end("stopped", "")
        elif self._dead and self._verdict_at is None:
            self._verdict_at = time.monotonic() + _EXIT_GRACE_S

    def _act_on_time(self) -> None:
        now = time.monotonic()
        if self._stop_steps is not None:
            if self._stop_steps and now >= self._stop_steps[0][0]:
                self._stop_steps.pop(0)[1]()
        elif self._verdict_at is None:
            self._ledger.check_deadline()
        elif now >= self._verdict_at:
            self._end_dead()

    def _wait_ms(self) -> float:
        times = [time.monotonic() + _TICK_S]
        if self._stop_steps:
            times.append(self._stop_steps[0][0])
        if self._verdict_at is not None:
            times.append(self._verdict_at)
        if self._ledger.round is not None and self._ledger.round.deadline is not None:
            times.append(self._ledger.round.deadline)
        return 1000.0 * max(0.0, min(times) - time.monotonic()) + 1.0

    def _end_dead(self) -> NoReturn:
        # A rank that ended in good order did so because of another; the one to name is the first that did not.
        dead = next((member for member in self._dead if member.process.exitcode), self._dead[0])
        round_ = self._ledger.round
        dead.drain_lines()
        lines = list(dead.lines) or read_last_lines(sys.stderr.fileno())  # the latter if it died before it had a pipe
        text = say_death(dead.rank, dead.device, dead.process.exitcode, say_moment(round_), lines)
        text = f"{self._ledger.failure_text}\n{text}".lstrip()
        self.end("start" if round_ is not None and round_.stage == "start" else "asymmetric", text)

    def _lose_host(self) -> NoReturn:
        kill_crew(self._crew, _KILL_TIMEOUT_S)
        _leave()


def main() -> None:
    """Runs the supervisor on the socket whose descriptor the server passed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock_fd, host_pid = int(sys.argv[1]), int(sys.argv[2])
    if os.getppid() != host_pid:
        return
    Supervisor(Port(socket.socket(fileno=sock_fd)), host_pid).run()


def _open_pidfd(pid: int) -> int | None:
    """Returns a descriptor that tells when the server ends, even if a child it forked keeps the socket open."""
    try:
        return os.pidfd_open(pid)
    except OSError:  # an old kernel or a strict container; the end of the socket still tells
        return None


def _leave() -> NoReturn:
    sys.stderr.flush()
    os._exit(0)  # the workers are gone; nothing that multiprocessing would still wait for


if __name__ == "__main__":
    main()
