"""Checks the exchange on this machine's NVIDIA GPUs; called by gpu_check.py, or alone: python scripts/gpu_exchange.py.

Groups of 2, 3, 4 (and 8) processes run on as many GPUs as are there, and on one GPU together. Every transport that
works must move every dtype byte for byte; csrc must also survive ranks out of step, and name a rank that is stopped or
killed, or calls something else. Bandwidth is told as a share of a copy inside the GPU of the same bytes, taken in turns
with it.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from mgpu_runtime.exchange import All2All, ExchangeError, ExchangeTimeout, exchange_for, native  # noqa: E402
from mgpu_runtime.exchange.agree import gather_texts  # noqa: E402
from mgpu_runtime.exchange.layout import deal, starts  # noqa: E402

NAMES = ("csrc", "symmetric_memory", "ltx_kernels", "nccl")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.float8_e4m3fn)
SHAPES = ((17, 8, 16), (5, 3, 7), (1, 1, 8), (0, 4, 8), (1031, 32, 128))  # all ranks' tokens, heads, channels
SIZES = {"8MiB": 1024, "64MiB": 8192}  # tokens of one rank, with 32 heads of 128 channels in bf16
GROUP_SECONDS = 90.0
TIMEOUT, SLACK = 3.0, 2.0  # seconds; of the checks with a rank that does not come
CYCLES = 2_000_000  # longest pause of a GPU in the check out of step: about a millisecond


def main() -> int:
    """Prints one line per check; returns 1 if one is off, 2 without a GPU."""
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        sys.stdout.write("gpu_exchange: no CUDA device is visible to this Python's torch\n")
        return 2
    if not build():
        return 1
    groups = [(world, True) for world in (2, 3, 4)] + [(world, False) for world in (2, 3, 4, 8) if world <= num_gpus]
    passed = [check_group(world, shared) for world, shared in groups]
    passed += [check_missing(how, num_gpus < 2) for how in ("stopped", "killed")]
    passed += [check_unlike(num_gpus < 2)]
    return int(not all(passed))


def build() -> bool:
    """Builds the kernels for every GPU here; tells whether they are there."""
    lines = native.build_all()
    sys.stdout.write("".join(f"exchange build: {line}\n" for line in lines))
    return not any("not built" in line for line in lines if line.startswith("exchange_cuda"))


def check_group(world: int, shared: bool) -> bool:
    """Checks every transport among `world` processes; `shared` puts all of them on one GPU."""
    where = f"exchange, {world} processes on {'one GPU' if shared else f'{world} GPUs'}"
    reports = run(_all_transports, world, shared)
    failed = [report for report in reports if "error" in report]
    if failed:
        sys.stdout.write(f"{where}: FAIL\n{failed[0]['error']}\n")
        return False
    for name, facts in reports[0].items():
        sys.stdout.write(f"{where}, {name}: {facts}\n")
    csrc = reports[0]["csrc"]
    # GPUs without a path between them are no fault of ours; one GPU can always reach itself.
    wanted = shared or _reach_each_other(world)
    if not csrc.startswith("exact"):
        sys.stdout.write(f"{where}, csrc: {'FAIL' if wanted else 'not here, as the GPUs cannot reach each other'}\n")
    return csrc.startswith("exact") or not wanted


def _reach_each_other(world: int) -> bool:
    pairs = ((one, other) for one in range(world) for other in range(world) if one != other)
    return all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)


def check_missing(how: str, shared: bool) -> bool:
    """Checks that two ranks name a third that is stopped or killed, in time, and that their GPUs live on."""
    world = 3 if shared or torch.cuda.device_count() >= 3 else 2
    reports = run(_missing_rank, world, shared, how, absent=world - 1)
    bad = [report for report in reports if report != {"ok": True}]
    sys.stdout.write(f"exchange, csrc, a rank {how}: {'ok' if not bad else f'FAIL: {bad[0]}'}\n")
    return not bad


def check_unlike(shared: bool) -> bool:
    """Checks that two ranks which give tensors of unlike dtype are both told so."""
    reports = run(_unlike_ranks, 2, shared)
    bad = [report for report in reports if report != {"ok": True}]
    sys.stdout.write(f"exchange, csrc, unlike calls: {'ok' if not bad else f'FAIL: {bad[0]}'}\n")
    return not bad


def run(job, world: int, shared: bool, *args: Any, absent: int | None = None) -> list[dict]:
    """Calls job(rank, group, device, *args) in processes; returns what each returned, an `error` for a failed one.

    The process of rank `absent` is killed when the others are through, and left out.
    """
    context = multiprocessing.get_context("spawn")
    present = [rank for rank in range(world) if rank != absent]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(job, rank, world, shared, folder, args) for rank in range(world)]
        ranks = [context.Process(target=_rank, args=one, daemon=True) for one in arguments]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + GROUP_SECONDS
        for rank in present:
            ranks[rank].join(max(0.0, deadline - time.monotonic()))
        for process in ranks:
            process.kill()
            process.join()
        reports = []
        for rank in present:
            path = Path(folder) / f"{rank}.json"
            late = {"error": f"rank {rank} was not through after {GROUP_SECONDS:g} s"}
            reports.append(json.loads(path.read_text()) if path.exists() else late)
        return reports


def _rank(job, rank: int, world: int, shared: bool, folder: str, args: tuple) -> None:
    report: dict = {}
    try:
        device = torch.device("cuda", 0 if shared else rank)
        torch.cuda.set_device(device)
        store = dist.FileStore(str(Path(folder) / "store"), world)
        backend = "gloo" if shared else "cpu:gloo,cuda:nccl"  # NCCL takes one rank for each GPU
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
        report = job(rank, dist.group.WORLD, device, *args)
    except (RuntimeError, ValueError, AssertionError, OSError):
        report = {"error": traceback.format_exc()}
    partial = Path(folder) / f"{rank}.part"
    partial.write_text(json.dumps(report))
    partial.rename(Path(folder) / f"{rank}.json")
    sys.stdout.flush()
    os._exit(0)  # the group's end may wait for ranks that are gone


def _all_transports(rank: int, group: dist.ProcessGroup, device: torch.device) -> dict[str, str]:
    facts = {}
    for name in NAMES:
        try:
            exchange = exchange_for(group, transport=name, device=device, timeout=30.0)
        except ExchangeError as error:
            facts[name] = f"not here: {error}"
            continue
        _exact(exchange, device)
        _out_of_step(exchange, device)
        shares = {size: _bandwidth(exchange, device, tokens) for size, tokens in SIZES.items()}
        told = ", ".join(f"{size} {share:.2f}" for size, share in shares.items())
        facts[name] = f"exact; speed as a share of a device copy: {told}"
        torch.cuda.synchronize(device)
        gather_texts(group, "through")  # nobody closes while another still moves
        exchange.close()
    return facts


def _exact(exchange: All2All, device: torch.device) -> None:
    """Fails unless all moves of all dtypes and shapes are byte-exact, in order and as three at a time."""
    rank, world = exchange.rank, exchange.world_size
    for index, (total, num_heads, channels) in enumerate(SHAPES):
        tokens = deal(total, world) if index % 2 else deal(total, world)[::-1]
        for dtype in DTYPES:
            wholes = [_whole(2, total, num_heads, channels, dtype, seed, device) for seed in range(3)]
            mine = [x.narrow(1, starts(tokens)[rank], tokens[rank]) for x in wholes]
            heads = deal(num_heads, world)
            wanted = [x.narrow(2, starts(heads)[rank], heads[rank]) for x in wholes]
            for copy_out in (True, False):
                exchange.copy_out = copy_out
                sources = [x.clone() for x in mine]
                pending = [exchange.start_send_recv_heads(x, tokens) for x in sources]
                got = [one.wait() for one in pending]
                for x in sources:
                    x.zero_()  # after the wait it belongs to the caller again
                back = exchange.start_gather_heads(got[0].clone(), tokens, num_heads)
                same = [_same(a, b) for a, b in zip(got, wanted, strict=True)] if copy_out else []
                same.append(_same(back.wait(), mine[0]))
                same.append(
                    _same(
                        exchange.send_recv_heads(mine[1].transpose(1, 2).contiguous().transpose(1, 2), tokens),
                        wanted[1],
                    )
                )
                same.append(_same(exchange.allgather(mine[2].flatten(2), tokens), wholes[2].flatten(2)))
                case = f"{exchange.transport}, {total} tokens, {num_heads} heads of {channels}, {dtype}, {copy_out}"
                assert all(same), f"wrong values: {case}: {same}"
    exchange.copy_out = True


def _out_of_step(exchange: All2All, device: torch.device) -> None:
    """Fails if a bank is written to while its results are still read: GPUs pause at random.

    The host waits for nothing but, at random, for memory it gives back: no rank may then wait for it forever.
    """
    rank, world = exchange.rank, exchange.world_size
    pauses = random.Random(rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    exchange.copy_out = False
    for step in range(200):
        xs = [torch.full((1, 64, world, 64), 1000 * step + 10 * rank + i, device=device) for i in range(3)]
        pending = [exchange.start_send_recv_heads(x) for x in xs]
        torch.cuda._sleep(pauses.randrange(CYCLES) if pauses.random() < 0.2 else 1)
        results = [one.wait() for one in pending]
        if pauses.random() < 0.05:
            torch.empty(1 << 25, dtype=torch.uint8, device=device)
            torch.cuda.empty_cache()  # stands behind the waits that the GPU is in
        torch.cuda._sleep(pauses.randrange(CYCLES) if pauses.random() < 0.2 else 1)
        for i, result in enumerate(results):
            senders = 10 * torch.arange(world, device=device).repeat_interleave(64)
            wrong += (result != (1000 * step + i + senders).view(1, -1, 1, 1)).sum()
    assert int(wrong) == 0, f"{exchange.transport}: {int(wrong)} values were overwritten before they were read"
    exchange.copy_out = True


def _bandwidth(exchange: All2All, device: torch.device, tokens: int) -> float:
    """Returns the time of a copy inside this GPU over that of an exchange of the same bytes; medians of turns."""
    x = torch.empty(1, tokens, 32, 128, dtype=torch.bfloat16, device=device)
    to = torch.empty_like(x)
    exchange.copy_out = False
    jobs = (lambda: to.copy_(x), lambda: exchange.send_recv_heads(x))
    times: list[list[float]] = [[], []]
    for turn in range(12):
        for job, list_of_times in zip(jobs, times, strict=True):
            job()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(10):
                job()
            end.record()
            torch.cuda.synchronize(device)
            if turn > 1:
                list_of_times.append(begin.elapsed_time(end))
    exchange.copy_out = True
    copy, moved = (sorted(one)[len(one) // 2] for one in times)
    return copy / moved


def _missing_rank(rank: int, group: dist.ProcessGroup, device: torch.device, how: str) -> dict:
    exchange = exchange_for(group, transport="csrc", device=device, timeout=TIMEOUT)
    absent = exchange.world_size - 1
    x = torch.ones(1, 8, exchange.world_size, 16, device=device)
    for _ in range(2):  # the first grows the banks, which makes its wait a patient one
        exchange.send_recv_heads(x)
    torch.cuda.synchronize(device)
    gather_texts(group, "ready")
    if rank == absent:
        os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    began, seen = time.monotonic(), None
    try:
        exchange.send_recv_heads(x)
        torch.cuda.synchronize(device)
        exchange.check()
    except ExchangeTimeout as error:  # PeerGone is one
        seen = error
    seconds = time.monotonic() - began
    if seen is None or seen.missing != (absent,) or seconds > TIMEOUT + SLACK:
        return {"got": repr(seen), "after": seconds}
    try:
        exchange.send_recv_heads(x)
        return {"got": "no error from a broken exchange"}
    except ExchangeError:
        alive = float((x + 1).sum()) == 2 * x.numel()  # the context lives
        exchange.close()
        return {"ok": alive and time.monotonic() - began < TIMEOUT + SLACK + 2}  # it waits for the others to close


def _unlike_ranks(rank: int, group: dist.ProcessGroup, device: torch.device) -> dict:
    exchange = exchange_for(group, transport="csrc", device=device, timeout=TIMEOUT)
    x = torch.ones(1, 8, 2, 16, device=device, dtype=(torch.float16, torch.bfloat16)[rank])
    began, said = time.monotonic(), ""
    try:
        exchange.send_recv_heads(x)
        torch.cuda.synchronize(device)
        exchange.check()
    except ExchangeError as error:
        said = str(error)
    seconds = time.monotonic() - began
    exchange.close()
    told = "torch.float16" in said and "torch.bfloat16" in said
    return {"ok": True} if told and seconds < TIMEOUT + SLACK else {"got": said, "after": seconds}


def _whole(batch: int, tokens: int, heads: int, channels: int, dtype: torch.dtype, seed: int, device) -> torch.Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    numbers = torch.Generator().manual_seed(seed)
    shape = (batch * tokens * heads * channels * size,)
    values = torch.randint(0, 256, shape, dtype=torch.uint8, generator=numbers)
    return values.to(device).view(dtype).view(batch, tokens, heads, channels)


def _same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    if got.numel() == 0:
        return True
    return torch.equal(got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


if __name__ == "__main__":
    sys.exit(main())
