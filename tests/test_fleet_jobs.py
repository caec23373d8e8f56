"""Jobs on a warm fleet of two CPU workers: results, events, refusals, failures on all ranks, cancels."""

import gc
import os
import signal
import threading
import time

import pytest
import torch

from mgpu_runtime.fleet import (
    ControllerBusyError,
    Event,
    FleetError,
    JobCancelled,
    MGPUController,
    SymmetricRunnerError,
    current,
)
from mgpu_runtime.fleet.table import _table
from tests.fleet_runners import Echo

START_TIMEOUT_S = 120


@pytest.fixture(scope="module")
def fleet():
    controller = MGPUController(Echo, devices=["cpu", "cpu"])
    controller.start(timeout=START_TIMEOUT_S, scale=torch.tensor(2.0), names=["a"])
    yield controller
    controller.shutdown()


@pytest.fixture(autouse=True)
def _stays_warm(request):
    """No test of this file may cost the fleet: it ends as it began, with the same processes."""
    controller = request.getfixturevalue("fleet")
    before = (controller.supervisor_pid, list(controller.worker_pids))
    yield
    assert controller.is_alive and (controller.supervisor_pid, controller.worker_pids) == before
    assert controller.stream(action="rank_sum").drain() == 3


def last_steps(events):
    return {rank: max(e.data["step"] for e in events if e.kind == "progress" and e.rank == rank) for rank in (0, 1)}


def test_values_of_all_kinds_go_in_and_come_out(fleet):
    value = {
        "nested": [1, (2.5, None, "\u00e9"), {"deep": torch.tensor(3, dtype=torch.bfloat16)}],
        "empty": torch.empty(0, 3),
        "strided": torch.arange(6.0).view(2, 3).t(),
        7: True,
    }
    back = fleet.stream(action="echo", value=value).drain()
    assert torch.equal(back["nested"][2].pop("deep"), value["nested"][2].pop("deep"))
    assert back["nested"] == value["nested"] and back[7] is True and back["empty"].shape == (0, 3)
    assert torch.equal(back["strided"], value["strided"])
    assert fleet.stream(action="echo").drain() is None


def test_a_large_tensor_comes_back_bit_equal(fleet):
    big = torch.randn(16 << 20)  # 64 MB
    assert torch.equal(fleet.stream(action="echo", value=big).drain(), big)


def test_b123_tensors_are_ordinary_on_both_sides_also_from_inference_mode_and_another_thread(fleet):
    got = []

    def use() -> None:
        with torch.inference_mode():
            got.append(fleet.stream(action="properties", value=torch.ones(3)).drain())

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(60)
    assert got[0]["is_inference"] is False and not got[0]["sums"].is_inference()
    assert got[0]["sums"].tolist() == [3.0, 6.0]  # each rank wrote into a copy of its own
    got[0]["sums"].add_(1)


def test_workers_know_their_place_and_get_the_setup_keywords(fleet):
    facts = fleet.stream(action="facts").drain()
    assert (facts["rank"], facts["world_size"], facts["device"]) == (0, 2, "cpu")
    assert facts["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)
    assert facts["setup"]["names"] == ["a"] and facts["setup"]["scale"].item() == 2.0
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and "MKL_CBWR" not in os.environ:
        assert facts["mkl"] == f"{torch.backends.cpu.get_cpu_capability()},STRICT"
    assert not {"comfy", "nodes", "server"} & set(facts["modules"])


def test_events_come_in_order_with_their_data(fleet):
    stream = fleet.stream(action="all_events")
    events = list(stream)
    assert [e.kind for e in events] == ["progress", "preview", "latent", "frames", "log"]
    assert all(isinstance(e, Event) and e.rank == 0 and e.job_id == stream.job_id for e in events)
    assert events[0].data == {"stage": "stage", "step": 1, "of": 2, "sigma": None}
    assert torch.equal(events[1].data["image"], torch.full((4, 6, 3), 7, dtype=torch.uint8))
    assert torch.equal(events[2].data["tensor"], torch.arange(6.0).view(2, 3).t())
    assert events[3].data["start"] == 3 and events[3].data["tensor"].shape == (2, 4, 6, 3)
    assert events[4].data == {"text": "half way"}
    assert stream.done and stream.result == "end" and stream.drain() == "end"


def test_events_arrive_while_the_job_runs(fleet):
    stream = fleet.stream(action="steps", num_steps=10, seconds=0.05)
    assert stream.next_event(timeout=30).data["step"] == 1
    assert not stream.done
    with pytest.raises(FleetError, match="no result yet"):
        _ = stream.result
    stream.drain()


def test_next_event_and_drain_return_after_their_timeout(fleet):
    stream = fleet.stream(action="steps", num_steps=4, seconds=0.3)
    started = time.monotonic()
    while stream.next_event(timeout=0.05) is not None:
        pass
    assert time.monotonic() - started < 2 and not stream.done
    with pytest.raises(FleetError, match=r"did not end within 0\.05 s"):
        stream.drain(timeout=0.05)
    stream.drain()


def test_b106_descriptors_are_as_many_after_job_5_as_after_job_60(fleet):
    pids = [os.getpid(), fleet.supervisor_pid, *fleet.worker_pids]

    def count() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]

    kept = []
    for number in range(60):
        kept.append(fleet.stream(action="echo", value=[torch.ones(100), torch.ones(2)]).drain())
        list(fleet.stream(action="all_events"))
        if number == 4:
            after_5 = count()
    assert count() == after_5


def test_b108_cancel_stops_all_ranks_at_the_same_step_and_the_next_job_is_as_ever(fleet):
    alone = fleet.stream(action="steps", num_steps=5, seed=3).drain()
    stream = fleet.stream(action="steps", num_steps=500, seed=4)
    events = []
    with pytest.raises(JobCancelled, match=f"^Job {stream.job_id} was cancelled"):
        for event in stream:
            events.append(event)
            if event.data["step"] == 3:
                stream.cancel()
    steps = last_steps(events)
    assert steps[0] == steps[1] < 100
    assert torch.equal(fleet.stream(action="steps", num_steps=5, seed=3).drain(), alone)


def test_cancel_after_the_end_and_twice_does_nothing(fleet):
    stream = fleet.stream(action="echo", value=1)
    stream.drain()
    stream.cancel()
    stream.close()
    running = fleet.stream(action="steps", num_steps=500)
    running.cancel()
    running.cancel()
    with pytest.raises(JobCancelled):
        running.drain()
    with pytest.raises(JobCancelled):
        running.next_event(timeout=0)


@pytest.mark.parametrize("how", ["close", "with", "collect"])
def test_a_stream_left_early_cancels_its_job(fleet, how):
    stream = fleet.stream(action="steps", num_steps=2000)
    next(stream)
    if how == "close":
        stream.close()
    elif how == "with":
        with stream:
            pass
    del stream
    gc.collect()
    started = time.monotonic()
    assert fleet.stream(action="echo", value=5).drain() == 5
    assert time.monotonic() - started < 10


def test_b110_refusal_by_one_rank_keeps_all_out_and_costs_nothing(fleet):
    with pytest.raises(SymmetricRunnerError) as caught:
        fleet.stream(action="rank_sum", refuse_on=(1,)).drain(timeout=30)
    assert str(caught.value) == "Rank 1 of 2 refused the job: The size 7 is odd; choose an even one."


def test_refusal_by_a_rank_that_is_quick_waits_for_the_check_of_a_slow_one(fleet):
    with pytest.raises(SymmetricRunnerError, match="^Rank 0 of 2 refused the job: The size 7"):
        fleet.stream(action="rank_sum", refuse_on=(0,), check_seconds={1: 2.5}).drain(timeout=30)


def test_refusal_by_all_ranks_is_the_plain_sentence(fleet):
    with pytest.raises(SymmetricRunnerError) as caught:
        fleet.stream(action="rank_sum", refuse_on=(0, 1)).drain(timeout=30)
    assert str(caught.value) == "The size 7 is odd; choose an even one."
    with pytest.raises(SymmetricRunnerError, match="TypeError: .*action"):
        fleet.stream().drain(timeout=30)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ValueError", "seventeen is too many"),
        ("RunnerError", "seventeen is too many"),
        ("KeyError", "KeyError: 'seventeen is too many'"),
    ],
)
def test_failure_on_every_rank_is_one_sentence_and_the_fleet_stays(fleet, kind, text):
    with pytest.raises(SymmetricRunnerError) as caught:
        fleet.stream(action="fail", ranks=(0, 1), kind=kind).drain(timeout=30)
    assert str(caught.value) == text
    assert "in fail" in caught.value.trace


def test_b111_second_job_is_turned_away_with_the_running_ones_id(fleet):
    stream = fleet.stream(action="steps", num_steps=30)
    with pytest.raises(ControllerBusyError, match=f"busy with job {stream.job_id};") as caught:
        fleet.stream(action="echo")
    assert caught.value.job_id == stream.job_id
    assert stream.drain().shape == (64,)


def test_another_configuration_does_not_end_a_running_job(fleet):
    table = _table()
    assert table.controller is None
    try:
        assert current("this", lambda: fleet) is fleet
        stream = fleet.stream(action="steps", num_steps=30)
        with pytest.raises(ControllerBusyError, match=f"busy with job {stream.job_id};") as caught:
            current("another", lambda: pytest.fail("a second fleet was started"))
        assert caught.value.job_id == stream.job_id
        assert current("this", lambda: pytest.fail("the fleet was lost")) is fleet
        assert stream.drain().shape == (64,)
    finally:
        table.controller = table.key = None


def test_a_job_over_its_time_is_cancelled_and_the_fleet_stays(fleet):
    started = time.monotonic()
    with pytest.raises(FleetError, match=r"longer than its 0\.3 s") as caught:
        fleet.stream(timeout=0.3, action="steps", num_steps=2000).drain()
    assert type(caught.value) is FleetError and time.monotonic() - started < 5


def test_what_cannot_be_sent_is_refused_before_the_job(fleet):
    with pytest.raises(ValueError, match=r"value\['value'\] is a builtins.object"):
        fleet.stream(action="echo", value=object())


def test_starting_a_running_fleet_is_refused(fleet):
    with pytest.raises(FleetError, match="running already"):
        fleet.start()


def test_ctrl_c_in_the_terminal_does_not_reach_the_fleet(fleet):
    for pid in (fleet.supervisor_pid, *fleet.worker_pids):
        assert os.getsid(pid) == fleet.supervisor_pid
        os.kill(pid, signal.SIGINT)
    time.sleep(0.2)
    assert fleet.stream(action="echo", value=1).drain(timeout=30) == 1


def test_b122_workers_load_nothing_of_the_host_nor_of_other_packs(fleet):
    modules = {name.split(".")[0] for name in fleet.stream(action="facts").drain()["modules"]}
    assert not modules & {"comfy", "comfy_api", "nodes", "server", "execution", "folder_paths", "custom_nodes"}
