"""Runs a benchmark in a fleet of CPU workers, from outside of them."""

from collections.abc import Callable, Iterator
from dataclasses import asdict

from ..fleet import Event, MGPUController
from .plan import BenchPlan

RUNNER = "mgpu_runtime.bench.runner:BenchRunner"  # by name: importing it would load the model libraries here


def run_bench(plan: BenchPlan, on_event: Callable[[Event], None]) -> Iterator[dict]:
    """Yields one record per case and peer. Raises FleetError when a worker dies, differs or waits for too long."""
    controller = MGPUController(RUNNER, devices=["cpu"] * plan.workers, group_timeout=plan.timeout)
    try:
        controller.start(plan=asdict(plan) | {"cases": list(plan.cases)})
        for case in plan.cases:
            stream = controller.stream(case=case)
            for event in stream:
                on_event(event)
            yield from stream.result
    finally:
        controller.shutdown()
