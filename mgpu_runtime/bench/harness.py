"""Times contestants in turn: all ranks begin at one agreed moment, and a run lasts until its slowest rank is done."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_NOTICE_NS = 3_000_000  # between the agreement on a start and the start: every rank must have heard of it
_SPIN_NS = 1_000_000  # the end of that wait, which is spent awake


@dataclass(frozen=True)
class Contestant:
    """Something to be timed.

    Attributes:
        call: the work, called on every rank; it must be done when it returns.
        solo: only rank 0 works; the others sleep meanwhile.
        pieces: how many times the case's work one call does, over all ranks together; a run's time is divided by it.
    """

    call: Callable[[], object]
    solo: bool = False
    pieces: int = 1


@dataclass(frozen=True)
class Times:
    """The seconds of one contestant's runs."""

    runs: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)


def measure(
    contestants: Mapping[str, Contestant],
    *,
    runs: int,
    group: dist.ProcessGroup,
    warm_ups: int,
    on_round: Callable[[int], None] = lambda done: None,
) -> dict[str, Times]:
    """Runs all contestants one after the other, `warm_ups` + `runs` times over; the same result on every rank.

    The clock is CLOCK_MONOTONIC, so the ranks must be processes of one machine. `on_round` hears of each timed round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(-warm_ups, runs):
        for name, contestant in contestants.items():
            spent = _one_run(contestant, group)
            if number >= 0:
                seconds[name].append(spent / contestant.pieces)
        if number >= 0:
            on_round(number + 1)
    return {name: Times(tuple(values)) for name, values in seconds.items()}


def _one_run(contestant: Contestant, group: dist.ProcessGroup) -> float:
    start = _largest(time.monotonic_ns() + _NOTICE_NS, group)
    end = start
    if not contestant.solo or dist.get_rank(group) == 0:
        _wait_until(start)
        contestant.call()
        end = time.monotonic_ns()
    # those who did not work wait here, and a wait in gloo costs no CPU time
    return (_largest(end, group) - start) * 1e-9


def _wait_until(moment: int) -> None:
    time.sleep(max(0, moment - time.monotonic_ns() - _SPIN_NS) * 1e-9)
    while time.monotonic_ns() < moment:
        pass


def _largest(value: int, group: dist.ProcessGroup) -> int:
    number = torch.tensor(value)
    dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
    return int(number)


def relative_difference(one: Tensor, other: Tensor, group: dist.ProcessGroup) -> float:
    """Returns max |one - other| / max |other|, the largest of all ranks."""
    difference = (one - other).abs().max() / other.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    largest = difference.double().reshape(1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return float(largest)
