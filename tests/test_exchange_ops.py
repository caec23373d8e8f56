"""The exchange as operators of torch: what opcheck asks, gradients, fresh results, order in compiled graphs."""

import gc

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor

from mgpu_runtime.exchange import All2All, ExchangeError, exchange_for, ops
from mgpu_runtime.exchange.layout import deal, starts
from tests.spawn import run

B, H, D = 2, 5, 4  # 5 heads do not divide over 2 or 3 ranks


def _tokens(world_size: int, first: int = 3, step: int = 2) -> tuple[int, ...]:
    return tuple(first + step * rank for rank in range(world_size))


def _whole(tokens: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, sum(tokens), H, D, dtype=torch.float64, generator=generator).to(dtype)


def _part(x: Tensor, dim: int, counts: tuple[int, ...], rank: int) -> Tensor:
    return x.narrow(dim, starts(counts)[rank], counts[rank])


def _opcheck(exchange: All2All, tokens: tuple[int, ...]) -> dict:
    """Runs torch's own checks: schema, autograd registration, fake shapes, AOT dispatch with symbolic shapes."""
    who = (ops.enlist(exchange), exchange.rank, exchange.world_size)
    local = _part(_whole(tokens), 1, tokens, exchange.rank)
    heads = _part(_whole(tokens), 2, deal(H, exchange.world_size), exchange.rank)
    arguments = {
        "send_recv_heads": (local.clone().requires_grad_(), tokens),
        "send_recv_heads_many": ([local.clone().requires_grad_(), local * 2], tokens),
        "gather_heads": (heads.clone().requires_grad_(), tokens, H),
        "gather_heads_many": ([heads.clone().requires_grad_(), heads * 2], tokens, [H, H]),
        "allgather": (local.clone().requires_grad_(), tokens),
    }
    return {
        name: torch.library.opcheck(getattr(torch.ops.ltx_mgpu, name).default, (*first, *who))
        for name, first in arguments.items()
    }


def _values_and_gradients(exchange: All2All, tokens: tuple[int, ...]) -> list[str]:
    """Compares each operator with cutting the whole; its gradient with the same cut of the whole's gradient."""
    rank, heads = exchange.rank, deal(H, exchange.world_size)
    whole, weight = _whole(tokens), _whole(tokens, seed=1)
    by_tokens, by_heads = (1, tokens), (2, heads)
    wrong = []

    def check(name: str, call, given: tuple, wanted: tuple | None) -> None:
        x = _part(whole, *given, rank).clone().requires_grad_()
        result = call(x)
        want, share = (whole, weight) if wanted is None else (_part(y, *wanted, rank) for y in (whole, weight))
        (result**2 * share).sum().backward()
        times = exchange.world_size if wanted is None else 1  # every rank's result holds the part
        if not (torch.equal(result, want) and result.is_contiguous()):
            wrong.append(name)
        if not torch.allclose(x.grad, times * _part(2 * whole * weight, *given, rank), rtol=0, atol=1e-12):
            wrong.append(f"gradient of {name}")

    check("send", lambda x: ops.send_recv_heads(exchange, x, tokens), by_tokens, by_heads)
    check("gather", lambda x: ops.gather_heads(exchange, x, tokens, H), by_heads, by_tokens)
    check("allgather", lambda x: ops.allgather(exchange, x, tokens), by_tokens, None)
    # two of three results unused: their gradients are zeros, and still travel
    check("many", lambda x: ops.send_recv_heads_many(exchange, (x, x + 1, x), tokens)[0], by_tokens, by_heads)
    x = _part(whole, 1, tokens, rank)[:, :, 0, 0].clone().requires_grad_()
    ops.allgather(exchange, x, tokens).sum().backward()
    if not torch.equal(x.grad, torch.full_like(x, exchange.world_size)):
        wrong.append("gradient of allgather of (B, t)")
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        part = _part(_whole(tokens, dtype=dtype), 1, tokens, rank)
        got = ops.send_recv_heads(exchange, part, tokens).float()
        if not torch.equal(got, _part(_whole(tokens, dtype=dtype), *by_heads, rank).float()):
            wrong.append(str(dtype))
    return wrong


def _keeps_results(exchange: All2All, tokens: tuple[int, ...]) -> bool:
    """Says whether results outlive later exchanges, with an exchange whose own results are views of its buffers."""
    x = _part(_whole(tokens), 1, tokens, exchange.rank)
    kept = ops.send_recv_heads(exchange, x, tokens)
    before = kept.clone()
    for _ in range(4):
        exchange.send_recv_heads(x * 0, tokens)
    return torch.equal(kept, before) and not exchange.copy_out


def _program(exchange: All2All, x: Tensor, tokens: tuple[int, ...]) -> Tensor:
    q, k = ops.send_recv_heads_many(exchange, (x * 2, x.sin()), tokens)
    out = ops.gather_heads(exchange, q * k, tokens, H)
    ops.allgather(exchange, out, tokens)  # unused
    first = ops.allgather(exchange, x, tokens)
    second = ops.allgather(exchange, x, tokens)  # the same once more
    return out.sum() * (first + second).sum()


def _compiled(exchange: All2All) -> dict:
    """Compiles a program with gradients for uneven token counts; returns what its graph holds, and whether it fits."""
    programs: list[list[str]] = []

    def backend(graph, inputs):
        def keep(module, arguments):
            targets = [str(a) for node in module.graph.nodes for a in (node.target, *node.args)]
            programs.append([name.split(".")[1] for name in targets if name.startswith("ltx_mgpu.")])
            return module

        return torch._dynamo.backends.common.aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph, inputs)

    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(_program, fullgraph=True, dynamic=True, backend=backend)
    same = []
    for first in (6, 7, 9, 12):
        tokens = _tokens(exchange.world_size, first)
        x = _part(_whole(tokens), 1, tokens, exchange.rank).clone().requires_grad_()
        (expected,) = torch.autograd.grad(_program(exchange, x, tokens), x)
        (got,) = torch.autograd.grad(compiled(exchange, x, tokens), x)
        same.append(torch.equal(expected, got))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {"same": all(same), "graphs": graphs, "forward": programs[0], "backward": programs[1]}


def _refusals(group) -> list[str]:
    exchange = exchange_for(group, transport="gloo")
    x = torch.zeros(1, 2, 2, 1)
    texts = []
    with pytest.raises(ValueError) as caught:
        ops.gather_heads(exchange, torch.zeros(1, 7, 1, 1))
    texts.append(str(caught.value))
    fresh = exchange_for(group, transport="gloo")
    with pytest.raises((ExchangeError, torch._dynamo.exc.Unsupported)) as caught:
        torch.compile(lambda x: ops.allgather(fresh, x), fullgraph=True, backend="eager")(x)
    texts.append(str(caught.value))
    who = (ops.enlist(exchange), exchange.rank, exchange.world_size)
    exchange.close()
    del exchange
    gc.collect()
    with pytest.raises(ExchangeError) as caught:
        torch.ops.ltx_mgpu.allgather(x, [2] * dist.get_world_size(group), *who)
    return [*texts, str(caught.value)]


def _everything(rank: int, group) -> dict:
    exchange = exchange_for(group, copy_out=False)
    ops.enlist(exchange)
    tokens = _tokens(exchange.world_size)
    result = {
        "opcheck": _opcheck(exchange, tokens),
        "wrong": _values_and_gradients(exchange, tokens),
        "empty": _values_and_gradients(exchange, (0, *tokens[1:])),
        "keeps": _keeps_results(exchange, tokens),
        "compiled": _compiled(exchange),
        "refusals": _refusals(group),
    }
    exchange.close()
    return result


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> list[dict]:
    return run(_everything, request.param)


def test_operators_pass_torch_s_own_checks(ranks: list[dict]) -> None:
    for result in ranks:
        for checks in result["opcheck"].values():
            assert set(checks.values()) == {"SUCCESS"}


def test_values_and_gradients_are_those_of_the_whole(ranks: list[dict]) -> None:
    for result in ranks:
        assert result["wrong"] == [] and result["empty"] == []


def test_results_stay_when_the_buffers_are_used_again(ranks: list[dict]) -> None:
    assert all(result["keeps"] for result in ranks)


def test_compiled_graphs_hold_every_exchange_in_the_order_of_the_program(ranks: list[dict]) -> None:
    """Also the unused one and both equal ones: a rank that left one out would leave its peers waiting."""
    for result in ranks:
        compiled = result["compiled"]
        assert compiled["same"] and compiled["graphs"] == 1
        assert compiled["forward"] == ["send_recv_heads_many", "gather_heads", *["allgather"] * 3]
        assert compiled["backward"] == ranks[0]["compiled"]["backward"]
        # of an allgather, of the next, of the gather, of the two sends
        assert compiled["backward"] == ["gather_heads", "gather_heads", "send_recv_heads", "gather_heads_many"]


def test_refusals_say_what_to_do(ranks: list[dict]) -> None:
    for result in ranks:
        uneven, unknown, gone = result["refusals"]
        assert "7 tokens do not divide over" in uneven and "tokens=[...]" in uneven
        assert "ops.enlist(exchange) before compiling" in unknown
        assert "must live as long as the graphs and gradients that use it" in gone


def test_one_rank_moves_nothing() -> None:
    exchange, x = exchange_for(None), torch.zeros(1, 2, 3, 4)
    assert ops.send_recv_heads(exchange, x) is x and ops.gather_heads(exchange, x) is x
    assert ops.allgather(exchange, x) is x and ops.send_recv_heads_many(exchange, (x, x)) == (x, x)
    with pytest.raises(ValueError, match="2 tokens where tokens="):
        ops.send_recv_heads(exchange, x, [3])
