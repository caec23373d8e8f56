"""Small runners for the tests of the fleet; workers import this module."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from mgpu_runtime.fleet import JobContext, MGPURunner, RunnerError


class Echo(MGPURunner):
    """Does one of several small things in each job, named by `action`."""

    def setup(self, **kwargs: object) -> None:
        self.setup_kwargs = kwargs

    def check(
        self, *, action: str, refuse_on: tuple[int, ...] = (), check_seconds: dict | None = None, **kwargs: object
    ) -> None:
        time.sleep((check_seconds or {}).get(self.info.rank, 0.0))
        if self.info.rank in refuse_on:
            raise ValueError("The size 7 is odd; choose an even one.")

    def __call__(self, job: JobContext, *, action: str, **kwargs: object) -> object:
        return getattr(self, action)(job, **kwargs)

    def echo(self, job: JobContext, value: object = None) -> object:
        return value

    def facts(self, job: JobContext) -> dict:
        return {
            "rank": self.info.rank,
            "world_size": self.info.world_size,
            "threads": torch.get_num_threads(),
            "device": str(self.info.device),
            "mkl": os.environ.get("MKL_CBWR"),
            "modules": sorted(sys.modules),
            "setup": self.setup_kwargs,
            "cwd": os.getcwd(),
        }

    def properties(self, job: JobContext, value: torch.Tensor) -> dict:
        value.add_(self.info.rank)  # in place: the ranks must not see each other's
        sums = [torch.zeros(()) for _ in range(self.info.world_size)]
        dist.all_gather(sums, value.float().sum())
        return {"sums": torch.stack(sums), "is_inference": value.is_inference()}

    def rank_sum(self, job: JobContext) -> int:
        total = torch.tensor(self.info.rank + 1)
        dist.all_reduce(total)
        return total.item()

    def steps(self, job: JobContext, num_steps: int, seconds: float = 0.02, seed: int = 0) -> torch.Tensor:
        state = torch.randn(64, generator=torch.Generator().manual_seed(seed))
        for step in range(num_steps):
            job.raise_if_cancelled()
            time.sleep(seconds)
            other = state * (self.info.rank + 1)
            dist.all_reduce(other)
            state = torch.sin(other)
            job.progress("denoise", step + 1, num_steps, sigma=1.0 - step / num_steps)
        return state

    def all_events(self, job: JobContext) -> str:
        if self.info.rank == 0:
            job.progress("stage", 1, 2)
            job.preview(torch.full((4, 6, 3), 7, dtype=torch.uint8))
            job.latent("clean", torch.arange(6.0).view(2, 3).t())
            job.frames(3, torch.ones(2, 4, 6, 3))
            job.log("half way")
        return "end"

    def fail(self, job: JobContext, ranks: tuple[int, ...], kind: str = "ValueError") -> None:
        if self.info.rank in ranks:
            error = {"ValueError": ValueError, "RunnerError": RunnerError, "KeyError": KeyError}[kind]
            raise error("seventeen is too many")
        dist.barrier()

    def die(self, job: JobContext, rank: int) -> None:
        if self.info.rank == rank:
            print("these were my last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def hang(self, job: JobContext, rank: int) -> None:
        """Is stuck on one rank before the step boundary at which a cancel is seen."""
        job.progress("stage", 0, 1)
        if self.info.rank == rank:
            time.sleep(600)
        job.raise_if_cancelled()

    def out_of_step(self, job: JobContext) -> None:
        if self.info.rank == 0:
            dist.all_reduce(torch.zeros(1, dtype=torch.int64), async_op=True)
        raise ValueError("both fail, but one is a collective ahead")

    def compute(self, job: JobContext, seconds: float) -> None:
        """Keeps the main thread inside long calls and never asks whether it was cancelled."""
        ends = time.monotonic() + seconds
        a = torch.randn(3000, 3000)
        while time.monotonic() < ends:
            a @ a


class BadSetup(Echo):
    """Misbehaves in `setup` on one rank."""

    def setup(self, *, how: str, rank: int) -> None:
        if self.info.rank != rank and rank >= 0:
            dist.barrier()
        if how == "raise":
            raise ValueError("No checkpoint at /models/none.safetensors.")
        if how == "die":
            print(f"died at {time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(600)


class IgnoresSigterm(Echo):
    """Cannot be ended by SIGTERM."""

    def setup(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
