"""`bench exchange`: tokens traded for heads and back, against the usual code and against a plain copy of the bytes."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ..exchange import All2All, exchange_for
from ..exchange.collectives import Collectives
from .harness import Contestant, Times, measure, relative_difference
from .plan import EXCHANGE_HEAD_DIM, EXCHANGE_HEADS, BenchPlan, exchange_tokens
from .usual import UsualExchange

_BYTES_PER_RUN = 64 << 20  # of a tensor; smaller ones make several round trips in a run, so that a run takes a while
_MOST_ROUND_TRIPS = 32
_WARM_UPS = 3


def bench_exchange(
    plan: BenchPlan, case: str, group: dist.ProcessGroup, on_round: Callable[[int], None]
) -> tuple[dict[str, Times], dict]:
    """Measures one case; returns the times of ours and its peers, and what the case is. Collective."""
    tokens = exchange_tokens(case)
    ours = exchange_for(group, transport=plan.transport, timeout=plan.timeout, copy_out=False)
    single = Collectives(group, timeout=plan.timeout)
    usual = UsualExchange(group)
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    x = torch.randn(1, tokens, EXCHANGE_HEADS, EXCHANGE_HEAD_DIM, generator=generator)
    trips = max(1, min(_MOST_ROUND_TRIPS, _BYTES_PER_RUN // x.nbytes))
    there, back = torch.empty_like(x), torch.empty_like(x)

    def memcpy() -> None:
        back.copy_(there.copy_(x))

    round_trips = {
        "ours": lambda: ours.gather_heads(ours.send_recv_heads(x)),
        "usual": lambda: usual.gather_heads(usual.send_recv_heads(x)),
        "memcpy": memcpy,
        "single": lambda: single.gather_heads(single.send_recv_heads(x)),
    }
    difference = _difference(ours, usual, x, group)
    times = measure(
        {name: Contestant(_several(call, trips), pieces=trips) for name, call in round_trips.items()},
        runs=plan.num_runs(case),
        group=group,
        warm_ups=_WARM_UPS,
        on_round=on_round,
    )
    facts = {
        "transport": ours.transport,
        "exchange": ours.description,
        "dtype": "float32",
        "shape": list(x.shape),
        "bytes_per_rank": x.nbytes,
        "round_trips_per_run": trips,
        "max_rel_diff": difference,
    }
    ours.close()
    single.close()
    return times, facts


def _several(call: Callable[[], object], times: int) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(times):
            call()

    return repeat


def _difference(ours: All2All, usual: UsualExchange, x: Tensor, group: dist.ProcessGroup) -> float:
    """Compares there and back of both; 0 where every byte is the same."""
    there = ours.send_recv_heads(x).clone()
    return max(
        relative_difference(there, usual.send_recv_heads(x), group),
        relative_difference(ours.gather_heads(there), x, group),
        relative_difference(usual.gather_heads(there), x, group),
    )
