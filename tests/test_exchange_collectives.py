"""The exchange over torch.distributed's collectives, and what it waits with."""

import time

import pytest
import torch
import torch.distributed as dist

from mgpu_runtime.exchange import ExchangeError, ExchangeTimeout
from mgpu_runtime.exchange.agree import gather_texts
from mgpu_runtime.exchange.collectives import Collectives
from mgpu_runtime.exchange.errors import PeerGone
from mgpu_runtime.exchange.layout import deal, starts
from mgpu_runtime.exchange.processes import Processes
from mgpu_runtime.exchange.stream_order import StreamOrder
from mgpu_runtime.exchange.waiting import Wait
from tests.spawn import run

CPU = torch.device("cpu")
D = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool)


def _same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.shape == want.shape and got.dtype == want.dtype and torch.equal(got.float(), want.float())


def _wrong(exchange: Collectives, batch: int, tokens: tuple[int, ...], num_heads: int, dtype: torch.dtype) -> list[str]:
    """Compares the three moves, in flight together, with slices of the whole tensor. Returns what is wrong."""
    rank, heads = exchange.rank, deal(num_heads, exchange.world_size)
    count = batch * sum(tokens) * num_heads * D
    whole = torch.arange(count).remainder(200).view(batch, sum(tokens), num_heads, D).float().to(dtype)
    local = whole.narrow(1, starts(tokens)[rank], tokens[rank])
    share = whole.narrow(2, starts(heads)[rank], heads[rank])
    strided = local.transpose(0, 1).contiguous().transpose(0, 1)
    pending = {
        "send_recv_heads": (exchange.start_send_recv_heads(local, tokens), share),
        "a strided input": (exchange.start_send_recv_heads(strided, tokens), share),
        "gather_heads": (exchange.start_gather_heads(share, tokens, num_heads), local),
        "allgather": (exchange.start_allgather(local, tokens), whole),
        "allgather of one dim more": (exchange.start_allgather(local[..., 0, 0], tokens), whole[..., 0, 0]),
    }
    results = {name: (one.wait(), want) for name, (one, want) in pending.items()}
    return [
        f"{name}: {batch} {tokens} {num_heads} {dtype}"
        for name, (got, want) in results.items()
        if not _same(got, want) or not got.is_contiguous()
    ]


def _moves(rank: int, group: dist.ProcessGroup) -> list[str]:
    wrong, world_size = [], group.size()
    with pytest.MonkeyPatch.context() as patch:
        with_all_to_all = Collectives.open(group, CPU)
        patch.setattr(dist, "all_to_all_single", _no_all_to_all)
        without = Collectives.open(group, CPU)
    if without._has_all_to_all or not with_all_to_all._has_all_to_all:
        wrong.append("the all-to-all that is there, or not there, was not noticed")
    for exchange in (with_all_to_all, without):
        for tokens in ((3,) * world_size, tuple(2 * r for r in range(world_size)), (0,) * world_size):
            for batch, num_heads in ((1, 4), (2, 5), (1, 1)):
                for dtype in DTYPES:
                    wrong += _wrong(exchange, batch, tokens, num_heads, dtype)
        with torch.inference_mode():
            wrong += _wrong(exchange, 2, (3,) * world_size, 4, torch.float32)
        wrong += _wrong(exchange, 2, (3,) * world_size, 4, torch.float32)  # buffers are used in both modes
        exchange.close()
        exchange.close()
    return wrong


def _no_all_to_all(*arguments, **keywords) -> None:
    raise RuntimeError("Backend gloo does not support alltoall_base")


@pytest.mark.parametrize("world_size", [2, 3])
def test_b12_b13_uneven_empty_strided_and_a_gloo_without_all_to_all(world_size: int) -> None:
    assert run(_moves, world_size) == [[]] * world_size


def _late(rank: int, group: dist.ProcessGroup) -> dict[str, object]:
    x, seen = torch.ones(1, 2, 4, 8), {}
    patient = Collectives.open(group, CPU, timeout=0.8, wait_while_busy=True)
    if rank == 1:
        end = time.monotonic() + 2.0
        while time.monotonic() < end:  # at work, not asleep
            pass
    seen["patient"] = patient.send_recv_heads(x).shape
    strict, blind = Collectives.open(group, CPU, timeout=0.4), Collectives(group, timeout=0.4)
    for name, exchange in (("strict", strict), ("blind", blind)):
        gather_texts(group, name)
        if rank == 1:
            time.sleep(1.0)
            exchange.timeout = 10.0
        began = time.monotonic()
        try:
            exchange.send_recv_heads(x)
        except ExchangeTimeout as error:
            seen[name] = (str(error), error.missing, time.monotonic() - began)
            with pytest.raises(ExchangeError, match="cannot be used any more: rank 0 waited 0.4 s"):
                exchange.send_recv_heads(x)
    with pytest.raises(ValueError, match="moves cpu tensors, got one on meta"):
        patient.send_recv_heads(x.to("meta"))
    seen["texts"] = gather_texts(group, "é" * rank)
    return seen


def test_a_late_rank_is_named_and_a_busy_one_waited_for() -> None:
    first, second = run(_late, 2)
    assert first["patient"] == second["patient"] == (1, 4, 2, 8)
    text, missing, seconds = first["strict"]
    assert missing == (1,) and "for rank 1" in text and "send_recv_heads" in text and 0.4 <= seconds < 2.0
    text, missing, _ = first["blind"]
    assert missing == () and "cannot tell" in text
    assert "strict" not in second and first["texts"] == ["", "é"]


class _Life(Processes):
    """Two ranks, of which the other is as the test says."""

    def __init__(self, *, gone: bool = False, busy: bool = False, stopped: bool = False) -> None:
        self._pids = [1, 2]
        self._gone, self._busy, self._stopped = gone, busy, stopped

    def is_gone(self, rank: int) -> bool:
        return self._gone

    def was_busy(self, rank: int) -> bool:
        return self._busy

    def is_stopped(self, rank: int) -> bool:
        return self._stopped


def _until_raised(wait: Wait, seconds: float) -> ExchangeError | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            wait.check()
        except ExchangeError as error:
            return error
        time.sleep(0.01)
    return None


@pytest.mark.parametrize(
    ("life", "patient", "waiting", "kind", "words"),
    [
        (_Life(), False, False, ExchangeTimeout, "waited 0.3 s"),
        (_Life(busy=True), False, False, ExchangeTimeout, "waited 0.3 s"),
        (_Life(busy=True), True, False, None, ""),
        (_Life(busy=True), True, True, ExchangeTimeout, "waited 0.3 s"),  # it waits for others itself: a deadlock
        (_Life(stopped=True), True, False, ExchangeTimeout, "is stopped"),
        (_Life(gone=True), True, False, PeerGone, "has ended"),
        (None, True, False, ExchangeTimeout, "waited 0.3 s"),
    ],
)
def test_a_wait_ends_when_it_should(life, patient, waiting, kind, words) -> None:
    wait = Wait(0, "this", 0.3, lambda: [1], processes=life, wait_while_busy=patient, waiting=lambda rank: waiting)
    error = _until_raised(wait, 0.8)
    assert type(error) is (kind or type(None))
    if kind is not None:
        assert words in str(error) and error.missing == (1,)


def test_what_a_rank_sent_before_its_end_may_still_arrive() -> None:
    wait = Wait(0, "this", 10.0, lambda: [], processes=_Life(gone=True))
    began = time.monotonic()
    assert isinstance(_until_raised(wait, 5.0), PeerGone)
    assert 1.0 <= time.monotonic() - began < 2.5


class _Flag:
    """A Work and an Event that are done when the test says so."""

    def __init__(self, done: bool = False) -> None:
        self.done = done

    def is_completed(self) -> bool:
        return self.done

    query = is_completed


def test_the_host_runs_ahead_of_a_gpu_only_so_far_and_counts_from_its_arrival() -> None:
    order = StreamOrder(lambda number, what, timeout: Wait(0, what, timeout, lambda: [1]), ahead=2)
    works = [_Flag(), _Flag(), _Flag()]
    order.add(1, "the first", _Flag(False), works[0], 0.3)  # this rank's own GPU has not come to it
    time.sleep(0.4)
    order.make_room()
    works[0].done = True
    order.make_room()
    order.add(2, "the second", _Flag(True), works[1], 0.3)
    order.make_room()
    order.add(3, "the third", _Flag(True), works[2], 0.3)
    began = time.monotonic()
    with pytest.raises(ExchangeTimeout, match="the second for rank 1"):
        order.make_room()
    assert time.monotonic() - began < 2.0
