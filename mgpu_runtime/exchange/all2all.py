"""The interface every transport of the exchange keeps.

Letters: B batch, T tokens of the whole sequence, t tokens of one rank, W world size, H heads of all ranks, h heads of
one rank, D channels of a head.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from .layout import Geometry, Move, deal

DEFAULT_TIMEOUT = 10.0  # seconds


class Pending(Protocol):
    """An exchange that has started; the ranks move data while this one computes."""

    def wait(self) -> Tensor:
        """Returns the result; to be called once. Raises ExchangeTimeout, naming the ranks that did not arrive."""


class All2All(ABC):
    """Moves tensors between the ranks of one group, byte-exact; `gather_heads(send_recv_heads(x)) == x`.

    Every rank of the group calls the same methods with fitting shapes in the same order, and waits in that order.
    `tokens` holds the token count of every rank and may be uneven, zeros included; without it all ranks hold as many.
    Heads are dealt by `deal`: the first H mod W ranks own one more. Inputs may be strided, and must not change between
    a start and its wait. Not differentiable (see `ops`), not for several threads at once.

    Where `copy_out` is False, transports that receive into buffers of their own return views of them: such a result is
    good until this rank starts another exchange after having waited for it. True copies it out, and is always safe.

    Attributes:
        transport: the name a user chooses it by.
        timeout: seconds a rank waits for another before it raises ExchangeTimeout; may be set at any time.
        description: one line for the user: what is used, and why nothing faster is.
    """

    transport: ClassVar[str]

    def __init__(self, rank: int, world_size: int, *, timeout: float = DEFAULT_TIMEOUT, copy_out: bool = True) -> None:
        if not timeout > 0:
            raise ValueError(f"the exchange's timeout must be more than 0 seconds, got {timeout}")
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.copy_out = copy_out
        self.description = self.transport

    def send_recv_heads(self, x: Tensor, tokens: Sequence[int] | None = None) -> Tensor:
        """Trades tokens for heads: (B, t, H, D) to (B, T, h, D). Raises ValueError for shapes that do not fit."""
        return self.start_send_recv_heads(x, tokens).wait()

    def gather_heads(self, x: Tensor, tokens: Sequence[int] | None = None, num_heads: int | None = None) -> Tensor:
        """Trades heads for tokens, the way back: (B, T, h, D) to (B, t, H, D).

        `num_heads` is H, needed where the ranks hold unlike numbers of heads. Raises ValueError for shapes that do not
        fit.
        """
        return self.start_gather_heads(x, tokens, num_heads).wait()

    def allgather(self, x: Tensor, tokens: Sequence[int] | None = None) -> Tensor:
        """Joins the ranks' parts along dim 1, in rank order: (B, t, ...) to (B, T, ...)."""
        return self.start_allgather(x, tokens).wait()

    def start_send_recv_heads(self, x: Tensor, tokens: Sequence[int] | None = None) -> Pending:
        """Starts `send_recv_heads`; several exchanges may be started before the first is waited for."""
        _check_dims(x, Move.SEND_RECV_HEADS)
        counts = self._counts(x, tokens)
        return self._begin(Move.SEND_RECV_HEADS, x, counts, deal(x.shape[2], self.world_size))

    def start_gather_heads(
        self, x: Tensor, tokens: Sequence[int] | None = None, num_heads: int | None = None
    ) -> Pending:
        """Starts `gather_heads`."""
        _check_dims(x, Move.GATHER_HEADS)
        if tokens is None:
            if x.shape[1] % self.world_size:
                raise ValueError(
                    f"{x.shape[1]} tokens do not divide over {self.world_size} ranks: say with tokens=[...] how many "
                    "each rank gets"
                )
            tokens = (x.shape[1] // self.world_size,) * self.world_size
        heads = deal(x.shape[2] * self.world_size if num_heads is None else num_heads, self.world_size)
        return self._begin(Move.GATHER_HEADS, x, tuple(tokens), heads)

    def start_allgather(self, x: Tensor, tokens: Sequence[int] | None = None) -> Pending:
        """Starts `allgather`."""
        _check_dims(x, Move.ALLGATHER)
        return self._begin(Move.ALLGATHER, x, self._counts(x, tokens), (1,) * self.world_size)

    @contextmanager
    def patience(self, timeout: float) -> Iterator[None]:
        """Raises the timeout inside, for a first compile or a first use; never lowers it."""
        before = self.timeout
        self.timeout = max(before, timeout)
        try:
            yield
        finally:
            self.timeout = before

    def check(self) -> None:  # noqa: B027  (most transports raise while they wait)
        """Raises what a finished wait on a device has met: to be called when the device is done, before results leave.

        Raises ExchangeTimeout, naming the ranks that did not arrive.
        """

    def close(self) -> None:  # noqa: B027  (most transports hold nothing of their own)
        """Gives back buffers and descriptors; results that are views of them are lost. May be called twice."""

    def _counts(self, x: Tensor, tokens: Sequence[int] | None) -> tuple[int, ...]:
        return (x.shape[1],) * self.world_size if tokens is None else tuple(tokens)

    def _begin(self, move: Move, x: Tensor, tokens: tuple[int, ...], heads: tuple[int, ...]) -> Pending:
        if len(tokens) != self.world_size or min(tokens) < 0:
            raise ValueError(f"tokens must hold a count for each of {self.world_size} ranks, got {list(tokens)}")
        held = tokens[self.rank] if move is not Move.GATHER_HEADS else sum(tokens)
        if x.shape[1] != held:
            raise ValueError(f"{move.value} got {x.shape[1]} tokens where tokens={list(tokens)} says {held}")
        if move is Move.GATHER_HEADS and x.shape[2] != heads[self.rank]:
            raise ValueError(
                f"gather_heads got {x.shape[2]} heads where rank {self.rank} of {self.world_size} owns "
                f"{heads[self.rank]} of {sum(heads)}: say with num_heads how many all ranks hold"
            )
        if self.world_size == 1:
            return Done(x)
        per_head = x.shape[3:] if move is not Move.ALLGATHER else x.shape[2:]
        geometry = Geometry(move, x.shape[0], tokens, heads, per_head.numel() * x.element_size())
        return self._start(geometry, x)

    @abstractmethod
    def _start(self, geometry: Geometry, x: Tensor) -> Pending:
        """Starts one exchange among two ranks or more. `x` fits `geometry`; dims behind (B, T, H) may be many.

        For ALLGATHER `x` is (B, t, ...). The result has x's dtype, and x's shape but for tokens and heads.
        """


class Done:
    """An exchange whose result is there already."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        return self._result


class OneRank(All2All):
    """The exchange of a single process: nothing moves."""

    transport = "none"

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _start(self, geometry: Geometry, x: Tensor) -> Pending:
        raise AssertionError("one rank has nobody to exchange with")


def result_shape(geometry: Geometry, rank: int, x: Tensor) -> torch.Size:
    """Returns the shape of a rank's result, with x's dims behind tokens and heads."""
    batch, tokens, heads = geometry.result_shape(rank)
    if geometry.move is Move.ALLGATHER:
        return torch.Size((batch, tokens, *x.shape[2:]))
    return torch.Size((batch, tokens, heads, *x.shape[3:]))


def _check_dims(x: Tensor, move: Move) -> None:
    least = 2 if move is Move.ALLGATHER else 4
    if x.dim() < least or (move is not Move.ALLGATHER and x.dim() != 4):
        wanted = "(B, tokens, ...)" if move is Move.ALLGATHER else "(B, tokens, heads, channels)"
        raise ValueError(f"{move.value} takes a tensor {wanted}, got {tuple(x.shape)}")
