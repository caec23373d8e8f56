"""The server's end of a fleet: starts the supervisor process, and two threads that write to it and read from it.

Nothing here refers to the controller, so that a controller nobody uses any more can be collected.
"""

import atexit
import itertools
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from .codec import pack, unpack
from .descriptors import naming_the_limit
from .errors import (
    AsymmetricRunnerError,
    ControllerBusyError,
    FleetError,
    FleetStartError,
    JobCancelled,
    SymmetricRunnerError,
)
from .frames import Channel, Frame
from .lines import read_last_lines
from .owner import check_owner
from .records import Cancel, Emit, Ended, Job, JobDone, JobFailed, Line, Start, Started, Stop
from .stream import Event, Mailbox
from .verdict import ENDED, say_exit

_log = logging.getLogger("mgpu")

_PACK_ROOT = Path(__file__).resolve().parents[2]
_SPARE_S = 10.0  # what the server waits longer than the supervisor, which knows more to say
_CANCEL_WAIT_S = 10.0
_EXIT_TIMEOUT_S = 5.0
_POLL_S = 0.2

_T = TypeVar("_T")


class Link:
    """One running fleet; every method may be called from any thread."""

    def __init__(self, start: Frame, *, cpu_only: bool) -> None:
        """Starts the supervisor and sends it the frame, which `make_start` made."""
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._settled = threading.Event()  # the start went well or failed
        self._started = False
        self._idle = threading.Event()
        self._idle.set()
        self._lock = threading.Lock()
        self._job_numbers = itertools.count(1)
        self._mailbox: Mailbox | None = None
        self._reason: FleetError | None = None
        self._stopping = False
        self.worker_pids: list[int] = []
        self._outbox: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        with naming_the_limit(FleetStartError):
            self._launch(cpu_only)
        self._post(start)

    @property
    def supervisor_pid(self) -> int:
        """The process id of the supervisor."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the fleet is up, as far as is known, and this process is the one that started it."""
        return self._started and self._reason is None and not self._stopping and os.getpid() == self._pid

    def wait_until_started(self, timeout: float, should_stop: Callable[[], bool] | None) -> None:
        """Returns when all workers are ready; whatever is raised instead, nothing of the fleet is left then.

        Raises FleetStartError when the start fails or takes too long, JobCancelled when `should_stop` says so, and what
        that raises itself.
        """
        is_up = False
        try:
            self._await_start(timeout + _SPARE_S, should_stop or (lambda: False))
            is_up = True
        finally:
            if not is_up:  # also when the wait was interrupted
                self.kill()

    def _await_start(self, timeout: float, should_stop: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout
        while not should_stop():
            if self._settled.wait(_POLL_S):
                if not self._started:
                    raise FleetStartError(str(self._reason), self._reason.trace)
                return
            if time.monotonic() > deadline:
                raise FleetStartError(f"The supervisor of the workers said nothing within {timeout:g} s.")
        raise JobCancelled("The job was cancelled while the workers were starting.")

    def begin(self, timeout: float | None, cancel_timeout: float, kwargs: dict) -> Mailbox:
        """Sends a job; raises ControllerBusyError while another one runs, and the reason when the fleet has ended."""

        def send() -> Mailbox:
            if self._reason is not None:
                raise type(self._reason)(str(self._reason), self._reason.trace)
            if self._stopping:
                raise FleetError("The fleet is being shut down; start it again.")
            mailbox = Mailbox(str(next(self._job_numbers)))
            frame = pack(Job(mailbox.job_id, timeout, cancel_timeout), kwargs)
            self._mailbox = mailbox
            self._idle.clear()
            self._post(frame)  # under the lock: after the end nobody would close the frame's block
            return mailbox

        return self._do_when_idle(send)

    def retire(self) -> None:
        """Turns every later job away; raises ControllerBusyError instead while one runs."""

        def refuse_jobs() -> None:
            self._stopping = True

        self._do_when_idle(refuse_jobs)

    def _do_when_idle(self, act: Callable[[], _T]) -> _T:
        check_owner(self._pid)  # a forked child may find the lock held, by a thread that it does not have
        deadline = time.monotonic() + _CANCEL_WAIT_S
        while True:
            with self._lock:
                running = self._mailbox
                if running is None or self._reason is not None or self._stopping:
                    return act()
            # A job that was cancelled is about to leave; that is no reason to turn the next one away.
            if not running.is_cancelled or not self._idle.wait(deadline - time.monotonic()):
                raise ControllerBusyError(
                    f"The fleet is busy with job {running.job_id}; wait for it to end, or cancel it.", running.job_id
                )

    def cancel(self, job_id: str) -> None:
        """Asks all ranks to leave a job; safe in a finaliser."""
        self._post(Frame(Cancel(job_id)))

    def shutdown(self, graceful_timeout: float) -> None:
        """Asks the workers to leave, has them terminated and killed when they do not, and reaps the supervisor.

        Does nothing in a forked child, whose parent the fleet belongs to.
        """
        if os.getpid() != self._pid:
            return
        self._stopping = True
        self._post(Frame(Stop(graceful_timeout)))
        if not self._ended.wait(graceful_timeout + _SPARE_S):
            _log.warning("The supervisor (pid %d) did not end in time and is killed.", self._process.pid)
            self.kill()

    def kill(self) -> None:
        """Ends the supervisor at once; the kernel then ends its workers."""
        self._stopping = True
        self._process.kill()
        self._ended.wait(_EXIT_TIMEOUT_S)

    def hang_up(self) -> None:
        """Ends the fleet without a word or a wait; takes no lock, so it is safe in a finaliser."""
        if os.getpid() == self._pid:  # in a forked child this would end the fleet of its parent
            self._stopping = True
            self._close_connection()

    def _launch(self, cpu_only: bool) -> None:
        mine, theirs = socket.socketpair()
        self._errors = os.memfd_create("mgpu-supervisor-output", os.MFD_CLOEXEC)
        command = [sys.executable, "-m", "mgpu_runtime.fleet.supervisor", str(theirs.fileno()), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                command,
                cwd=_PACK_ROOT,
                env=_make_env(cpu_only),
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            mine.close()
            os.close(self._errors)
            raise FleetStartError(f"The supervisor could not be started with {sys.executable!r}: {error}.") from error
        finally:
            theirs.close()
        self._channel = Channel(mine)
        self._writer = threading.Thread(target=self._write, name="mgpu-write", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name="mgpu-read", daemon=True).start()
        atexit.register(self._shutdown_at_exit)

    def _shutdown_at_exit(self) -> None:
        self.shutdown(graceful_timeout=2.0)

    def _post(self, frame: Frame) -> None:
        self._outbox.put(frame)

    def _write(self) -> None:
        while (frame := self._outbox.get()) is not None:
            self._channel.send(frame)  # a failure to send is seen by the reader, as the end of the stream

    def _read(self) -> None:
        try:
            while (frame := self._channel.receive()) is not None:
                self._take(frame)
        except FleetError as error:  # no room for a descriptor: what came after it cannot be trusted
            self._reason = FleetError(f"{error} {ENDED}")
        finally:
            self._close_connection()
            self._finish()

    def _take(self, frame: Frame) -> None:
        record = frame.record
        if isinstance(record, Emit):
            event = Event(record.kind, record.job, record.rank, unpack(frame))
            mailbox = self._mailbox
            if mailbox is not None and mailbox.job_id == event.job_id:  # a runner's thread may outlive its job
                mailbox.put_event(event)
        elif isinstance(record, JobDone):
            result = unpack(frame)
            self._release_mailbox().put_result(result)
        elif isinstance(record, JobFailed):
            self._release_mailbox().put_error(_job_error(record))
        elif isinstance(record, Line):
            _log.info("[rank %d] %s", record.rank, record.text)
        elif isinstance(record, Started):
            self.worker_pids = record.pids
            self._started = True
            self._settled.set()
        else:
            assert isinstance(record, Ended), record
            self._reason = self._end_error(record)

    def _release_mailbox(self) -> Mailbox:
        with self._lock:
            mailbox, self._mailbox = self._mailbox, None
            self._idle.set()
        return mailbox

    def _close_connection(self) -> None:
        try:
            self._channel.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is closed already

    def _finish(self) -> None:
        """Runs once, when the connection has ended: reaps the supervisor and tells whoever waits."""
        try:
            code = self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait(_EXIT_TIMEOUT_S)
        with self._lock:
            if self._reason is None:
                self._reason = self._end_error(None, code)
        if (mailbox := self._release_mailbox()) is not None:
            mailbox.put_error(_shutdown_error(mailbox) if self._stopping else self._reason)
        elif self._started and not self._stopping:
            _log.warning("%s", self._reason)  # nobody is waiting who would be told
        self._outbox.put(None)
        self._writer.join()
        self._channel.close()
        os.close(self._errors)
        atexit.unregister(self._shutdown_at_exit)
        self._settled.set()
        self._ended.set()

    def _end_error(self, record: Ended | None, code: int = 0) -> FleetError:
        if self._stopping:
            return FleetError("The fleet was shut down.")
        if record is None:
            lines = read_last_lines(self._errors)
            said = "\nIts last lines:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
            return AsymmetricRunnerError(f"The supervisor of the workers {say_exit(code)}. {ENDED}{said}")
        kinds = {"start": FleetStartError, "asymmetric": AsymmetricRunnerError}
        return kinds.get(record.reason, FleetError)(record.text, record.trace)


def make_start(runner: str, devices: list[str], timeout: float, group_timeout: float, kwargs: dict) -> Frame:
    """Returns the frame that starts the workers; ValueError when a keyword cannot be sent."""
    return pack(Start(runner, devices, timeout, time.monotonic() + timeout, group_timeout), kwargs)


def _job_error(record: JobFailed) -> FleetError:
    if record.reason == "cancelled":
        return JobCancelled(record.text)
    if record.reason == "timeout":
        return FleetError(record.text)
    return SymmetricRunnerError(record.text, record.trace)


def _shutdown_error(mailbox: Mailbox) -> FleetError:
    if mailbox.is_cancelled:
        return JobCancelled(f"Job {mailbox.job_id} was cancelled, and the fleet was shut down.")
    return FleetError(
        f"Job {mailbox.job_id} did not end: the fleet was shut down while the job was running. "
        "The next job starts a new fleet."
    )


def _make_env(cpu_only: bool) -> dict[str, str]:
    """Returns the environment of the fleet; the server's own is not changed."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(_PACK_ROOT), *filter(None, [env.get("PYTHONPATH")])])
    if cpu_only:
        capability = torch.backends.cpu.get_cpu_capability()
        if capability in ("AVX2", "AVX512"):
            # One code path for all sizes: a linear layer's row is the same whatever the number of rows and threads.
            env.setdefault("MKL_CBWR", f"{capability},STRICT")
        if any(name == "lo" for _, name in socket.if_nameindex()):
            # Works without a host name that resolves, and nobody outside can connect.
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env
