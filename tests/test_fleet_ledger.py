"""What follows from the answers of the ranks, with no process: every branch that ends a fleet or keeps it."""

import time
from types import SimpleNamespace

import pytest
import torch

from mgpu_runtime.fleet.codec import pack, unpack
from mgpu_runtime.fleet.frames import Frame
from mgpu_runtime.fleet.ledger import Ledger
from mgpu_runtime.fleet.records import Answer, Cancel, Drop, Emit, Go, Job, JobDone, JobFailed, Settle, Started
from mgpu_runtime.fleet.verdict import say_exit


class Ended(Exception):
    """Stands for the end of the supervisor process."""


class Post:
    """Keeps what would be sent."""

    def __init__(self):
        self.frames = []

    def post(self, frame):
        self.frames.append(frame)

    @property
    def records(self):
        return [frame.record for frame in self.frames]


class Desk:
    """A ledger with two workers that are not there."""

    def __init__(self, world_size=2):
        self.host = Post()
        self.crew = [
            SimpleNamespace(rank=r, device="cpu", port=Post(), process=SimpleNamespace(pid=100 + r), phase="setting up")
            for r in range(world_size)
        ]
        self.ledger = Ledger(self.host, self.crew, self._end)

    def _end(self, reason, text, trace):
        raise Ended(reason, text)

    def answer(self, rank, stage, outcome="ok", kind="", text="", job="7", value=None):
        self.ledger.add(pack(Answer(rank, job, stage, outcome, kind, text, "line of trace"), value))

    def answer_all(self, stage, *args, **kwargs):
        for member in self.crew:
            self.answer(member.rank, stage, *args, **kwargs)

    def begin(self, timeout=None, cancel_timeout=30.0):
        self.ledger.begin_job(Frame(Job("7", timeout, cancel_timeout)))

    def run(self, timeout=None, cancel_timeout=30.0):
        self.begin(timeout, cancel_timeout)
        self.answer_all("check")

    def seconds_left(self):
        return self.ledger.round.deadline - time.monotonic()

    def orders(self):
        return [type(record) for record in self.crew[0].port.records]

    def let_deadline_pass(self):
        assert self.ledger.round.deadline is not None
        self.ledger.round.deadline = time.monotonic() - 1
        self.ledger.check_deadline()


def test_a_job_that_goes_well_is_checked_run_and_answered_with_rank_0():
    desk = Desk()
    desk.run()
    desk.answer(1, "run", value="ignored")
    desk.answer(0, "run", value=[torch.ones(2)])
    assert desk.orders() == [Job, Go] and desk.ledger.round is None
    assert desk.host.records == [JobDone("7")]
    assert torch.equal(unpack(desk.host.frames[0])[0], torch.ones(2))


def test_no_rank_goes_before_all_have_checked():
    desk = Desk()
    desk.begin()
    desk.answer(1, "check")
    assert desk.orders() == [Job]


def test_b110_one_refusal_drops_the_job_on_all():
    desk = Desk()
    desk.begin()
    desk.answer(0, "check", "error", "ValueError", "too odd")
    desk.answer(1, "check")
    assert desk.orders() == [Job, Drop]
    assert desk.host.records[0].text == "Rank 0 of 2 refused the job: too odd"


def test_cancel_during_the_check_drops_the_job():
    desk = Desk()
    desk.begin()
    desk.ledger.cancel(Cancel("7"))
    desk.answer_all("check")
    assert desk.orders() == [Job, Cancel, Drop] and desk.host.records[0].reason == "cancelled"


def test_cancel_of_another_job_is_ignored():
    desk = Desk()
    desk.ledger.cancel(Cancel("6"))
    desk.run()
    desk.ledger.cancel(Cancel("6"))
    assert desk.orders() == [Job, Go]


def test_failure_of_all_is_told_only_after_the_ranks_have_proved_to_be_in_step():
    desk = Desk()
    desk.run()
    desk.answer_all("run", "error", "KeyError", "'a'")
    assert desk.orders()[-1] is Settle and desk.host.records == []
    desk.answer_all("settle")
    assert desk.host.records == [JobFailed("7", "error", "KeyError: 'a'", "line of trace")]


def test_different_failures_are_told_rank_by_rank():
    desk = Desk()
    desk.run()
    desk.answer(0, "run", "error", "ValueError", "one")
    desk.answer(1, "run", "error", "KeyError", "two")
    desk.answer_all("settle")
    assert desk.host.records[0].text == "Rank 0: one\nRank 1: KeyError: two"


@pytest.mark.parametrize("late", [False, True])
def test_ranks_out_of_step_after_a_failure_end_the_fleet(late):
    desk = Desk()
    desk.run()
    desk.answer_all("run", "error", "ValueError", "both")
    desk.answer(1, "settle", "error", "FleetError", "2 instead of 3")
    with pytest.raises(Ended) as caught:
        desk.let_deadline_pass() if late else desk.answer(0, "settle")
    reason, text = caught.value.args
    assert reason == "asymmetric" and "both" in text and "2 instead of 3" in text


def test_failure_of_one_rank_ends_the_fleet_when_the_others_do_not_follow():
    desk = Desk()
    desk.run()
    desk.answer(1, "run", "error", "KeyError", "'x'")
    assert desk.ledger.round.deadline - time.monotonic() < 2.1
    desk.ledger.check_deadline()  # not yet
    with pytest.raises(Ended) as caught:
        desk.let_deadline_pass()
    reason, text = caught.value.args
    assert reason == "asymmetric"
    assert text.startswith("Rank 1 (cpu) raised KeyError: 'x' during job 7 while rank 0 went on.")
    assert "line of trace" in text


def test_failure_of_one_rank_beside_a_success_ends_the_fleet():
    desk = Desk()
    desk.run()
    desk.answer(0, "run")
    with pytest.raises(Ended, match="Rank 1 .* and others did not"):
        desk.answer(1, "run", "error", "ValueError", "alone")


def test_a_job_over_its_time_is_cancelled_first_and_then_ends_the_fleet():
    desk = Desk(3)
    desk.run(timeout=5.0)
    desk.answer(1, "run")
    desk.let_deadline_pass()
    assert desk.orders() == [Job, Go, Cancel]
    with pytest.raises(Ended) as caught:
        desk.let_deadline_pass()
    reason, text = caught.value.args
    assert reason == "timeout"
    assert text.startswith(
        "No answer from ranks 0, 2 within 30 s after job 7 was cancelled for taking longer than its 5 s."
    )


def test_a_cancelled_job_that_does_not_leave_ends_the_fleet_and_names_the_silent_ranks():
    desk = Desk(3)
    desk.run()
    desk.ledger.cancel(Cancel("7"))
    assert 29 < desk.seconds_left() <= 30
    desk.ledger.check_deadline()  # not yet
    with pytest.raises(Ended) as caught:
        desk.let_deadline_pass()
    reason, text = caught.value.args
    assert reason == "timeout"
    assert text.startswith("No answer from ranks 0, 1, 2 within 30 s after job 7 was cancelled. The fleet was ended")


def test_a_rank_that_stays_when_the_others_have_left_a_cancelled_job_is_the_one_named():
    desk = Desk()
    desk.run()
    desk.ledger.cancel(Cancel("7"))
    desk.answer(0, "run", "cancelled", "JobCancelled", "Job 7 was cancelled.")
    assert 29 < desk.seconds_left() <= 30
    with pytest.raises(Ended, match="No answer from rank 1 within 30 s after job 7 was cancelled"):
        desk.let_deadline_pass()


def test_a_rank_that_leaves_by_itself_as_if_cancelled_does_not_leave_the_job_without_a_deadline():
    desk = Desk()
    desk.run()
    desk.answer(0, "run", "cancelled", "JobCancelled", "of its own")
    with pytest.raises(Ended, match="No answer from rank 1"):
        desk.let_deadline_pass()


def test_a_job_whose_steps_were_slow_has_three_of_them_to_leave_after_a_cancel(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("mgpu_runtime.fleet.ledger.time.monotonic", lambda: now[0])
    desk = Desk()
    desk.run()
    for seconds in (2.0, 50.0, 3.0):
        now[0] += seconds
        desk.ledger.note_event(Emit(0, "7", "progress"))
    now[0] += 500.0
    desk.ledger.note_event(Emit(0, "6", "log"))  # of a thread that has outlived its job
    now[0] -= 490.0
    desk.ledger.cancel(Cancel("7"))
    assert desk.seconds_left() == 150.0
    desk.answer(1, "run", "error", "KeyError", "'x'")
    assert desk.seconds_left() == 2.0  # a rank that fails alone still ends the fleet soon


def test_a_cancel_in_a_long_silence_waits_as_long_again(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("mgpu_runtime.fleet.ledger.time.monotonic", lambda: now[0])
    desk = Desk()
    desk.run()
    now[0] += 80.0  # loading a model, say
    desk.ledger.cancel(Cancel("7"))
    assert desk.seconds_left() == 80.0


def test_a_time_limit_that_is_over_while_the_ranks_leave_changes_nothing():
    desk = Desk()
    desk.run(timeout=5.0)
    desk.ledger.cancel(Cancel("7"))
    assert 29 < desk.seconds_left() <= 30
    desk.answer_all("run", "cancelled", "JobCancelled", "Job 7 was cancelled.")
    desk.answer_all("settle")
    assert desk.host.records[0].reason == "cancelled" and desk.orders() == [Job, Go, Cancel, Settle]


def test_a_refusal_does_not_shorten_the_check_of_the_other_ranks():
    desk = Desk()
    desk.begin()
    desk.answer(0, "check", "error", "ValueError", "too odd")
    assert desk.seconds_left() > 100
    desk.answer(1, "check")
    assert desk.host.records[0].text == "Rank 0 of 2 refused the job: too odd"


def test_a_check_that_never_answers_is_named_also_beside_a_refusal():
    desk = Desk()
    desk.begin()
    desk.answer(0, "check", "error", "ValueError", "too odd")
    with pytest.raises(Ended, match=r"No answer from rank 1 within 120 s during job 7 \(check\)"):
        desk.let_deadline_pass()


def test_a_job_over_its_time_that_leaves_in_step_keeps_the_fleet():
    desk = Desk()
    desk.run(timeout=5.0)
    desk.let_deadline_pass()
    desk.answer_all("run", "cancelled", "JobCancelled", "x")
    desk.answer_all("settle")
    assert desk.host.records[0].reason == "timeout" and "longer than its 5 s" in desk.host.records[0].text


def test_a_job_without_a_time_limit_has_no_deadline():
    desk = Desk()
    desk.run()
    assert desk.ledger.round.deadline is None
    desk.ledger.check_deadline()


def test_a_check_that_never_answers_is_named():
    desk = Desk()
    desk.begin()
    desk.answer(0, "check")
    with pytest.raises(Ended, match=r"No answer from rank 1 within 120 s during job 7 \(check\)"):
        desk.let_deadline_pass()


def test_start_tells_the_pids_when_all_are_ready():
    desk = Desk()
    desk.ledger.begin_start(time.monotonic() + 60, 60.0)
    desk.answer_all("start", job="")
    assert desk.host.records == [Started([100, 101])] and desk.ledger.round is None


def test_start_that_takes_too_long_names_the_silent_ranks_and_what_they_were_doing():
    desk = Desk()
    desk.ledger.begin_start(time.monotonic() + 60, 60.0)
    desk.answer(0, "start", job="")
    with pytest.raises(Ended) as caught:
        desk.let_deadline_pass()
    reason, text = caught.value.args
    assert reason == "start"
    assert text.startswith("No answer from rank 1 within 60 s during the start (rank 1 was last setting up).")


def test_start_that_fails_on_one_rank_names_it():
    desk = Desk()
    desk.ledger.begin_start(time.monotonic() + 60, 60.0)
    desk.answer(1, "start", "error", "ValueError", "no file", job="")
    with pytest.raises(Ended, match="Rank 1 .cpu. raised ValueError: no file during the start while rank 0 went on"):
        desk.let_deadline_pass()


def test_exits_are_put_into_words():
    assert say_exit(3) == "ended with exit code 3"
    assert say_exit(-11) == "was killed by signal 11 (SIGSEGV)"
    assert "SIGKILL" in say_exit(-9) and "memory" in say_exit(-9)
