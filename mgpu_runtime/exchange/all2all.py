"""The interface every transport of the exchange keeps, and the choice between transports.

Letters: B batch, T tokens of the whole sequence, W world size, H heads, D channels of a head, C channels of a token.
"""

from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from .torch_distributed import TorchAll2All


class All2All(Protocol):
    """Moves tensors between the ranks of one group, byte-exact; `gather_heads(send_recv_heads(x)) == x`.

    Every rank of the group calls the same method with the same shape at the same time. T and H must be multiples of W.
    """

    world_size: int
    rank: int

    def send_recv_heads(self, x: Tensor) -> Tensor:
        """Trades tokens for heads: (B, T/W, H, D) to (B, T, H/W, D); rank r keeps heads r*H/W to (r+1)*H/W."""

    def gather_heads(self, x: Tensor) -> Tensor:
        """Trades heads for tokens, the way back: (B, T, H/W, D) to (B, T/W, H, D)."""

    def allgather(self, x: Tensor) -> Tensor:
        """Joins the ranks' parts along dim 1, in rank order: (B, T/W, ...) to (B, T, ...)."""


def exchange_for(group: dist.ProcessGroup | None) -> All2All:
    """Returns the fastest exchange that works for a group; None stands for a single process."""
    return TorchAll2All(group)
