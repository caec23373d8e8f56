"""Which rows of a tensor go where: the permutations of the exchange as strided copies, the same for every transport.

Letters: B batch, T tokens of the whole sequence, t tokens of one rank, W world size, H heads of all ranks, h heads of
one rank, D channels of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate


class Move(Enum):
    """The three permutations. Every rank sends one block of rows to every rank, itself among them."""

    SEND_RECV_HEADS = "send_recv_heads"  # (B, t, H, D) -> (B, T, h, D)
    GATHER_HEADS = "gather_heads"  # (B, T, h, D) -> (B, t, H, D)
    ALLGATHER = "allgather"  # (B, t, H, D) -> (B, T, H, D): heads stay whole


def deal(count: int, world_size: int) -> tuple[int, ...]:
    """Deals `count` things to ranks as evenly as it goes: the first `count % world_size` ranks take one more."""
    # in this form nothing asks whether it divides, so a count that is a symbol of a compiled graph stays one
    return tuple((count + world_size - 1 - rank) // world_size for rank in range(world_size))


def starts(counts: Sequence[int]) -> tuple[int, ...]:
    """Returns where each rank's share begins in the whole."""
    return tuple(accumulate(counts, initial=0))[:-1]


@dataclass(frozen=True)
class Block:
    """What one rank sends to another: `tokens` rows per sample, each of contiguous bytes.

    Row (b, t) lies `first + b * batch_stride + t * token_stride` bytes into the sender's tensor, and in the same way
    into the receiver's result. The strides of the sender's tensor are the caller's; the result is contiguous.
    """

    batch: int
    tokens: int
    row_bytes: int
    source_first: int
    target_first: int
    target_batch_stride: int
    target_token_stride: int


@dataclass(frozen=True)
class Geometry:
    """One exchange, known alike to every rank: sizes of all ranks' inputs and results, and the blocks between them.

    `tokens` and `heads` are per rank. For ALLGATHER `heads` holds one share that every rank has whole, W times.
    """

    move: Move
    batch: int
    tokens: tuple[int, ...]
    heads: tuple[int, ...]
    head_bytes: int  # bytes of one head of one token

    @property
    def world_size(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.tokens)

    @property
    def num_heads(self) -> int:
        """H."""
        return self.heads[0] if self.move is Move.ALLGATHER else sum(self.heads)

    def input_shape(self, rank: int) -> tuple[int, int, int]:
        """Returns (B, tokens, heads) of what a rank gives."""
        if self.move is Move.GATHER_HEADS:
            return self.batch, self.num_tokens, self.heads[rank]
        return self.batch, self.tokens[rank], self.num_heads

    def result_shape(self, rank: int) -> tuple[int, int, int]:
        """Returns (B, tokens, heads) of what a rank gets."""
        if self.move is Move.GATHER_HEADS:
            return self.batch, self.tokens[rank], self.num_heads
        return self.batch, self.num_tokens, self.heads[rank]

    def result_bytes(self, rank: int) -> int:
        """Returns the size of what a rank gets, in bytes."""
        batch, tokens, heads = self.result_shape(rank)
        return batch * tokens * heads * self.head_bytes

    def block(self, sender: int, receiver: int, source_strides: tuple[int, int, int]) -> Block:
        """Returns what `sender` sends to `receiver`; `source_strides` are the sender's, in bytes, of (B, T, H).

        Heads of one token must be contiguous in the sender's tensor where more than one is sent.
        """
        _, result_tokens, result_heads = self.result_shape(receiver)
        first_token, first_head = starts(self.tokens), starts(self.heads)
        source_token = source_head = target_token = target_head = 0
        tokens, heads = self.tokens[sender], self.heads[receiver]
        if self.move is Move.SEND_RECV_HEADS:
            source_head, target_token = first_head[receiver], first_token[sender]
        elif self.move is Move.GATHER_HEADS:
            source_token, target_head = first_token[receiver], first_head[sender]
            tokens, heads = self.tokens[receiver], self.heads[sender]
        else:
            target_token = first_token[sender]
        target_token_stride = result_heads * self.head_bytes
        return Block(
            batch=self.batch,
            tokens=tokens,
            row_bytes=heads * self.head_bytes,
            source_first=source_token * source_strides[1] + source_head * source_strides[2],
            target_first=target_token * target_token_stride + target_head * self.head_bytes,
            target_batch_stride=result_tokens * target_token_stride,
            target_token_stride=target_token_stride,
        )


class Banks:
    """Deals places for results in the banks of each rank's buffer, which take turns; the same on every rank.

    Exchanges that are started before the results of others are waited for share a bank. The next one after all were
    waited for opens another bank. Two banks are enough for a sender to write without asking: whoever it waited for in
    the last bank had started exchanges there, and so was done with the results of the bank before. Hence the rule for
    users: a result is good until this rank starts the next exchange after having waited for it. A rank that makes what
    it sends piece by piece, of such a result, has started for one peer while it still reads for another: the bank after
    that is a third one. Who never waits for all fills one bank without end.
    """

    ALIGNMENT = 256

    def __init__(self, world_size: int) -> None:
        self.bank = 1
        self.used = [0] * world_size  # bytes of the open bank, by rank
        self._before = 1  # the bank that was open before
        self._in_pieces = False  # whether something sent to the open bank is made piece by piece
        self._pending = 0

    def place(self, geometry: Geometry, in_pieces: bool = False) -> tuple[int, tuple[int, ...]]:
        """Returns the bank and each rank's offset in it for the results of one exchange that starts now.

        `in_pieces` is for one that is made piece by piece, and the same on every rank.
        """
        if self._pending == 0:
            taken = {self.bank, self._before} if self._in_pieces else {self.bank}
            self._before, self.bank = self.bank, min({0, 1, 2} - taken)
            self.used = [0] * len(self.used)
            self._in_pieces = False
        self._in_pieces |= in_pieces
        self._pending += 1
        offsets = tuple(self.used)
        for rank, offset in enumerate(offsets):
            size = geometry.result_bytes(rank)
            self.used[rank] = offset + -(-size // self.ALIGNMENT) * self.ALIGNMENT
        return self.bank, offsets

    def waited(self) -> None:
        """Notes that the result of one exchange was waited for."""
        self._pending -= 1
