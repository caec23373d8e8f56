"""The process that holds a fleet: workers run nothing of it, nothing in it changes, its death is the fleet's."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleet_processes import left_after, shared_memory_of

PACK_ROOT = Path(__file__).resolve().parents[1]

# Like a server of plugins: its folder is on the search path, and its main file imports a `utils` of its own.
HOST_MAIN = """
import json, multiprocessing, os, signal, sys, threading, time
import utils
sys.path.append(sys.argv[1])
from mgpu_runtime.fleet import MGPUController

def state():
    signals = {n: str(signal.getsignal(n)) for n in signal.valid_signals() if n not in (signal.SIGKILL, signal.SIGSTOP)}
    return [dict(os.environ), signals, multiprocessing.get_start_method(allow_none=True), list(sys.path), os.getcwd()]

before = state()
fleet = MGPUController("tests.fleet_runners:Echo", devices=["cpu"] * int(sys.argv[2]))
fleet.start(timeout=120)
facts = fleet.stream(action="facts").drain()
pids = [fleet.supervisor_pid, *fleet.worker_pids]
report = {"unchanged": state() == before, "modules": facts["modules"], "pids": pids}
print(json.dumps(report), flush=True)
job = sys.argv[3]
if job == "leave":
    sys.exit()
if job == "steps":
    next(fleet.stream(action="steps", num_steps=100000))
    print("running", flush=True)
elif job == "compute":
    stream = fleet.stream(action="compute", seconds=300)
    print("running", flush=True)
time.sleep(300)
"""


# Forks while one thread holds the table of fleets, another the controller, and a job runs.
FORK_MAIN = """
import gc, json, os, signal, sys
sys.path.append(sys.argv[1])
from mgpu_runtime.fleet import FleetError, MGPUController, current
from mgpu_runtime.fleet.table import _table

def start():
    controller = MGPUController("tests.fleet_runners:Echo", devices=["cpu"])
    controller.start(timeout=60)
    return controller

def error_of(act):
    try:
        return repr(act())
    except FleetError as error:
        return str(error)

def use_in_child(fleet, stream):
    signal.alarm(60)  # what hangs is ended
    report = {"alive": fleet.is_alive, "stream": error_of(lambda: fleet.stream(action="echo"))}
    report["next_event"] = error_of(stream.next_event)
    fleet.shutdown()
    own = current("key", start)
    report["own"] = [own is not fleet, own.stream(action="rank_sum").drain()]
    fleet.start(timeout=60)
    report["anew"] = fleet.stream(action="rank_sum").drain()
    report["pids"] = [os.getpid(), own.supervisor_pid, *own.worker_pids, fleet.supervisor_pid, *fleet.worker_pids]
    print(json.dumps(report), flush=True)

fleet = current("key", start)
stream = fleet.stream(action="steps", num_steps=100000)
next(stream)
with _table().lock, fleet._lock:
    child = os.fork()
if child == 0:
    use_in_child(fleet, stream)
    del fleet, stream
    gc.collect()
    sys.exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
running = next(stream).kind
stream.close()
again = current("key", start)
total = again.stream(action="rank_sum").drain()
print(json.dumps({"status": status, "running": running, "same": again is fleet, "sum": total}))
"""


@pytest.fixture
def launch(tmp_path):
    """Starts the host script and returns its process and its report; kills it at the end."""
    (tmp_path / "main.py").write_text(HOST_MAIN, encoding="utf-8")
    (tmp_path / "utils.py").write_text(
        "import os\nwith open(__file__ + '.imported', 'a') as f: print(os.getpid(), file=f)\n", encoding="utf-8"
    )
    hosts = []

    def start(world_size: int, job: str) -> tuple[subprocess.Popen, dict]:
        command = [sys.executable, "-W", "default", "main.py", str(PACK_ROOT), str(world_size), job]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        host = subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
        )
        hosts.append(host)
        report = json.loads(host.stdout.readline() or host.stderr.read())
        if job in ("steps", "compute"):
            assert host.stdout.readline() == "running\n"
        return host, report

    yield start
    for host in hosts:
        host.kill()
        host.communicate(timeout=30)


def test_b94_b97_workers_never_run_the_hosts_main_and_the_host_is_not_changed(launch, tmp_path):
    host, report = launch(2, "leave")
    out, errors = host.communicate(timeout=60)
    assert (tmp_path / "utils.py.imported").read_text(encoding="utf-8").split() == [str(host.pid)]
    assert "utils" not in report["modules"] and "tests.fleet_runners" in report["modules"]
    assert report["unchanged"]
    # It left without a word to its fleet, which is gone nevertheless, and no warning was printed on the way.
    assert left_after(report["pids"], 5) == []
    assert (host.returncode, out, errors) == (0, "", "")


@pytest.mark.parametrize(("world_size", "job"), [(1, "idle"), (2, "steps"), (1, "compute")])
def test_b102_b104_killed_host_leaves_no_process_and_no_shared_memory(launch, world_size, job):
    host, report = launch(world_size, job)
    assert [line for pid in report["pids"] for line in shared_memory_of(pid)] == []
    os.kill(host.pid, signal.SIGKILL)
    assert left_after(report["pids"], 5) == []


def test_b133_a_second_import_under_another_name_shares_the_table_of_fleets():
    from mgpu_runtime.fleet.table import _table

    folder = PACK_ROOT / "mgpu_runtime"
    spec = importlib.util.spec_from_file_location(
        "another_name", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules["another_name"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules["another_name"])
        other = importlib.import_module("another_name.fleet.table")
        assert other._table() is _table()
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "another_name"]:
            del sys.modules[name]


@pytest.mark.slow
def test_a_forked_child_starts_a_fleet_of_its_own_and_leaves_its_parents_alone(tmp_path):
    main = tmp_path / "main.py"
    main.write_text(FORK_MAIN, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(main), str(PACK_ROOT)], capture_output=True, encoding="utf-8", timeout=120
    )
    assert done.returncode == 0, done.stderr
    child, parent = (json.loads(line) for line in done.stdout.splitlines())
    assert child["alive"] is False
    assert "belongs to process" in child["stream"] and "belongs to process" in child["next_event"]
    assert child["own"] == [True, 1] and child["anew"] == 1
    assert parent == {"status": 0, "running": "progress", "same": True, "sum": 1}
    assert left_after(child["pids"], 5) == []
