"""The benchmarks, on cases small enough to be quick: what they print and refuse. Speed itself is a slow test."""

import json
import os
import signal
import time

import pytest

from mgpu_runtime.bench.harness import Contestant, measure
from mgpu_runtime.bench.launch import run_bench
from mgpu_runtime.bench.plan import BENCHES, BenchPlan, exchange_tokens
from mgpu_runtime.cli import main
from mgpu_runtime.exchange.errors import ExchangeError
from mgpu_runtime.exchange.native import cpu_library
from mgpu_runtime.fleet import Event, FleetError
from tests.fleet_processes import children_of, left_after
from tests.spawn import run

KEYS = {"bench", "case", "peer", "ours_s", "peer_s", "speedup", "runs", "world_size", "threads", "transport", "device"}


def _bench(capsys: pytest.CaptureFixture, *words: str) -> list[dict]:
    """Runs the command and returns its JSON lines, checked for what all have in common."""
    assert main(["bench", *words, "--json"]) == 0
    printed = capsys.readouterr()
    assert "run 5 of" in printed.err
    records = [json.loads(line) for line in printed.out.splitlines()]
    for record in records:
        assert record.keys() >= KEYS and record["bench"] == words[0]
        assert record["speedup"] == record["peer_s"] / record["ours_s"]
        assert 0 < record["ours_min_s"] <= record["ours_s"] and 0 < record["peer_min_s"] <= record["peer_s"]
        assert (record["world_size"], record["threads"], record["device"]) == (2, 1, "cpu")
        assert record["runs"] >= 5 and record["dtype"] == "float32"
    assert len({(record["case"], record["ours_s"]) for record in records}) == len(
        {record["case"] for record in records}
    )
    return records


def test_bench_exchange_measures_ours_and_its_peers_in_one_run(capsys: pytest.CaptureFixture) -> None:
    records = _bench(capsys, "exchange", "--cases", "64KiB,8KiB", "--transport", "gloo", "--runs", "5")
    assert [(record["case"], record["peer"]) for record in records] == [
        (case, peer) for case in ("64KiB", "8KiB") for peer in ("usual", "memcpy", "single")
    ]
    for record in records:
        assert record["transport"] == "gloo" and record["max_rel_diff"] == 0
    assert records[0]["shape"] == [1, 8, 32, 64] and records[0]["bytes_per_rank"] == 64 << 10


@pytest.mark.slow
def test_bench_sp_measures_the_same_work_of_one_worker_and_of_the_usual_code(capsys: pytest.CaptureFixture) -> None:
    records = _bench(capsys, "sp", "--cases", "64", "--runs", "5")
    assert [record["peer"] for record in records] == ["one_worker", "usual", "two_processes"]
    for record in records:
        assert (record["video_tokens"], record["audio_tokens"], record["text_tokens"]) == (64, 59, 128)
        assert (record["blocks"], record["heads"], record["head_dim"]) == (4, 8, 64)
        assert record["max_rel_diff"] <= 1e-4


def _measured(rank: int, group) -> tuple[dict, list[int], int]:
    calls, rounds = [], []
    contestants = {
        "slowest": Contestant(lambda: time.sleep(0.04 * (1 + rank))),
        "pieces": Contestant(lambda: time.sleep(0.04), pieces=4),
        "alone": Contestant(lambda: (calls.append(rank), time.sleep(0.12)), solo=True),
    }
    times = measure(contestants, runs=3, group=group, warm_ups=1, on_round=rounds.append)
    return {name: value.runs for name, value in times.items()}, rounds, len(calls)


def test_a_run_lasts_until_its_slowest_rank_is_done_and_a_solo_one_is_run_by_the_first() -> None:
    (times, rounds, calls), (others_times, others_rounds, others_calls) = run(_measured, 2)
    assert times == others_times and rounds == others_rounds == [1, 2, 3]
    assert (calls, others_calls) == (4, 0)
    for name, least in (("slowest", 0.08), ("pieces", 0.01), ("alone", 0.12)):
        assert len(times[name]) == 3 and least <= min(times[name]) < least + 0.2, times


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_benchmark() -> None:
    def kill_a_worker(event: Event) -> None:
        if event.kind == "progress":
            workers = [pid for child in children_of(os.getpid()) for pid in children_of(child)]
            seen.extend(workers)
            os.kill(workers[-1], signal.SIGKILL)

    seen: list[int] = []
    with pytest.raises(FleetError, match="SIGKILL|killed|died"):
        list(run_bench(BenchPlan("exchange", ("64KiB",), transport="gloo", runs=5000, timeout=60), kill_a_worker))
    assert len(seen) >= 2 and not left_after(seen, 10)


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["exchange", "--runs", "4"], "--runs must be at least 5"),
        (["exchange", "--workers", "3"], "--workers must be one of 2, 4, 8, 16, 32"),
        (["sp", "--workers", "1"], "--workers must be one of 2, 4, 8 "),
        (["sp", "--cases", "2049"], "does not divide over 2 workers"),
        (["sp", "--cases", "8MiB"], "a number of video tokens"),
        (["exchange", "--cases", "8MiB,2048"], "'2048' is no tensor size"),
        (["exchange", "--cases", "9KiB"], "in steps of 8KiB"),
        (["exchange", "--transport", "pigeon"], "no transport 'pigeon': choose from auto, csrc"),
        (["exchange", "--timeout", "0"], "--timeout must be more than 0"),
    ],
)
def test_a_wrong_option_is_refused_with_one_sentence(words, sentence, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", *words]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and sentence in printed.err
    assert printed.err.count("\n") == 1


def test_without_json_there_is_a_table(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"bench": "sp", "case": "64", "peer": "usual", "ours_s": 0.5, "peer_s": 1.0, "speedup": 2.0}
    monkeypatch.setattr("mgpu_runtime.bench.launch.run_bench", lambda plan, on_event: [record | {"exchange": "csrc"}])
    assert main(["bench", "sp"]) == 0
    header, row, note = capsys.readouterr().out.splitlines()
    assert header.split() == ["bench", "case", "peer", "ours", "peer", "speedup"]
    assert row.split() == ["sp", "64", "usual", "500.00", "ms", "1000.00", "ms", "2.000"] and "csrc" in note


def test_an_unknown_benchmark_is_told_the_known_ones(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "everything"])
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert all(name in printed for name in BENCHES)
    with pytest.raises(ValueError, match="exchange, sp"):
        BenchPlan("everything")


def test_sizes_of_cases() -> None:
    assert [exchange_tokens(case) for case in ("8KiB", "8MiB", "64MiB", "1GiB")] == [1, 1024, 8192, 131072]
    assert BenchPlan("sp").cases == ("2048", "8192") and BenchPlan("exchange").cases == ("8MiB", "64MiB")
    assert BenchPlan("sp").num_runs("8192") == 5 and BenchPlan("sp", runs=6).num_runs("8192") == 6


def test_build_says_what_was_built(capsys: pytest.CaptureFixture) -> None:
    assert main(["build"]) == 0
    assert capsys.readouterr().out.count("\n") >= 1


@pytest.mark.slow
def test_the_exchange_beats_the_usual_code_and_nears_a_copy(capsys: pytest.CaptureFixture) -> None:
    try:
        cpu_library()
    except ExchangeError as error:
        pytest.skip(str(error))
    speedups = {}
    for record in _bench(capsys, "exchange", "--transport", "csrc"):
        speedups.setdefault(record["peer"], []).append(record["speedup"])
    assert min(speedups["usual"]) >= 3, speedups
    assert min(speedups["memcpy"]) >= 0.67, speedups
