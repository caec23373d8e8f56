"""A benchmark in a fleet's workers: the processes, libraries and settings that real jobs run in."""

from collections.abc import Callable

import torch

from ..fleet import JobContext, MGPURunner, RunnerError
from .harness import Times
from .plan import BenchPlan

MOST_DIFFERENCE = 1e-4  # relative; what computes something else must not be timed against ours
Measure = Callable[..., tuple[dict[str, Times], dict]]


class BenchRunner(MGPURunner):
    """Measures one case a job; every rank runs on one thread."""

    def setup(self, *, plan: dict) -> None:
        """Takes the fields of a BenchPlan."""
        self.plan = BenchPlan(**{**plan, "cases": tuple(plan["cases"])})
        self.measure = _measure_of(self.plan.bench)
        torch.set_num_threads(1)

    def __call__(self, job: JobContext, *, case: str) -> list[dict]:
        """Returns one record per peer."""
        plan, first = self.plan, self.info.rank == 0
        runs = plan.num_runs(case)

        def on_round(done: int) -> None:
            if first:
                job.progress(f"bench {plan.bench} {case}", done, runs)

        times, facts = self.measure(plan, case, self.info.group, on_round)
        if not facts["max_rel_diff"] <= MOST_DIFFERENCE:  # a NaN is no agreement either
            raise RunnerError(
                f"bench {plan.bench} {case}: the results of ours and its peers differ by {facts['max_rel_diff']:g}, "
                f"more than {MOST_DIFFERENCE:g}. The times would be those of different work."
            )
        return [self._record(case, peer, times, facts) for peer in times if peer != "ours"]

    def _record(self, case: str, peer: str, times: dict[str, Times], facts: dict) -> dict:
        ours, other = times["ours"], times[peer]
        return {
            "bench": self.plan.bench,
            "case": case,
            "peer": peer,
            "ours_s": ours.median,
            "peer_s": other.median,
            "speedup": other.median / ours.median,
            "ours_min_s": min(ours.runs),
            "peer_min_s": min(other.runs),
            "runs": len(ours.runs),
            "world_size": self.info.world_size,
            "threads": torch.get_num_threads(),
            "device": self.info.device.type,
            **facts,
        }


def _measure_of(bench: str) -> Measure:
    if bench == "exchange":
        from .exchange import bench_exchange

        return bench_exchange
    from .sp import bench_sp  # loads the model libraries, which takes seconds

    return bench_sp
