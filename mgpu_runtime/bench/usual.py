"""Context parallelism as it is usually written over torch.distributed: chunk, list all_to_all, cat.

Letters: B batch, T tokens, t = T/W tokens of a rank, H heads, h = H/W heads of a rank, D channels of a head, W world
size.
"""

import torch
import torch.distributed as dist
from torch import Tensor


class UsualExchange:
    """Trades tokens for heads and back; tokens and heads must divide over the ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._swap = self._list_form if self._has_list_form() else self._pairs

    def send_recv_heads(self, x: Tensor) -> Tensor:
        """(B, t, H, D) to (B, T, h, D)."""
        return torch.cat(self._trade(x, dim=2), dim=1)

    def gather_heads(self, x: Tensor) -> Tensor:
        """(B, T, h, D) to (B, t, H, D)."""
        return torch.cat(self._trade(x, dim=1), dim=2)

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Joins the ranks' parts along a dim."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(parts, x, group=self.group)
        return torch.cat(parts, dim=dim)

    def _trade(self, x: Tensor, dim: int) -> list[Tensor]:
        sent = [part.contiguous() for part in x.chunk(self.world_size, dim=dim)]
        received = [torch.empty_like(part) for part in sent]
        self._swap(received, sent)
        return received

    def _list_form(self, received: list[Tensor], sent: list[Tensor]) -> None:
        dist.all_to_all(received, sent, group=self.group)

    def _pairs(self, received: list[Tensor], sent: list[Tensor]) -> None:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        sends = [dist.isend(sent[rank], group=self.group, group_dst=rank) for rank in others]
        receipts = [dist.irecv(received[rank], group=self.group, group_src=rank) for rank in others]
        received[self.rank].copy_(sent[self.rank])
        for work in (*sends, *receipts):
            work.wait()

    def _has_list_form(self) -> bool:
        """Tries it: gloo has it from some version of torch on."""
        sent = [torch.zeros(1) for _ in range(self.world_size)]
        try:
            dist.all_to_all([torch.empty_like(part) for part in sent], sent, group=self.group)
        except (RuntimeError, ValueError):
            return False
        return True
