"""The exchange as operators of torch: with gradients, and opaque nodes of a compiled graph.

`send_recv_heads`, `send_recv_heads_many`, `gather_heads` and `allgather` take an open exchange and do what its methods
of the same name do; results are always fresh tensors. Outside of compilation and without gradients the methods
themselves, with their `start_*` forms, cost less. Under `torch.compile` a graph holds the exchange's number, rank and
world size as constants: one graph per exchange. `enlist` gives the number and must be called before compilation.

Why compiled ranks keep in step. Every rank must issue the same exchanges in the same order, but each compiles for
itself, and with uneven shares from unlike sizes; a scheduler that moves nodes by their memory could order independent
exchanges differently (v2a of one block and video self-attention of the next are independent), and an unused one could
be dropped. So every operator is registered as having an ordered effect: AOTAutograd threads a token through all of
them, in forward and in backward, which makes their order that of the program by data dependency, keeps those whose
results are unused, and forbids merging equal ones. The order of the program is the same on every rank, as nothing in
it depends on sizes. Eager autograd runs ready nodes of one device in the reverse order of the forward, on every rank
alike.

Letters: B batch, T tokens of the whole sequence, t tokens of one rank, W world size, H heads of all ranks, h heads of
one rank, D channels of a head.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .all2all import All2All
from .errors import ExchangeError
from .layout import deal

_numbers = count(1)
_open: WeakValueDictionary[int, All2All] = WeakValueDictionary()  # operators take no Python objects, only numbers


def enlist(exchange: All2All) -> int:
    """Returns the number that operators know an open exchange by, and gives it one at first. Not to be compiled."""
    number = getattr(exchange, "number", None)
    if number is None:
        number = exchange.number = next(_numbers)
        _open[number] = exchange
    return number


def rulers(counts: Sequence[int]) -> tuple[Tensor, ...]:
    """Returns empty tensors of these lengths, for graphs to read token counts from with `lengths`.

    A compiler takes integers that hang on an nn.Module for constants and would make one graph for each value of them;
    the lengths of tensors there stay symbols. Not to be compiled.
    """
    made = tuple(torch.empty(count, 0) for count in counts)
    for ruler in made:
        torch._dynamo.maybe_mark_dynamic(ruler, 0)  # by itself, not as equal to whatever is as long the first time
    return made


def lengths(rulers: Sequence[Tensor]) -> tuple[int, ...]:
    """Reads the counts off `rulers`: symbols inside of a compiled graph."""
    return tuple(ruler.shape[0] for ruler in rulers)


def send_recv_heads(exchange: All2All, x: Tensor, tokens: Sequence[int] | None = None) -> Tensor:
    """Trades tokens for heads: (B, t, H, D) to (B, T, h, D). Differentiable. Errors as All2All.send_recv_heads."""
    if exchange.world_size == 1:
        return exchange.send_recv_heads(x, tokens)
    return torch.ops.ltx_mgpu.send_recv_heads(x, _counts(exchange, x, tokens), *_who(exchange))


def send_recv_heads_many(
    exchange: All2All, xs: Sequence[Tensor], tokens: Sequence[int] | None = None
) -> tuple[Tensor, ...]:
    """Trades tokens for heads of several tensors, say q, k and v, with one synchronisation. Differentiable."""
    if exchange.world_size == 1:
        return tuple(exchange.send_recv_heads(x, tokens) for x in xs)
    counts = _counts(exchange, xs[0], tokens)
    return tuple(torch.ops.ltx_mgpu.send_recv_heads_many(list(xs), counts, *_who(exchange)))


def gather_heads(
    exchange: All2All, x: Tensor, tokens: Sequence[int] | None = None, num_heads: int | None = None
) -> Tensor:
    """Trades heads for tokens: (B, T, h, D) to (B, t, H, D). Differentiable. Errors as All2All.gather_heads."""
    world_size = exchange.world_size
    if world_size == 1:
        return exchange.gather_heads(x, tokens, num_heads)
    if tokens is None:
        if x.shape[1] % world_size:
            raise ValueError(
                f"{x.shape[1]} tokens do not divide over {world_size} ranks: say with tokens=[...] how many each rank "
                "gets"
            )
        tokens = [x.shape[1] // world_size] * world_size
    num_heads = x.shape[2] * world_size if num_heads is None else num_heads
    return torch.ops.ltx_mgpu.gather_heads(x, list(tokens), num_heads, *_who(exchange))


def allgather(exchange: All2All, x: Tensor, tokens: Sequence[int] | None = None) -> Tensor:
    """Joins the ranks' parts along dim 1: (B, t, ...) to (B, T, ...). The gradient is summed over the ranks."""
    if exchange.world_size == 1:
        return exchange.allgather(x, tokens)
    return torch.ops.ltx_mgpu.allgather(x, _counts(exchange, x, tokens), *_who(exchange))


def _counts(exchange: All2All, x: Tensor, tokens: Sequence[int] | None) -> list[int]:
    return [x.shape[1]] * exchange.world_size if tokens is None else list(tokens)


def _who(exchange: All2All) -> tuple[int, int, int]:
    number = getattr(exchange, "number", None)
    if number is None:
        if torch.compiler.is_compiling():
            raise ExchangeError("this exchange has no number yet: call ops.enlist(exchange) before compiling")
        number = enlist(exchange)
    return number, exchange.rank, exchange.world_size


@contextmanager
def _fresh_results(number: int) -> Iterator[All2All]:
    """Yields the exchange of a number; inside, its results are no views of its buffers."""
    exchange = _open.get(number)
    if exchange is None:
        raise ExchangeError(f"exchange {number} is gone: it must live as long as the graphs and gradients that use it")
    before, exchange.copy_out = exchange.copy_out, True
    try:
        yield exchange
    finally:
        exchange.copy_out = before


# --- the operators; `who` is the exchange's number, this rank and the world size ---


@torch.library.custom_op(
    "ltx_mgpu::send_recv_heads",
    mutates_args=(),
    schema="(Tensor x, SymInt[] tokens, int exchange, int rank, int world_size) -> Tensor",
)
def _send_recv_heads(x: Tensor, tokens: Sequence[int], number: int, rank: int, world_size: int) -> Tensor:
    with _fresh_results(number) as exchange:
        return exchange.send_recv_heads(x, tokens)


@_send_recv_heads.register_fake
def _(x: Tensor, tokens: Sequence[int], number: int, rank: int, world_size: int) -> Tensor:
    return x.new_empty(x.shape[0], sum(tokens), deal(x.shape[2], world_size)[rank], x.shape[3])


@torch.library.custom_op(
    "ltx_mgpu::send_recv_heads_many",
    mutates_args=(),
    schema="(Tensor[] xs, SymInt[] tokens, int exchange, int rank, int world_size) -> Tensor[]",
)
def _send_recv_heads_many(
    xs: Sequence[Tensor], tokens: Sequence[int], number: int, rank: int, world_size: int
) -> list[Tensor]:
    with _fresh_results(number) as exchange:
        started = [exchange.start_send_recv_heads(x, tokens) for x in xs]
        return [pending.wait() for pending in started]


@_send_recv_heads_many.register_fake
def _(xs: Sequence[Tensor], tokens: Sequence[int], number: int, rank: int, world_size: int) -> list[Tensor]:
    return [x.new_empty(x.shape[0], sum(tokens), deal(x.shape[2], world_size)[rank], x.shape[3]) for x in xs]


@torch.library.custom_op(
    "ltx_mgpu::gather_heads",
    mutates_args=(),
    schema="(Tensor x, SymInt[] tokens, SymInt num_heads, int exchange, int rank, int world_size) -> Tensor",
)
def _gather_heads(x: Tensor, tokens: Sequence[int], num_heads: int, number: int, rank: int, world_size: int) -> Tensor:
    with _fresh_results(number) as exchange:
        return exchange.gather_heads(x, tokens, num_heads)


@_gather_heads.register_fake
def _(x: Tensor, tokens: Sequence[int], num_heads: int, number: int, rank: int, world_size: int) -> Tensor:
    return x.new_empty(x.shape[0], tokens[rank], num_heads, x.shape[3])


@torch.library.custom_op(
    "ltx_mgpu::gather_heads_many",
    mutates_args=(),
    schema="(Tensor[] xs, SymInt[] tokens, SymInt[] num_heads, int exchange, int rank, int world_size) -> Tensor[]",
)
def _gather_heads_many(
    xs: Sequence[Tensor], tokens: Sequence[int], num_heads: Sequence[int], number: int, rank: int, world_size: int
) -> list[Tensor]:
    with _fresh_results(number) as exchange:
        started = [exchange.start_gather_heads(x, tokens, heads) for x, heads in zip(xs, num_heads, strict=True)]
        return [pending.wait() for pending in started]


@_gather_heads_many.register_fake
def _(
    xs: Sequence[Tensor], tokens: Sequence[int], num_heads: Sequence[int], number: int, rank: int, world_size: int
) -> list[Tensor]:
    return [x.new_empty(x.shape[0], tokens[rank], heads, x.shape[3]) for x, heads in zip(xs, num_heads, strict=True)]


@torch.library.custom_op(
    "ltx_mgpu::allgather",
    mutates_args=(),
    schema="(Tensor x, SymInt[] tokens, int exchange, int rank, int world_size) -> Tensor",
)
def _allgather(x: Tensor, tokens: Sequence[int], number: int, rank: int, world_size: int) -> Tensor:
    with _fresh_results(number) as exchange:
        return exchange.allgather(x, tokens)


@_allgather.register_fake
def _(x: Tensor, tokens: Sequence[int], number: int, rank: int, world_size: int) -> Tensor:
    return x.new_empty(x.shape[0], sum(tokens), *x.shape[2:])


# --- gradients: the exchanges of heads are permutations, so each way's gradient goes the other way ---


def _keep_send(ctx, inputs: tuple, output: Tensor) -> None:
    x, ctx.tokens, *ctx.who = inputs
    ctx.num_heads = x.shape[2]


def _send_gradient(ctx, gradient: Tensor) -> tuple:
    return torch.ops.ltx_mgpu.gather_heads(gradient, ctx.tokens, ctx.num_heads, *ctx.who), None, None, None, None


def _keep_send_many(ctx, inputs: tuple, output: list[Tensor]) -> None:
    xs, ctx.tokens, *ctx.who = inputs
    ctx.num_heads = [x.shape[2] for x in xs]


def _send_many_gradient(ctx, gradients: list[Tensor]) -> tuple:
    back = torch.ops.ltx_mgpu.gather_heads_many(gradients, ctx.tokens, ctx.num_heads, *ctx.who)
    return back, None, None, None, None


def _keep_gather(ctx, inputs: tuple, output: Tensor | list[Tensor]) -> None:
    _, ctx.tokens, _, *ctx.who = inputs


def _gather_gradient(ctx, gradient: Tensor) -> tuple:
    return torch.ops.ltx_mgpu.send_recv_heads(gradient, ctx.tokens, *ctx.who), None, None, None, None, None


def _gather_many_gradient(ctx, gradients: list[Tensor]) -> tuple:
    return torch.ops.ltx_mgpu.send_recv_heads_many(gradients, ctx.tokens, *ctx.who), None, None, None, None, None


def _keep_allgather(ctx, inputs: tuple, output: Tensor) -> None:
    x, ctx.tokens, *ctx.who = inputs
    ctx.rest = x.shape[2:]


def _allgather_gradient(ctx, gradient: Tensor) -> tuple:
    """Sums every rank's gradient of the own part: each rank's whole (B, T, C) is one head of W, traded for tokens."""
    *_, rank, world_size = ctx.who
    one_head = gradient.flatten(2).unsqueeze(2) if gradient.dim() > 2 else gradient[:, :, None, None]
    own = torch.ops.ltx_mgpu.gather_heads(one_head, ctx.tokens, world_size, *ctx.who).sum(2)
    return own.view(own.shape[0], own.shape[1], *ctx.rest), None, None, None, None


_send_recv_heads.register_autograd(_send_gradient, setup_context=_keep_send)
_send_recv_heads_many.register_autograd(_send_many_gradient, setup_context=_keep_send_many)
_gather_heads.register_autograd(_gather_gradient, setup_context=_keep_gather)
_gather_heads_many.register_autograd(_gather_many_gradient, setup_context=_keep_gather)
_allgather.register_autograd(_allgather_gradient, setup_context=_keep_allgather)


def _keep_in_order(operator: torch.library.CustomOpDef) -> None:
    """Registers an operator's ordered effect. Only compiled graphs need it, so no torch is refused for lacking it."""
    if hasattr(operator, "register_effect"):
        operator.register_effect(torch.library.EffectType.ORDERED)
        return
    effects = torch._higher_order_ops.effects  # where it was before torch had a method for it
    if hasattr(effects, "_register_effectful_op"):
        effects._register_effectful_op(operator._opoverload, effects._EffectType.ORDERED)


for _operator in (_send_recv_heads, _send_recv_heads_many, _gather_heads, _gather_heads_many, _allgather):
    _keep_in_order(_operator)
