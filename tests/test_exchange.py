"""The exchange against the permutation it must be: drawn shapes, dtypes, layouts, over every transport of the CPU."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mgpu_runtime.exchange import All2All, ExchangeError, exchange_for
from mgpu_runtime.exchange.all2all import OneRank
from mgpu_runtime.exchange.collectives import Collectives
from tests.rank_group import RankFailed, RankGroup

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float64", "int8", "bool", "complex64")
LAYOUTS = (
    "contiguous",
    "heads before tokens",
    "tokens before batch",
    "part of wider",
    "every second",
    "channels first",
)
MOVES = ("send_recv_heads", "gather_heads", "gather_heads in pieces", "allgather")


@dataclass(frozen=True)
class Call:
    """One exchange; `heads` are those of all ranks together."""

    move: str
    heads: int
    channels: int
    dtype: str
    layout: str


@dataclass(frozen=True)
class Case:
    """Exchanges that are started together and then waited for, in order."""

    batch: int
    tokens: tuple[int, ...]
    calls: tuple[Call, ...]


def cases(world_size: int) -> st.SearchStrategy[Case]:
    call = st.builds(
        Call,
        move=st.sampled_from(MOVES),
        heads=st.integers(1, 9),
        channels=st.sampled_from((1, 2, 3, 5, 16, 64)),
        dtype=st.sampled_from(DTYPES),
        layout=st.sampled_from(LAYOUTS),
    )
    tokens = st.integers(0, 9) | st.integers(0, 70)
    return st.builds(
        Case,
        batch=st.integers(1, 4),
        tokens=st.tuples(*[tokens] * world_size),
        calls=st.lists(call, min_size=1, max_size=4).map(tuple),
    )


def whole_tensor(case: Case, index: int) -> torch.Tensor:
    """Returns what all ranks together hold in one call, (B, T, H, D): any bytes, so also every kind of NaN."""
    call = case.calls[index]
    dtype = getattr(torch, call.dtype)
    shape = (case.batch, sum(case.tokens), call.heads, call.channels)
    random = torch.Generator().manual_seed(index)
    last = 2 if dtype is torch.bool else 256
    values = torch.randint(0, last, (*shape[:3], shape[3] * dtype.itemsize), generator=random, dtype=torch.uint8)
    return values.view(dtype)


def share(count: int, world_size: int, rank: int) -> tuple[int, int]:
    """Returns first and end of a rank's share, where the first `count % world_size` ranks take one more."""
    first = rank * (count // world_size) + min(rank, count % world_size)
    return first, first + count // world_size + (rank < count % world_size)


def input_and_result(case: Case, index: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    call, whole = case.calls[index], whole_tensor(case, index)
    first, end = share(call.heads, len(case.tokens), rank)
    of_heads = whole[:, :, first:end]
    of_tokens = whole[:, sum(case.tokens[:rank]) : sum(case.tokens[: rank + 1])]
    if call.move == "send_recv_heads":
        return of_tokens, of_heads
    return (of_heads, of_tokens) if call.move.startswith("gather_heads") else (of_tokens, whole)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Returns the same values in another order of memory."""
    if layout == "heads before tokens":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "tokens before batch":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "channels first":
        return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    if layout == "part of wider":
        return torch.cat((x, x), dim=3)[..., : x.shape[3]]
    if layout == "every second":
        return x.repeat_interleave(2, dim=1)[:, ::2]
    return x.contiguous()


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return torch.equal(x.contiguous().flatten().view(torch.uint8), y.contiguous().flatten().view(torch.uint8))


def start(exchange: All2All, call: Call, x: torch.Tensor, tokens: tuple[int, ...]):
    if call.move == "gather_heads":
        return exchange.start_gather_heads(x, tokens, call.heads)
    if call.move == "gather_heads in pieces":
        return exchange.start_gather_heads_of(
            lambda first, count: laid_out(x[:, first : first + count], call.layout), tokens, call.heads
        )
    return getattr(exchange, f"start_{call.move}")(x, tokens)


def run_case(exchanges: dict[str, All2All], case: Case) -> list[str]:
    """Returns what came out wrong on this rank, over each transport."""
    wrong = []
    for name, exchange in exchanges.items():
        pairs = [input_and_result(case, index, exchange.rank) for index in range(len(case.calls))]
        inputs = [laid_out(x, call.layout) for (x, _), call in zip(pairs, case.calls, strict=True)]
        pending = [start(exchange, call, x, case.tokens) for x, call in zip(inputs, case.calls, strict=True)]
        got = [one.wait() for one in pending]
        for call, result, (_, want) in zip(case.calls, got, pairs, strict=True):
            if not same(result, want) or not result.is_contiguous():
                wrong.append(f"{call.move} over {name}")
    return wrong


def set_up(rank: int, group: dist.ProcessGroup) -> dict[str, All2All]:
    exchanges = {
        "gloo": exchange_for(group, transport="gloo", timeout=30),
        "gloo without all_to_all": Collectives(group, timeout=30, has_all_to_all=False),
    }
    try:
        exchanges["csrc"] = exchange_for(group, transport="csrc", timeout=30)
        exchanges["csrc, views"] = exchange_for(group, transport="csrc", timeout=30, copy_out=False)
    except ExchangeError:  # no compiler: the test of csrc itself says so
        pass
    return exchanges


@pytest.fixture(scope="module", params=[2, 3, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(request.param, set_up) as group:
        yield group


def transports_of(exchanges: dict[str, All2All]) -> list[str]:
    return sorted(exchanges)


def test_all_transports_of_the_cpu_are_tested(ranks: RankGroup) -> None:
    for names in ranks.ask(transports_of):
        if "csrc" not in names:
            pytest.skip("csrc cannot be built here")


def test_b12_exchange_is_the_permutation_element_by_element(ranks: RankGroup) -> None:
    @settings(
        max_examples=100,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(cases(ranks.world_size))
    def check(case: Case) -> None:
        assert ranks.ask(run_case, case) == [[]] * ranks.world_size

    check()


def round_trip(exchanges: dict[str, All2All], tokens: tuple[int, ...], heads: int) -> list[str]:
    wrong = []
    for name, exchange in exchanges.items():
        x = torch.randn(2, tokens[exchange.rank], heads, 5, generator=torch.Generator().manual_seed(exchange.rank))
        if not same(exchange.gather_heads(exchange.send_recv_heads(x, tokens), tokens, heads), x):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("heads", [1, 4, 32])
def test_heads_come_back_for_tokens(ranks: RankGroup, heads: int) -> None:
    tokens = (5, 0, 33, 2)[: ranks.world_size]
    assert ranks.ask(round_trip, tokens, heads) == [[]] * ranks.world_size


def refusals(exchanges: dict[str, All2All]) -> list[str]:
    exchange = exchanges["gloo"]
    wrong = (
        lambda: exchange.send_recv_heads(torch.zeros(1, 3, 4, 1), (3,) * (exchange.world_size - 1)),
        lambda: exchange.send_recv_heads(torch.zeros(1, 3, 4, 1), (2,) * exchange.world_size),
        lambda: exchange.gather_heads(torch.zeros(1, 2 * exchange.world_size + 1, 4, 1)),
        lambda: exchange.gather_heads(torch.zeros(1, exchange.world_size, 4, 1), num_heads=3),
        lambda: exchange.allgather(torch.zeros(3)),
        lambda: exchange.send_recv_heads(torch.zeros(3, 4, 5)),
    )
    texts = []
    for call in wrong:
        with pytest.raises(ValueError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_sizes_that_do_not_fit_are_refused_with_the_numbers(ranks: RankGroup) -> None:
    for texts in ranks.ask(refusals):
        assert f"each of {ranks.world_size} ranks" in texts[0]
        assert "got 3 tokens" in texts[1] and "tokens=[2, " in texts[1]
        assert f"{2 * ranks.world_size + 1} tokens" in texts[2]
        assert "got 4 heads" in texts[3] and "of 3" in texts[3]
        assert "got (3,)" in texts[4] and "got (3, 4, 5)" in texts[5]


class Wrapper(torch.Tensor):
    """A tensor whose values are another's, as a DTensor's are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapper":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError("to be refused before anything is done with it")


def without_memory() -> dict[str, torch.Tensor]:
    """Returns tensors whose values do not lie where their strides say, by a word of the error that they cause."""
    freed = torch.ones(1, 2, 4, 8)
    freed.untyped_storage().resize_(0)
    return {
        "no memory": freed,
        "on cpu whose": torch._efficientzerotensor((1, 2, 4, 8)),
        "on meta": torch.ones(1, 2, 4, 8, device="meta"),
        "a Wrapper": Wrapper(torch.ones(1, 2, 4, 8)),
        "sparse_coo": torch.ones(1, 2, 4, 8).to_sparse(),
        "quint2x4": torch.zeros(64, dtype=torch.uint8).view(torch.quint2x4).view(1, 2, 4, 8),
    }


def refuse_tensors(exchanges: dict[str, All2All]) -> list[str]:
    wrong = []
    for name, exchange in exchanges.items():
        for word, x in without_memory().items():
            try:
                exchange.allgather(x)
                wrong.append(f"{name} takes {word}")
            except ValueError as error:
                if word not in str(error) or "plain" not in str(error):
                    wrong.append(f"{name}: {error}")
        got = exchange.allgather(torch.full((1, 1), float(exchange.rank)))
        if got.flatten().tolist() != list(range(exchange.world_size)):
            wrong.append(f"{name} cannot be used after refusals")
    return wrong


def test_tensors_without_plain_memory_are_refused(ranks: RankGroup) -> None:
    assert ranks.ask(refuse_tensors) == [[]] * ranks.world_size


class OneOfTwo(OneRank):
    """An exchange with nobody at the other end."""

    def __init__(self) -> None:
        super().__init__()
        self.world_size = 2


def test_vmap_and_fake_tensors_are_refused() -> None:  # here, as the ranks would need seconds to import these
    exchange = OneOfTwo()
    with pytest.raises(ValueError, match="plain tensors"):
        torch.func.vmap(exchange.allgather)(torch.ones(2, 1, 2, 4, 8))
    with torch._subclasses.FakeTensorMode(), pytest.raises(ValueError, match="FakeTensor"):
        exchange.allgather(torch.ones(1, 2, 4, 8))


def count_in_other_types(exchanges: dict[str, All2All]) -> list[str]:
    wrong = []
    for name, exchange in exchanges.items():
        counts = list(range(1, exchange.world_size + 1))
        x = torch.full((1, exchange.rank + 1), float(exchange.rank))
        want = [float(rank) for rank in range(exchange.world_size) for _ in range(rank + 1)]
        # csrc compares what the ranks said, which must not depend on the type
        tokens = torch.tensor(counts) if exchange.rank else [numpy.int32(count) for count in counts]
        if exchange.allgather(x, tokens).flatten().tolist() != want:
            wrong.append(name)
        for bad in (-1, 0.5):
            try:
                exchange.allgather(x, [*counts[:-1], bad])
                wrong.append(f"{name} takes {bad}")
            except ValueError:
                pass
    return wrong


def test_token_counts_may_have_any_integer_type(ranks: RankGroup) -> None:
    assert ranks.ask(count_in_other_types) == [[]] * ranks.world_size


def wait_twice(exchanges: dict[str, All2All]) -> list[str]:
    wrong = []
    for name, exchange in exchanges.items():
        pending = exchange.start_allgather(torch.ones(1, 1))
        pending.wait()
        try:
            pending.wait()
            wrong.append(name)
        except ExchangeError:
            pass
        if exchange.allgather(torch.ones(1, 1)).shape[1] != exchange.world_size:
            wrong.append(f"{name} afterwards")
    return wrong


def test_a_second_wait_is_refused_and_breaks_nothing(ranks: RankGroup) -> None:
    assert ranks.ask(wait_twice) == [[]] * ranks.world_size


@given(cases(1))
@settings(max_examples=30, deadline=None)
def test_one_rank_moves_nothing(case: Case) -> None:
    exchange = exchange_for(None)
    for index, call in enumerate(case.calls):
        x, want = input_and_result(case, index, 0)
        got = start(exchange, call, x, case.tokens).wait()
        assert same(got, want) and (got is x or call.move == "gather_heads in pieces")


def test_a_failing_rank_is_named_by_the_helper(ranks: RankGroup) -> None:
    with pytest.raises(RankFailed, match="rank 0: ValueError"):
        ranks.ask(round_trip, (1,) * (ranks.world_size + 1), 4)
