"""Runs a function on several ranks of a gloo group, for tests that need no fleet."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOAD = ["tests.rank_imports"]  # what the server that ranks are forked from imports


def run(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300.0) -> list[Any]:
    """Calls fn(rank, group, *args) in `world_size` processes and returns what each rank returned, by rank.

    `fn` must be a module-level function and its result must be picklable. Matrix products run in MKL's strict mode, as
    in the fleet's workers, so that results can be compared bit for bit over world sizes. Ranks are forked from a server
    that has imported the libraries once: importing them in each rank would cost more than the tests. Ranks that are not
    through after `timeout` seconds are killed and TimeoutError is raised.
    """
    multiprocessing.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder, _strict_matrix_products():
        ranks = mp.start_processes(
            _main, (fn, world_size, folder, args), nprocs=world_size, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + timeout
        while not ranks.join(timeout=1.0):
            if time.monotonic() > deadline:
                for process in ranks.processes:
                    process.kill()
                raise TimeoutError(f"{fn.__name__} on {world_size} ranks did not end within {timeout:g} s")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


@contextmanager
def _strict_matrix_products() -> Iterator[None]:
    """Sets MKL's mode for processes started inside; the fork server keeps the mode it was started with."""
    capability = torch.backends.cpu.get_cpu_capability()
    before = os.environ.get("MKL_CBWR")
    if before is None and capability in ("AVX512", "AVX2"):
        os.environ["MKL_CBWR"] = f"{capability},STRICT"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("MKL_CBWR", None)


def _main(rank: int, fn: Callable[..., Any], world_size: int, folder: str, args: tuple) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        torch.save(fn(rank, dist.group.WORLD, *args), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
