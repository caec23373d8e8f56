"""The exchange over torch.distributed: NCCL on CUDA, gloo on the CPU, and nothing to move for one rank.

Letters: B batch, T tokens of the whole sequence, t tokens of one rank, W world size, H heads, h heads of one rank, D
channels of a head.
"""

import torch
import torch.distributed as dist
from torch import Tensor


class TorchAll2All:
    """Exchanges over a process group by its single-tensor all-to-all, or by gather and slice where it has none."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._has_all_to_all: bool | None = None

    def send_recv_heads(self, x: Tensor) -> Tensor:
        """Trades tokens for heads: (B, T/W, H, D) to (B, T, H/W, D). Raises ValueError when W does not divide H."""
        world = self.world_size
        if world == 1:
            return x
        _check_divides(world, x.shape[2], "heads")
        parts_WBthD = x.unflatten(2, (world, -1)).movedim(2, 0)  # dim 0: the rank that will own these heads
        return self._trade(parts_WBthD).movedim(0, 1).flatten(1, 2)  # dim 0 had become the rank the tokens came from

    def gather_heads(self, x: Tensor) -> Tensor:
        """Trades heads for tokens: (B, T, H/W, D) to (B, T/W, H, D). Raises ValueError when W does not divide T."""
        world = self.world_size
        if world == 1:
            return x
        _check_divides(world, x.shape[1], "tokens")
        parts_WBthD = x.unflatten(1, (world, -1)).movedim(1, 0)
        return self._trade(parts_WBthD).movedim(0, 2).flatten(2, 3)

    def allgather(self, x: Tensor) -> Tensor:
        """Joins the ranks' parts along dim 1: (B, T/W, ...) to (B, T, ...)."""
        if self.world_size == 1:
            return x
        return self._collect(x).movedim(0, 1).flatten(1, 2)

    def _trade(self, parts: Tensor) -> Tensor:
        """Sends parts[r] to rank r; returns the stack of what each rank sent here. Dim 0 is the rank."""
        if self._has_all_to_all is None:
            self._has_all_to_all = self._probe()
        if not self._has_all_to_all:
            return self._collect(parts)[:, self.rank]
        # a strided view would be sent as if it were contiguous, with wrong data and no error
        sent = _as_bytes(parts.contiguous())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.flatten().view(parts.dtype).reshape(parts.shape)

    def _collect(self, x: Tensor) -> Tensor:
        sent = _as_bytes(x.contiguous())
        received = sent.new_empty((self.world_size, *sent.shape))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.14
        gather(received.flatten(0, 1), sent, group=self.group)
        return received.flatten().view(x.dtype).reshape(self.world_size, *x.shape)

    def _probe(self) -> bool:
        """Tells, the same on every rank, whether the backend has a single-tensor all-to-all; gloo by its version."""
        if dist.get_backend(self.group) != "gloo":
            return True
        sent = torch.full((self.world_size,), self.rank, dtype=torch.uint8)
        received = torch.empty_like(sent)
        try:
            dist.all_to_all_single(received, sent, group=self.group)
        except RuntimeError as error:
            if "support" not in str(error):  # a peer that is gone must not be taken for a missing feature
                raise
            return False
        return received.tolist() == list(range(self.world_size))


def _as_bytes(x: Tensor) -> Tensor:
    """Views a contiguous tensor as (dim 0, bytes): a collective then takes every dtype, also those it cannot add."""
    if x.numel() == 0:
        return x.new_empty(x.shape[0], 0, dtype=torch.uint8)
    return x.view(x.shape[0], -1).view(torch.uint8)


def _check_divides(world_size: int, count: int, what: str) -> None:
    if count % world_size:
        raise ValueError(f"{count} {what} cannot be split over {world_size} ranks: {count} % {world_size} is not 0")
