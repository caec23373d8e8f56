"""The exchange through shared memory: its buffers, its library, and many exchanges at uneven speed."""

import os
import random
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mgpu_runtime.exchange import ExchangeError, exchange_for, native, shared_memory
from mgpu_runtime.exchange.segment import BANKS, Segment, free_memory
from mgpu_runtime.exchange.shared_memory import SharedMemory
from tests.csrc_ranks import do, opened, pair, set_up
from tests.rank_group import RankGroup

__all__ = ["pair"]


def marked(rank: int, number: int, tokens: int, heads: int, channels: int = 16) -> torch.Tensor:
    """Returns (1, tokens, heads, channels) with values that tell sender, exchange, token and head."""
    places = torch.arange(tokens * heads, dtype=torch.float64).view(1, tokens, heads, 1)
    return (places + 1000.0 * rank + 10000.0 * number).expand(1, tokens, heads, channels)


def is_from_all(result: torch.Tensor, exchange: SharedMemory, number: int, tokens: list[int], heads: int) -> bool:
    """Tells whether `result` is what send_recv_heads makes of every rank's `marked`; heads divide evenly."""
    each = heads // exchange.world_size
    mine = slice(exchange.rank * each, (exchange.rank + 1) * each)
    want = torch.cat([marked(r, number, count, heads)[:, :, mine] for r, count in enumerate(tokens)], dim=1)
    return torch.equal(result, want)


def grow(group: dist.ProcessGroup) -> list[int]:
    exchange, wrong = opened(), []
    place = exchange._own.place(0, 0)
    for number, tokens in enumerate((1, 3000, 5, 0, 9000, 9001)):
        counts = [tokens, tokens + 1]
        x = marked(exchange.rank, number, counts[exchange.rank], 4)
        if not is_from_all(exchange.send_recv_heads(x, counts), exchange, number, counts, 4):
            wrong.append(tokens)
    if exchange._own.place(0, 0) != place:
        wrong.append(-1)
    exchange.close()
    return wrong


def test_results_of_any_size_in_turn(pair: RankGroup) -> None:
    do(pair, grow)


def views(group: dist.ProcessGroup) -> list[str]:
    exchange, wrong = opened(), []
    tokens = [300, 200]
    for number in range(0, 30, 3):
        numbers = range(number, number + 3)
        pending = [
            exchange.start_send_recv_heads(marked(exchange.rank, n, tokens[exchange.rank], 4), tokens) for n in numbers
        ]
        results = [one.wait() for one in pending]
        time.sleep(0.002 * exchange.rank)  # by now the faster rank may send what comes next
        if not all(is_from_all(x, exchange, n, tokens, 4) for x, n in zip(results, numbers, strict=True)):
            wrong.append(f"values of {number}")
        first = [x.data_ptr() for x in results]
        if not exchange._own.place(0, 0) <= min(first) <= max(first) < exchange._own.place(BANKS, 0):
            wrong.append("a result is no view of the bank")
        if results[0].untyped_storage().nbytes() != results[0].nbytes:
            wrong.append("saving a result would save more than it")
    exchange.copy_out = True
    kept = exchange.send_recv_heads(marked(exchange.rank, 50, tokens[exchange.rank], 4), tokens)
    for number in range(4):
        exchange.send_recv_heads(marked(exchange.rank, number, tokens[exchange.rank], 4), tokens)
    if not is_from_all(kept, exchange, 50, tokens, 4):
        wrong.append("a copy did not last")
    exchange.close()
    return wrong


def test_views_last_until_the_next_start_and_copies_for_good(pair: RankGroup) -> None:
    do(pair, views)


def threads(group: dist.ProcessGroup) -> list[str]:
    exchange, wrong = opened(), []
    tokens = [30001, 29999]  # 8 MB in rows that three threads cannot share evenly
    torch.set_num_threads(3)
    for number in range(4):
        x = marked(exchange.rank, number, tokens[exchange.rank], 2)
        exchange.copy_out = number % 2 == 1
        if not is_from_all(exchange.send_recv_heads(x, tokens), exchange, number, tokens, 2):
            wrong.append(f"copy_out={exchange.copy_out}")
    torch.set_num_threads(1)
    exchange.close()
    return wrong


def test_several_threads_copy_a_big_tensor(pair: RankGroup) -> None:
    do(pair, threads)


def closing(group: dist.ProcessGroup) -> list[str]:
    wrong = []
    x = marked(dist.get_rank(group), 1, 100, 4)
    counts = []
    for _ in range(4):
        exchange = opened()
        result = exchange.send_recv_heads(x)
        exchange.close()
        exchange.close()
        if not is_from_all(result, exchange, 1, [100, 100], 4):
            wrong.append("a result is lost when the exchange is closed")
        try:
            exchange.send_recv_heads(x)
            wrong.append("a closed exchange works")
        except ExchangeError as error:
            if "closed" not in str(error):
                wrong.append(str(error))
        del result, exchange
        counts.append(len(os.listdir("/proc/self/fd")))
    if len(set(counts)) != 1 or any("mgpu-exchange" in line for line in open("/proc/self/maps")):
        wrong.append(f"descriptors {counts}")
    return wrong


def test_b106_closing_leaves_no_descriptor_and_no_mapping_but_results(pair: RankGroup) -> None:
    do(pair, closing)


def dropped(group: dist.ProcessGroup) -> list[str]:
    exchange = opened()
    exchange.send_recv_heads(marked(exchange.rank, 1, 100, 4))
    dist.barrier(group)
    del exchange
    return [line for line in open("/proc/self/maps") if "mgpu-exchange" in line]


def test_an_exchange_that_is_dropped_closes_itself(pair: RankGroup) -> None:
    do(pair, dropped)


def fork_a_child(group: dist.ProcessGroup) -> list[str]:
    exchange = opened()
    child = os.fork()
    if child == 0:
        exchange.close()
        os._exit(0)
    os.waitpid(child, 0)
    dist.barrier(group)
    x = marked(exchange.rank, 1, 100, 4)
    good = is_from_all(exchange.send_recv_heads(x), exchange, 1, [100, 100], 4)
    exchange.close()
    return [] if good else ["a child closed its parent's exchange"]


def test_a_forked_child_closes_only_its_own_mappings(pair: RankGroup) -> None:
    do(pair, fork_a_child)


def count_over(group: dist.ProcessGroup) -> list[int]:
    exchange, wrong = opened(), []
    for before in (2**31 - 2, 2**32 - 3):
        dist.barrier(group)
        exchange._number = before
        for number in range(5):
            x = marked(exchange.rank, number, 10, 4)
            if not is_from_all(exchange.send_recv_heads(x), exchange, number, [10, 10], 4):
                wrong.append(before + number)
    exchange.close()
    return wrong


def test_counters_go_round(pair: RankGroup) -> None:
    do(pair, count_over)


def short_of_memory(group: dist.ProcessGroup) -> list[str]:
    """Returns the error of an exchange for which rank 0 has no memory; rank 1 starts it afterwards."""
    exchange, errors = opened(), []
    exchange.send_recv_heads(marked(exchange.rank, 1, 10, 4))
    until = time.monotonic() + 20
    while exchange.rank == 1 and not exchange._segments[0].note and time.monotonic() < until:
        time.sleep(0.001)
    begin = time.monotonic()
    with mock.patch.object(shared_memory, "free_memory", return_value=1_000_000 if exchange.rank == 0 else 1 << 40):
        try:
            exchange.send_recv_heads(marked(exchange.rank, 2, 10_000, 4))
        except ExchangeError as error:
            errors.append(str(error))
    exchange.close()
    return errors if time.monotonic() - begin < 5 else ["late"]


def test_too_little_memory_is_an_error_on_every_rank(pair: RankGroup) -> None:
    (first,), (second,) = pair.ask(short_of_memory)
    assert "MB more memory, and 1 MB are free" in first
    assert "on rank 0" in second and "1 MB are free" in second


def on_one_rank_no_compiler(group: dist.ProcessGroup, cache: str) -> list[str]:
    texts = []
    changes = {"CC": "/no/compiler", "LTX_MGPU_CACHE": cache} if dist.get_rank(group) == 1 else {}
    with mock.patch.dict(os.environ, changes):
        try:
            exchange_for(group, transport="csrc")
        except ExchangeError as error:
            texts.append(str(error))
        exchange = exchange_for(group)
    texts += [exchange.transport, exchange.description]
    exchange.close()
    return texts


def test_without_a_compiler_on_one_rank_all_take_another_transport(pair: RankGroup, tmp_path: Path) -> None:
    for error, transport, description in pair.ask(on_one_rank_no_compiler, str(tmp_path)):
        assert "/no/compiler" in error and "rank 1" in error
        assert transport == "gloo" and "/no/compiler" in description


def build(group: dist.ProcessGroup, cache: str) -> list[str]:
    dist.barrier(group)
    with mock.patch.dict(os.environ, {"LTX_MGPU_CACHE": cache}):
        native.cpu_library()
    return sorted(path.suffix for path in Path(cache).iterdir())


def test_processes_that_build_at_once_share_one_library(pair: RankGroup, tmp_path: Path) -> None:
    assert pair.ask(build, str(tmp_path)) == [[".lock", ".so"]] * 2


def race(group: dist.ProcessGroup, seconds: float, seed: int) -> int:
    """Exchanges at random speed and checks every value, also just before the next start. Returns how many it did."""
    exchange, rank = opened(), dist.get_rank(group)
    alike, own = random.Random(seed), random.Random(seed * 100 + rank)  # shapes are alike on all ranks, delays are not
    go_on, number = torch.ones(1, 1), 0
    until = time.monotonic() + seconds
    while bool(exchange.allgather(go_on).all()):
        kept = []
        for _ in range(20):
            tokens = [alike.choice((0, 1, 7, 60)) for _ in range(exchange.world_size)]
            count = alike.choice((1, 1, 3))
            assert all(is_from_all(x, exchange, n, t, 12) for x, n, t in kept), f"an early write, before {number}"
            pending = []
            for n in range(number, number + count):
                pending.append(exchange.start_send_recv_heads(marked(rank, n, tokens[rank], 12), tokens))
                time.sleep(own.choice((0, 0, 1e-5, 2e-4)))
            kept = [(one.wait(), number + k, tokens) for k, one in enumerate(pending)]
            assert all(is_from_all(x, exchange, n, t, 12) for x, n, t in kept), f"a wrong value in {number}"
            number += count
            if own.random() < 0.1:
                time.sleep(1e-3)
        go_on = torch.full((1, 1), float(time.monotonic() < until))
    exchange.close()
    return number


@pytest.mark.slow
def test_many_exchanges_at_uneven_speed_of_four_ranks() -> None:
    try:
        native.cpu_library()
    except ExchangeError as error:
        pytest.skip(str(error))
    with RankGroup(4, set_up) as group:
        counts = group.ask(race, 3.0, 1)
        assert len(set(counts)) == 1 and counts[0] > 50


@pytest.mark.slow
def test_many_more_exchanges_at_uneven_speed() -> None:
    for world_size in (2, 3, 4):
        with RankGroup(world_size, set_up) as group:
            counts = group.ask(race, 40.0, world_size, timeout=120.0)
            assert len(set(counts)) == 1 and counts[0] > 2000


def test_a_segment_is_known_by_its_token_and_cannot_shrink() -> None:
    own = Segment.create()
    own.note = "grün"
    peer = Segment.of_peer(os.getpid(), own.descriptor, own.token)
    assert peer.note == "grün" and peer.bank_bytes == own.bank_bytes and not peer.sleeps
    with pytest.raises(ExchangeError, match="not the one that was meant"):
        Segment.of_peer(os.getpid(), own.descriptor, "00" * 16)
    with pytest.raises(PermissionError):
        os.ftruncate(own.descriptor, 4096)
    peer.close()
    own.close()


def test_an_empty_file_in_place_of_a_peer_s_memory_is_an_error(tmp_path: Path) -> None:
    with open(tmp_path / "empty", "w+") as file, pytest.raises(ExchangeError, match="not the one that was meant"):
        Segment.of_peer(os.getpid(), file.fileno(), "00" * 16)


@pytest.mark.parametrize(
    ("lines", "folder", "limit"),
    [
        ("0::/", "", {"memory.max": 500, "memory.current": 400, "memory.stat": "inactive_file 7"}),
        ("0::/a/b", "a", {"memory.max": 500, "memory.current": 400, "memory.stat": "anon 1\ninactive_file 7"}),
        (
            "5:cpu:/x\n4:memory:/not/seen\n0::/",
            "memory",
            {"memory.limit_in_bytes": 500, "memory.usage_in_bytes": 400, "memory.stat": "total_inactive_file 7"},
        ),
        (
            "4:cpu,memory:/own",
            "memory/own",
            {"memory.limit_in_bytes": 500, "memory.usage_in_bytes": 400, "memory.stat": "total_inactive_file 7"},
        ),
    ],
)
def test_free_memory_is_what_the_tightest_control_group_leaves(
    tmp_path: Path, lines: str, folder: str, limit: dict[str, int | str]
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:    9 kB\n")
    assert free_memory(proc, cgroups) == 9 * 1024
    (proc / "self" / "cgroup").write_text(lines + "\n")
    (cgroups / folder).mkdir(parents=True)
    for name, value in limit.items():
        (cgroups / folder / name).write_text(f"{value}\n")
    assert free_memory(proc, cgroups) == 107
    for name in ("memory.max", "memory.limit_in_bytes"):
        if name in limit:
            (cgroups / folder / name).write_text("max\n" if name == "memory.max" else "9223372036854771712\n")
    assert free_memory(proc, cgroups) == 9 * 1024
