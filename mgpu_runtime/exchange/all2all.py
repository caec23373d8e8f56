"""The interface every transport of the exchange keeps.

Letters: B batch, T tokens of the whole sequence, t tokens of one rank, W world size, H heads of all ranks, h heads of
one rank, D channels of a head.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from .errors import ExchangeError
from .layout import Geometry, Move, deal

DEFAULT_TIMEOUT = 10.0  # seconds
Make = Callable[[int, int], Tensor]  # makes some tokens of a tensor: the first of them, and how many
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_INTEGERS = (int, torch.SymInt)  # the second is a size of a graph that is being compiled, and must stay one


class Pending(Protocol):
    """An exchange that has started; the ranks move data while this one computes."""

    def wait(self) -> Tensor:
        """Returns the result. Raises ExchangeTimeout, naming the ranks that did not arrive.

        To be called once, on every rank; raises ExchangeError the second time.
        """


class All2All(ABC):
    """Moves tensors between the ranks of one group, byte-exact; `gather_heads(send_recv_heads(x)) == x`.

    Every rank of the group calls the same methods with fitting shapes in the same order, waits in the same order, and
    has its starts and waits interleaved alike: where one waits before it starts the next exchange, all do. Ranks of one
    host whose calls differ, in sizes or dtype too, raise ExchangeError; on several hosts each kind of call is compared
    the first time only, and what differs later may give wrong values or wait in vain.

    `tokens` holds the token count of every rank and may be uneven, zeros included; without it all ranks hold as many.
    Heads are dealt by `deal`: the first H mod W ranks own one more. Inputs are plain tensors with memory of their own;
    they may be strided, and must not change between a start and its wait. Not differentiable (see `ops`), not for
    several threads at once.

    Where `copy_out` is False, transports that receive into buffers of their own return views of them: such a result is
    good until this rank starts another exchange after having waited for it. True copies it out, and is always safe. One
    rank alone returns its input itself, whatever `copy_out` is.

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
        self._stopped_after: float | None = None  # seconds, where the timeout is raised
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
        return self._begin(Move.SEND_RECV_HEADS, x, tokens)

    def start_gather_heads(
        self, x: Tensor, tokens: Sequence[int] | None = None, num_heads: int | None = None
    ) -> Pending:
        """Starts `gather_heads`."""
        return self._begin(Move.GATHER_HEADS, x, tokens, num_heads)

    def start_gather_heads_of(self, make: Make, tokens: Sequence[int], num_heads: int | None = None) -> Pending:
        """Starts `gather_heads` of a tensor that does not exist yet.

        `make(first, count)` returns its tokens from `first` on, (B, count, h, D), a plain tensor each time. A transport
        that serves its peers in turn has the tokens for each made just before it sends them, the own last: they travel
        while the rest are made. Others have all made at once. Results that were good at the call are good in `make`,
        which must not use this exchange itself. All ranks make theirs, or none does.
        """
        try:
            counts = self._of_each_rank(tokens)
        except ValueError:
            self._refused()
            raise
        return self._start_made(make, counts, num_heads)

    def start_allgather(self, x: Tensor, tokens: Sequence[int] | None = None) -> Pending:
        """Starts `allgather`."""
        return self._begin(Move.ALLGATHER, x, tokens)

    @contextmanager
    def patience(self, timeout: float) -> Iterator[None]:
        """Raises the timeout inside, for a first compile or a first use; never lowers it.

        Where ranks are waited for on the CPU, one whose process is stopped is given no more than the timeout before.
        """
        before, stopped_after = self.timeout, self._stopped_after
        self.timeout = max(before, timeout)
        self._stopped_after = before if stopped_after is None else stopped_after
        try:
            yield
        finally:
            self.timeout, self._stopped_after = before, stopped_after

    def check(self) -> None:  # noqa: B027  (most transports raise while they wait)
        """Raises what a finished wait on a device has met: to be called when the device is done, before results leave.

        Raises ExchangeTimeout, naming the ranks that did not arrive.
        """

    def close(self) -> None:  # noqa: B027  (most transports hold nothing of their own)
        """Gives back buffers and descriptors; results that are views of them are lost. May be called twice."""

    def _begin(self, move: Move, x: Tensor, tokens: Sequence[int] | None, num_heads: int | None = None) -> Pending:
        if self.world_size == 1:
            self._shares(move, x.shape, tokens, num_heads)
            return Once(Done(x))
        try:
            check_memory(x, move)
            shares = self._shares(move, x.shape, tokens, num_heads)
        except ValueError:
            self._refused()
            raise
        per_head = x.shape[3:] if move is not Move.ALLGATHER else x.shape[2:]
        geometry = Geometry(move, x.shape[0], *shares, per_head.numel() * x.element_size())
        return Once(self._start(geometry, x))

    def _start_made(self, make: Make, tokens: tuple[int, ...], num_heads: int | None) -> Pending:
        """Starts `gather_heads` of what is yet to be made; `tokens` are whole numbers, one a rank."""
        return self.start_gather_heads(make(0, sum(tokens)), tokens, num_heads)

    def _of_each_rank(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Returns token counts as Python's own. Raises ValueError unless there is one for each rank."""
        counts = _integers("tokens", tokens)
        if len(counts) != self.world_size or min(counts) < 0:
            raise ValueError(f"tokens must hold a count for each of {self.world_size} ranks, got {list(counts)}")
        return counts

    def _shares(
        self, move: Move, shape: Sequence[int], tokens: Sequence[int] | None, num_heads: int | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the tokens and the heads of every rank. Raises ValueError where x's shape does not fit them."""
        _check_dims(shape, move)
        world_size = self.world_size
        counts = self._counts(move, shape[1]) if tokens is None else self._of_each_rank(tokens)
        held = counts[self.rank] if move is not Move.GATHER_HEADS else sum(counts)
        if shape[1] != held:
            raise ValueError(f"{move.value} got {shape[1]} tokens where tokens={list(counts)} says {held}")
        if move is Move.ALLGATHER:
            return counts, (1,) * world_size
        if move is Move.SEND_RECV_HEADS:
            return counts, deal(shape[2], world_size)
        total = shape[2] * world_size if num_heads is None else _integers("num_heads", (num_heads,))[0]
        heads = deal(total, world_size)
        if shape[2] != heads[self.rank]:
            raise ValueError(
                f"gather_heads got {shape[2]} heads where rank {self.rank} of {world_size} owns {heads[self.rank]} "
                f"of {total}: say with num_heads how many all ranks hold"
            )
        return counts, heads

    def _counts(self, move: Move, held: int) -> tuple[int, ...]:
        """Returns the tokens of every rank where all hold as many."""
        if move is not Move.GATHER_HEADS:
            return (held,) * self.world_size
        if held % self.world_size:
            raise ValueError(
                f"{held} tokens do not divide over {self.world_size} ranks: say with tokens=[...] how many each "
                "rank gets"
            )
        return (held // self.world_size,) * self.world_size

    def _refused(self) -> None:  # noqa: B027  (most transports cannot tell)
        """Notes that a call was refused before it began, for transports that can tell a rank that is out of step."""

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


class Once:
    """What the caller waits with. A second wait would have the ranks out of step, so it is refused."""

    def __init__(self, pending: Pending) -> None:
        self._pending: Pending | None = pending

    def wait(self) -> Tensor:
        pending, self._pending = self._pending, None
        if pending is None:
            raise ExchangeError("this exchange has been waited for already: keep what wait() returned")
        return pending.wait()


class OneRank(All2All):
    """The exchange of a single process: nothing moves, and the result is the input itself."""

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


def _check_dims(shape: Sequence[int], move: Move) -> None:
    least = 2 if move is Move.ALLGATHER else 4
    if len(shape) < least or (move is not Move.ALLGATHER and len(shape) != 4):
        wanted = "(B, tokens, ...)" if move is Move.ALLGATHER else "(B, tokens, heads, channels)"
        raise ValueError(f"{move.value} takes a tensor {wanted}, got {tuple(shape)}")


def _integers(name: str, counts: Sequence[int]) -> tuple[int, ...]:
    """Returns counts that may be of other libraries' types as Python's own, which all ranks spell alike."""
    try:
        return tuple(count if isinstance(count, _INTEGERS) else operator.index(count) for count in counts)
    except TypeError as error:
        raise ValueError(f"{name} must be whole numbers: {error}") from error


def check_memory(x: Tensor, move: Move) -> None:
    """Raises ValueError unless x's values lie in memory as its strides say, which is where transports read them."""
    given = ""
    if x.layout is not torch.strided or x.is_nested:
        given = f"one with layout {'nested' if x.is_nested else str(x.layout).removeprefix('torch.')}"
    elif type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # its values are those of tensors inside of it
        given = f"a {type(x).__name__}"
    elif x.dtype in _QUANTIZED:  # not `is_quantized`, which is false for a view of bytes
        given = f"a quantized one ({x.dtype})"
    elif not _has_memory(x):
        given = f"one on {x.device} whose values lie in no memory"
    if given:
        raise ValueError(f"{move.value} takes plain tensors, strided and with memory of their own, and got {given}")


def _has_memory(x: Tensor) -> bool:
    if x.numel() == 0:
        return True
    try:
        storage = x.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
    except RuntimeError:  # torch's word for a tensor that stands for others, as inside of vmap
        return False
    strides = x.stride()
    end = x.storage_offset() + sum(map(operator.mul, x.shape, strides)) - sum(strides) + 1
    return address != 0 and end * x.element_size() <= size
