"""What happens where no file may be opened any more: an error that says so, in whichever process it is."""

import os
import resource
import socket
import threading
from contextlib import contextmanager

import pytest
import torch

from mgpu_runtime.fleet import AsymmetricRunnerError, FleetError, FleetStartError, MGPUController
from mgpu_runtime.fleet.codec import pack, unpack
from mgpu_runtime.fleet.frames import Channel, Port
from mgpu_runtime.fleet.records import JobDone
from tests.fleet_fixtures import START_TIMEOUT_S, fleet
from tests.fleet_processes import left_after
from tests.fleet_runners import Echo

__all__ = ["fleet"]

ADVICE = "Process {pid} is out of file descriptors: .* Raise the limit with `ulimit -n`"


def lower_limit(pid: int) -> tuple[int, int]:
    """Leaves a process no descriptor to open, and returns the limits that it had."""
    folder = f"/proc/{pid}/fd"
    used = {int(name) for name in os.listdir(folder) if os.path.lexists(f"{folder}/{name}")}  # not the listing's own
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(set(range(len(used) + 1)) - used), limits[1]))
    return limits


@contextmanager
def no_descriptor_here():
    limits = lower_limit(os.getpid())
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture(scope="module")
def shared():
    controller = MGPUController(Echo, devices=["cpu", "cpu"])
    yield controller
    controller.shutdown()


@pytest.mark.parametrize("end", [Channel, Port])
def test_a_descriptor_that_was_lost_on_the_way_is_an_error_and_not_another_ones_block(end):
    mine, theirs = socket.socketpair()
    sender, receiver = Channel(mine), end(theirs)
    sender.send(pack(JobDone("1"), torch.ones(2)))
    with no_descriptor_here(), pytest.raises(FleetError, match=ADVICE.format(pid=os.getpid())):
        receiver.receive() if end is Channel else receiver.pull()
    mine.close()
    theirs.close()


def test_a_value_that_cannot_be_packed_or_unpacked_says_what_to_do():
    frame = pack(JobDone("1"), torch.ones(2))
    with no_descriptor_here():
        with pytest.raises(FleetError, match=ADVICE.format(pid=os.getpid())):
            pack(JobDone("1"), torch.ones(2))
        with pytest.raises(FleetError, match=ADVICE.format(pid=os.getpid())):
            unpack(frame)


def test_a_fleet_that_cannot_be_launched_for_it_is_a_failed_start():
    controller = MGPUController(Echo, devices=["cpu"])
    num_threads = threading.active_count()
    with no_descriptor_here(), pytest.raises(FleetStartError, match=ADVICE.format(pid=os.getpid())):
        controller.start(timeout=START_TIMEOUT_S)
    assert not controller.is_alive and threading.active_count() == num_threads


def test_the_host_is_told_before_a_job_at_no_cost_and_during_one_at_the_fleets(fleet):
    everybody = [fleet.supervisor_pid, *fleet.worker_pids]
    with no_descriptor_here(), pytest.raises(FleetError, match=ADVICE.format(pid=os.getpid())):
        fleet.stream(action="echo", value=torch.ones(2))
    assert fleet.stream(action="rank_sum").drain() == 3
    with no_descriptor_here(), pytest.raises(FleetError, match=ADVICE.format(pid=os.getpid()) + ".*next job starts"):
        fleet.stream(action="all_events").drain(timeout=30)
    assert not fleet.is_alive and left_after(everybody, 5) == []


@pytest.mark.parametrize("who", ["supervisor", "worker"])
def test_a_process_of_the_fleet_that_can_open_no_file_ends_it_and_says_so(fleet, who):
    everybody = [fleet.supervisor_pid, *fleet.worker_pids]
    pid = fleet.supervisor_pid if who == "supervisor" else fleet.worker_pids[1]
    lower_limit(pid)
    with pytest.raises(FleetError, match=ADVICE.format(pid=pid)) as caught:
        fleet.stream(action="echo", value=torch.ones(2)).drain(timeout=30)
    assert who == "supervisor" or str(caught.value).startswith("Rank 1 (cpu) ended with exit code 1 during job")
    assert isinstance(caught.value, AsymmetricRunnerError) == (who == "worker")
    assert not fleet.is_alive and left_after(everybody, 5) == []
