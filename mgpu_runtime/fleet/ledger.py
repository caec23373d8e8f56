"""What the fleet is doing: the start, or the stages of the one job that runs, and what follows from the answers.

A job goes check -> run -> done. When all ranks fail or are cancelled it goes check -> run -> settle -> failed: settle
is one small collective which proves that no rank is a step ahead of the others, and so the fleet may stay warm.
"""

import time
from collections.abc import Callable

from .crew import Member
from .frames import Frame, Port
from .records import Answer, Cancel, Drop, Emit, Go, Job, JobDone, JobFailed, Record, Settle, Started
from .round import Round
from .verdict import say_failure, say_lone_failure, say_moment, say_refusal, say_silence, say_symmetric

_CHECK_TIMEOUT_S = 120.0
_SETTLE_TIMEOUT_S = 10.0
_PATIENCE = 3.0  # a cancelled job may take so many times its longest silence to reach a step boundary
_LONE_FAILURE_S = 2.0  # time for the other ranks to fail as well, before one that failed alone ends the fleet

End = Callable[[str, str, str], None]  # reason, text, trace; does not return


class Ledger:
    """Follows the current round and moves to the next one; `end` ends the fleet and this process."""

    def __init__(self, host: Port, crew: list[Member], end: End) -> None:
        self._host = host
        self._crew = crew
        self._end = end
        self.round: Round | None = None
        self._timeout: float | None = None
        self._cancel_timeout = 0.0  # what a job that is cancelled now has, at least, to reach a step boundary
        self._last_sign = self._longest_silence = 0.0
        self._cancelled = False
        self._timed_out = False
        self._result: Frame | None = None
        self._failure: JobFailed | None = None

    @property
    def failure_text(self) -> str:
        """What the job had failed with, while its ranks settle; otherwise empty."""
        return self._failure.text if self.round is not None and self.round.stage == "settle" else ""

    def begin_start(self, deadline: float, timeout: float) -> None:
        """Expects every rank to say that it is ready."""
        self._timeout = timeout
        self.round = Round("start", "", len(self._crew), deadline)

    def begin_job(self, frame: Frame) -> None:
        """Sends a job to every rank, to be checked first."""
        job = frame.record
        assert isinstance(job, Job) and self.round is None, (job, self.round)
        self._timeout, self._cancel_timeout = job.timeout, job.cancel_timeout
        self._cancelled = self._timed_out = False
        for member in self._crew:
            member.port.post(frame.copy())
        frame.close()
        self._next_round("check", job.job, _CHECK_TIMEOUT_S)

    def cancel(self, record: Cancel) -> None:
        """Tells every rank to leave the job at the next step boundary; nothing if that job is over."""
        if self.round is not None and self.round.job == record.job:
            self._cancelled = True
            self._tell(record)
            if self.round.stage == "run" and not self._timed_out:
                self._expect_leave()

    def note_event(self, emit: Emit) -> None:
        """Learns from the running job's events how long its ranks may be silent."""
        if self.round is not None and self.round.job == emit.job:
            now = time.monotonic()
            self._longest_silence = max(self._longest_silence, now - self._last_sign)
            self._last_sign = now

    def add(self, frame: Frame) -> None:
        """Takes an answer, and goes on when it was the last one."""
        answer = frame.record
        assert isinstance(answer, Answer) and self.round is not None, answer
        self.round.add(answer)
        if answer.stage == "run" and answer.rank == 0 and answer.outcome == "ok":
            self._result = frame
        if answer.outcome != "ok" and answer.stage != "check":  # no rank waits for another in a check
            seconds = _LONE_FAILURE_S if answer.outcome == "error" else self._cancel_timeout
            self.round.hurry(time.monotonic() + seconds)
        if not self.round.missing:
            {"start": self._started, "check": self._checked, "run": self._ran, "settle": self._settled}[answer.stage]()

    def check_deadline(self) -> None:
        """Acts when the ranks that are missing have had their time."""
        round_ = self.round
        if round_ is None or round_.deadline is None or time.monotonic() < round_.deadline:
            return
        if round_.failures and round_.stage == "settle":
            self._end_out_of_step()
        elif round_.errors and round_.stage != "check":
            self._end_lone_failure("start" if round_.stage == "start" else "asymmetric")
        elif round_.stage == "run" and not (self._cancelled or self._timed_out or round_.failures):
            self._timed_out = True
            self._tell(Cancel(round_.job))
            self._expect_leave()
        else:
            self._end_silent()

    def _started(self) -> None:
        failures = self.round.failures
        if failures and self.round.all_failed:
            self._end("start", say_symmetric(failures), failures[0].trace)
        elif failures:
            self._end_lone_failure("start")
        self.round = None
        self._host.post(Frame(Started([member.process.pid for member in self._crew])))

    def _checked(self) -> None:
        job, failures = self.round.job, self.round.failures
        if not failures and not self._cancelled:
            self._tell(Go(job))
            self._next_round("run", job, self._timeout)
            self._last_sign, self._longest_silence = time.monotonic(), 0.0
            return
        self._tell(Drop(job))
        self.round = None
        if failures:
            text = say_refusal(failures, len(self._crew))
            self._host.post(Frame(JobFailed(job, "error", text, failures[0].trace)))
        else:
            self._host.post(Frame(JobFailed(job, "cancelled", f"Job {job} was cancelled.")))

    def _ran(self) -> None:
        job, failures = self.round.job, self.round.failures
        if not failures:
            self.round = None
            result, self._result = self._result, None
            self._host.post(Frame(JobDone(job), result.payload, result.take_block()))
            return
        if not self.round.all_failed:
            self._end_lone_failure("asymmetric")
        self._failure = self._make_failure(job)
        self._tell(Settle(job))
        self._next_round("settle", job, _SETTLE_TIMEOUT_S)

    def _settled(self) -> None:
        if self.round.failures:
            self._end_out_of_step()
        self.round = None
        self._host.post(Frame(self._failure))

    def _make_failure(self, job: str) -> JobFailed:
        failures = self.round.failures
        if not self.round.is_cancelled:
            return JobFailed(job, "error", say_symmetric(failures), failures[0].trace)
        if self._timed_out:
            text = f"Job {job} took longer than its {self._timeout:g} s and was cancelled. Allow it more time."
            return JobFailed(job, "timeout", text)
        return JobFailed(job, "cancelled", failures[0].text)

    def _expect_leave(self) -> None:
        """Gives the ranks time to reach a step boundary, and more when the job has been slow until now."""
        now = time.monotonic()
        self._cancel_timeout = max(self._cancel_timeout, _PATIENCE * self._longest_silence, now - self._last_sign)
        if not self.round.failures:  # after one of those the deadline is set already
            self.round.deadline = now + self._cancel_timeout

    def _end_silent(self) -> None:
        round_ = self.round
        seconds = {"check": _CHECK_TIMEOUT_S, "settle": _SETTLE_TIMEOUT_S}.get(round_.stage, self._timeout)
        moment = say_moment(round_)
        if round_.stage == "run":
            seconds, moment = self._cancel_timeout, f"after job {round_.job} was cancelled"
            moment += f" for taking longer than its {self._timeout:g} s" if self._timed_out else ""
        phases = {m.rank: m.phase for m in self._crew} if round_.stage == "start" else {}
        reason = "start" if round_.stage == "start" else "timeout"
        self._end(reason, say_silence(round_.missing, moment, seconds, phases), "")

    def _end_out_of_step(self) -> None:
        first = self.round.failures[0]
        text = f"After that the ranks were out of step ({say_failure(first)}); the fleet was ended."
        self._end("asymmetric", f"{self._failure.text}\n{text}", self._failure.trace)

    def _end_lone_failure(self, reason: str) -> None:
        first = (self.round.errors or self.round.failures)[0]
        text = say_lone_failure(first, self._crew[first.rank].device, say_moment(self.round), self.round.missing)
        self._end(reason, text, first.trace)

    def _next_round(self, stage: str, job: str, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        self.round = Round(stage, job, len(self._crew), deadline)

    def _tell(self, record: Record) -> None:
        for member in self._crew:
            member.port.post(Frame(record))
