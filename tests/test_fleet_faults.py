"""Ranks that die, hang, fail alone or do not want to end; every fleet here is gone when its test is."""

import gc
import os
import re
import signal
import threading
import time

import pytest

from mgpu_runtime.fleet import (
    AsymmetricRunnerError,
    ControllerBusyError,
    FleetError,
    FleetStartError,
    JobCancelled,
    MGPUController,
    current,
    stop,
)
from tests.fleet_fixtures import START_TIMEOUT_S, fleet
from tests.fleet_processes import children_of, left_after
from tests.fleet_runners import BadSetup, Echo, IgnoresSigterm

__all__ = ["fleet"]


def everyone(controller):
    return [controller.supervisor_pid, *children_of(controller.supervisor_pid)]


@pytest.fixture(scope="module")
def shared():
    controller = MGPUController(Echo, devices=["cpu", "cpu"], group_timeout=3.0, cancel_timeout=1.0)
    yield controller
    controller.shutdown()


def test_b112_a_job_works_after_an_idle_time_longer_than_the_group_timeout(fleet):
    time.sleep(4)
    assert fleet.stream(action="rank_sum").drain() == 3


def test_a_killed_rank_is_reported_at_once_by_name_and_the_next_start_works(fleet):
    everybody = everyone(fleet)
    started = time.monotonic()
    stream = fleet.stream(action="die", rank=1)
    with pytest.raises(AsymmetricRunnerError) as caught:
        stream.drain(timeout=30)
    assert time.monotonic() - started < 5
    text = str(caught.value)
    assert text.startswith("Rank 1 (cpu) was killed by signal 9 (SIGKILL") and f"during job {stream.job_id}." in text
    assert "these were my last words" in text
    assert not fleet.is_alive and left_after(everybody, 5) == []
    with pytest.raises(AsymmetricRunnerError, match="Rank 1"):
        fleet.stream(action="echo")
    fleet.start(timeout=START_TIMEOUT_S)
    assert fleet.stream(action="rank_sum").drain() == 3


def test_an_error_of_one_rank_while_the_other_waits_in_a_collective_names_that_rank(fleet):
    everybody = everyone(fleet)
    with pytest.raises(AsymmetricRunnerError) as caught:
        fleet.stream(action="fail", ranks=(1,), kind="KeyError").drain(timeout=30)
    assert "Rank 1 (cpu) raised KeyError: 'seventeen is too many'" in str(caught.value)
    assert "in fail" in str(caught.value)
    assert left_after(everybody, 5) == [] and not fleet.is_alive


def test_failure_of_all_ranks_that_leaves_them_out_of_step_ends_the_fleet(fleet):
    with pytest.raises(AsymmetricRunnerError, match="out of step"):
        fleet.stream(action="out_of_step").drain(timeout=30)
    assert not fleet.is_alive


def test_b117_shutdown_after_a_rank_was_killed_while_idle_does_not_block(fleet):
    everybody = everyone(fleet)
    os.kill(fleet.worker_pids[1], signal.SIGKILL)
    deadline = time.monotonic() + 5
    while fleet.is_alive and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not fleet.is_alive
    with pytest.raises(AsymmetricRunnerError, match="Rank 1 .* while the fleet was idle"):
        fleet.stream(action="echo")
    started = time.monotonic()
    fleet.shutdown()
    fleet.shutdown()
    assert time.monotonic() - started < 3 and left_after(everybody, 5) == []


def test_b102_no_worker_outlives_a_killed_supervisor(fleet):
    everybody = everyone(fleet)
    stream = fleet.stream(action="compute", seconds=120)
    os.kill(fleet.supervisor_pid, signal.SIGKILL)
    with pytest.raises(AsymmetricRunnerError, match="supervisor .* signal 9 .* the next job starts a new one"):
        stream.drain(timeout=10)
    assert left_after(everybody, 5) == [] and not fleet.is_alive


def test_a_cancel_of_a_job_in_which_a_rank_hangs_ends_the_fleet_in_time(fleet):
    everybody = everyone(fleet)
    stream = fleet.stream(action="hang", rank=1)
    assert stream.next_event(timeout=30).kind == "progress"
    stream.cancel()
    started = time.monotonic()
    with pytest.raises(FleetError, match=rf"rank.* 1 within [\d.]+ s after job {stream.job_id} was cancelled"):
        stream.drain(timeout=30)
    assert time.monotonic() - started < 5 and not fleet.is_alive and left_after(everybody, 5) == []


def test_retire_leaves_a_running_job_alone_and_waits_for_a_cancelled_one(fleet):
    everybody = everyone(fleet)
    stream = fleet.stream(action="steps", num_steps=2000)
    with pytest.raises(ControllerBusyError, match=f"job {stream.job_id};"):
        fleet.retire()
    assert fleet.is_alive
    stream.cancel()
    fleet.retire()
    with pytest.raises(JobCancelled, match=f"^Job {stream.job_id} was cancelled"):
        stream.drain(timeout=5)
    assert not fleet.is_alive and left_after(everybody, 5) == []
    fleet.retire()


def test_a_job_that_its_own_stream_cancelled_is_cancelled_also_when_the_fleet_is_shut_down(fleet):
    stream = fleet.stream(action="hang", rank=1)
    stream.cancel()
    fleet.shutdown(graceful_timeout=0.0)
    with pytest.raises(JobCancelled):
        stream.drain(timeout=5)


def test_b99_rank_killed_during_start_is_reported_within_seconds():
    controller = MGPUController(BadSetup, devices=["cpu", "cpu"])
    with pytest.raises(FleetStartError) as caught:
        controller.start(timeout=START_TIMEOUT_S, how="die", rank=1)
    text = str(caught.value)
    assert text.startswith("Rank 1 (cpu) was killed by signal 9 (SIGKILL") and "during the start" in text
    assert time.time() - float(re.search(r"died at ([\d.]+)", text)[1]) < 5
    assert not controller.is_alive and left_after([controller.supervisor_pid], 5) == []


def test_setup_that_fails_on_all_ranks_is_the_plain_sentence():
    controller = MGPUController(BadSetup, devices=["cpu"])
    with pytest.raises(FleetStartError) as caught:
        controller.start(timeout=START_TIMEOUT_S, how="raise", rank=-1)
    assert str(caught.value) == "No checkpoint at /models/none.safetensors."
    controller.shutdown()


class Unexpected(Exception):
    """Is raised by a caller's function, for reasons of its own."""


@pytest.fixture
def interruptible():
    """Has SIGINT raise KeyboardInterrupt also where tests run in a shell's background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("how", "error"), [("stop", JobCancelled), ("raise", Unexpected), ("interrupt", KeyboardInterrupt)]
)
@pytest.mark.usefixtures("interruptible")
def test_a_start_is_given_up_at_once_when_told_to_stop_or_interrupted(how, error):
    controller = MGPUController(BadSetup, devices=["cpu", "cpu"])
    asked, everybody = [], []

    def should_stop() -> bool:
        asked.append(time.monotonic())
        everybody[:] = everyone(controller)
        if len(everybody) < 3:  # the supervisor, and at least two of its children
            return False
        if how == "raise":
            raise Unexpected
        if how == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        return how == "stop"

    with pytest.raises(error) as caught:
        controller.start(timeout=START_TIMEOUT_S, should_stop=should_stop, how="hang", rank=0)
    assert time.monotonic() - asked[-1] < 2
    assert max(b - a for a, b in zip(asked, asked[1:], strict=False)) < 1
    assert how != "stop" or "while the workers were starting" in str(caught.value)
    assert not controller.is_alive and left_after(everybody, 3) == []


def test_start_that_takes_too_long_ends_everything():
    controller = MGPUController(BadSetup, devices=["cpu"])
    with pytest.raises(FleetStartError, match=r"No answer from rank 0 within 1 s during the start"):
        controller.start(timeout=1, how="hang", rank=0)
    assert left_after([controller.supervisor_pid], 5) == []


def test_start_with_a_keyword_that_cannot_be_sent_starts_nothing():
    controller = MGPUController(Echo, devices=["cpu"])
    with pytest.raises(ValueError, match="value"):
        controller.start(what=object())
    assert controller.supervisor_pid is None
    with pytest.raises(FleetError, match="not started"):
        controller.stream(action="echo")
    controller.shutdown()


def test_an_interpreter_that_cannot_be_run_is_a_failed_start(monkeypatch):
    controller = MGPUController(Echo, devices=["cpu"])
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(FleetStartError, match="/nowhere/python"):
        controller.start()
    assert not controller.is_alive


def test_b101_workers_that_ignore_sigterm_in_a_long_job_still_end():
    controller = MGPUController(IgnoresSigterm, devices=["cpu", "cpu"])
    controller.start(timeout=START_TIMEOUT_S)
    everybody = everyone(controller)
    stream = controller.stream(action="compute", seconds=120)
    time.sleep(0.3)
    started = time.monotonic()
    others = [threading.Thread(target=controller.shutdown, kwargs={"graceful_timeout": 0.5}) for _ in range(2)]
    for thread in others:
        thread.start()
    controller.shutdown(graceful_timeout=0.5)
    for thread in others:
        thread.join(10)
    assert time.monotonic() - started < 8 and left_after(everybody, 1) == []
    with pytest.raises(FleetError, match="the fleet was shut down while the job was running") as caught:
        stream.drain(timeout=5)
    assert type(caught.value) is FleetError  # nobody has cancelled it
    controller.shutdown()


def test_b98_two_fleets_started_together_both_come_up_and_end_by_shutdown_or_by_being_dropped():
    fleets = [MGPUController(Echo, devices=["cpu"] * n) for n in (1, 2)]
    threads = [threading.Thread(target=c.start, kwargs={"timeout": START_TIMEOUT_S}) for c in fleets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(START_TIMEOUT_S)
    results = [controller.stream(action="rank_sum").drain() for controller in fleets]
    jobs = [controller.stream(action="steps", num_steps=3) for controller in fleets]
    assert results == [1, 3] and [job.drain().shape for job in jobs] == [(64,), (64,)]

    everybody = everyone(fleets[1])
    started = time.monotonic()
    fleets[1].shutdown()
    assert time.monotonic() - started < 6 and left_after(everybody, 1) == []

    # The other one is dropped: a stream in use holds the fleet, and without it nothing does.
    everybody = everyone(fleets[0])
    stream = fleets[0].stream(action="steps", num_steps=5)
    del fleets, threads, jobs, thread
    gc.collect()
    assert stream.drain().shape == (64,)
    del stream
    gc.collect()
    assert left_after(everybody, 5) == []


class FakeFleet:
    """Is alive until it is shut down."""

    def __init__(self) -> None:
        self.is_alive = True

    def shutdown(self) -> None:
        self.is_alive = False

    def retire(self) -> None:
        self.shutdown()


def test_current_keeps_one_fleet_and_starts_anew_when_it_died_or_the_key_changes():
    made = []

    def start() -> FakeFleet:
        assert not any(fleet.is_alive for fleet in made)  # the old one gives its memory back first
        made.append(FakeFleet())
        return made[-1]

    try:
        first = current(("a", 1), start)
        assert current(("a", 1), start) is first
        first.is_alive = False
        second = current(("a", 1), start)
        assert second is not first
        third = current(("b", 1), start)
        assert third is not second and not second.is_alive
        with pytest.raises(FleetStartError):
            current("c", failing_start)
        assert not third.is_alive
        assert current("c", start) is made[3]
    finally:
        stop()
    stop()
    assert len(made) == 4 and not made[3].is_alive


def failing_start() -> FakeFleet:
    raise FleetStartError("no")


def test_b118_a_first_collective_that_does_not_complete_is_found_at_start_within_its_deadline():
    controller = MGPUController(BadSetup, devices=["cpu", "cpu"], group_timeout=2.0)
    began = time.monotonic()
    with pytest.raises(FleetStartError, match="[Rr]ank"):
        controller.start(timeout=START_TIMEOUT_S, how="", rank=1)  # rank 0 waits in a barrier that rank 1 never enters
    assert time.monotonic() - began < 45 and not controller.is_alive
