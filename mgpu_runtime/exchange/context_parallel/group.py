"""One context-parallel group: its exchange, and what training code does with it, with gradients.

Letters: B batch, S tokens of the whole sequence, s = S/W tokens of one rank, W size of the group, H heads of all ranks,
h heads of one rank, D channels of a head.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..all2all import All2All
from ..choice import exchange_for
from ..errors import ExchangeError
from ..layout import deal

# (q, k, v, heads, mask) -> out, all tensors (B, S, heads * D)
AttentionFn = Callable[[Tensor, Tensor, Tensor, int, Tensor | None], Tensor]

TIMEOUT = 600.0  # seconds; a training step may wait for a peer that saves, evaluates or compiles
WARMUP_TIMEOUT = 1800.0


class ContextParallel:
    """Consecutive ranks that hold one sequence together. Every rank of the group calls the same methods in one order.

    A group of one does everything in place and exchanges nothing. Gradients of parameters that every rank of the group
    holds are partial, each for its own tokens: their sum over the group is the unsharded gradient.
    """

    def __init__(self, exchange: All2All, group: dist.ProcessGroup | None = None) -> None:
        self.exchange = exchange
        self.group = group
        ops.enlist(exchange)

    @classmethod
    def open(
        cls, cp_size: int, *, timeout: float = TIMEOUT, transport: str = "auto", device: torch.device | None = None
    ) -> "ContextParallel":
        """Cuts the ranks of the world into groups of `cp_size` in a row and opens the own one. Every rank calls it.

        Raises ValueError where `cp_size` does not fit the world size.
        """
        if cp_size < 1:
            raise ValueError(f"cp_size must be at least 1, got {cp_size}")
        if cp_size == 1:
            return cls(exchange_for(None))
        if not dist.is_initialized():
            raise RuntimeError(
                f"cp_size {cp_size} needs torch.distributed: start with torchrun and call init_process_group first"
            )
        world_size = dist.get_world_size()
        if world_size % cp_size:
            raise ValueError(
                f"{world_size} ranks cannot be cut into groups of cp_size {cp_size}: start a multiple of {cp_size} "
                f"ranks, or choose a cp_size that divides {world_size}"
            )
        own = None
        for first in range(0, world_size, cp_size):  # every rank takes part in making every group
            group = dist.new_group(range(first, first + cp_size))
            if first <= dist.get_rank() < first + cp_size:
                own = group
        try:
            return cls(exchange_for(own, transport=transport, device=device, timeout=timeout), own)
        except (ValueError, ExchangeError):
            dist.destroy_process_group(own)
            raise

    @property
    def rank(self) -> int:
        """This rank's place in its group."""
        return self.exchange.rank

    @property
    def size(self) -> int:
        """W."""
        return self.exchange.world_size

    def close(self) -> None:
        """Gives back the exchange and the group; gradients that still need them raise ExchangeError."""
        self.exchange.close()
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def warm_up(self, hidden_dim: int, num_heads: int, seq_len: int, device: torch.device | str | None = None) -> None:
        """Runs every kind of exchange and its gradient once, with a long timeout, so that no step pays for the first.

        `seq_len` is S. `device` is by default the one the group's backend serves.
        """
        if self.size == 1:
            return
        if device is None:
            on_cuda = "nccl" in dist.get_backend(self.group)
            device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        rows = -(-seq_len // self.size)
        x = torch.zeros(1, rows, num_heads * max(1, hidden_dim // num_heads), device=device, requires_grad=True)
        with self.exchange.patience(WARMUP_TIMEOUT), torch.enable_grad():
            out = self.attend(x, x, x, num_heads, lambda q, k, v, heads, mask: q + k + v)
            traded = self.all_to_all(x, scatter_dim=2, gather_dim=1)
            out = out + self.all_to_all(traded, 1, 2, gather_sizes=deal(x.shape[2], self.size))
            (self.gather(out).sum() + self.gather_for_loss(out).sum()).backward()

    def all_to_all(
        self, x: Tensor, scatter_dim: int, gather_dim: int, gather_sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Cuts one dim over the ranks and joins another that was cut before. The gradient goes the way back.

        The scattered dim is dealt by `layout.deal`: where it does not divide, the first ranks get one more. Of the
        gathered dim all ranks hold as much, or what `gather_sizes` says for each. Raises ValueError for dims that do
        not fit.
        """
        scatter, gather = _dim(x, scatter_dim), _dim(x, gather_dim)
        if scatter == gather:
            raise ValueError(f"scatter_dim and gather_dim must differ, got {scatter_dim} and {gather_dim}")
        if self.size == 1:
            return x
        sizes = (x.shape[gather],) * self.size if gather_sizes is None else tuple(gather_sizes)
        # rows of the wire run along the later dim where they may, so that most inputs need no copy
        by_heads = gather < scatter or sizes != deal(sum(sizes), self.size)
        pair = (gather, scatter) if by_heads else (scatter, gather)
        first = min(pair)
        order = (*range(first), *pair, *(dim for dim in range(first, x.dim()) if dim not in pair))
        moved = x.permute(order)
        lead, trail = moved.shape[:first], moved.shape[first + 2 :]
        wire = moved.reshape(lead.numel(), *moved.shape[first : first + 2], trail.numel())
        if by_heads:
            out = ops.send_recv_heads(self.exchange, wire, sizes)
        else:
            out = ops.gather_heads(self.exchange, wire, deal(x.shape[scatter], self.size), sum(sizes))
        back = sorted(range(x.dim()), key=order.__getitem__)
        return out.reshape(*lead, *out.shape[1:3], *trail).permute(back)

    def scatter(self, x: Tensor, dim: int = 1) -> Tensor:
        """Returns the own slice of what every rank holds whole; its gradient lands there, with zeros elsewhere.

        Raises ValueError where the dim does not divide over the ranks.
        """
        dim = _dim(x, dim)
        rows = x.shape[dim] // self.size
        if x.shape[dim] % self.size:
            raise ValueError(
                f"{x.shape[dim]} rows of dim {dim} do not divide over {self.size} ranks: use pad_to_cp_divisible first"
            )
        return x.narrow(dim, self.rank * rows, rows).contiguous()

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """Joins the ranks' slices; every rank must hold as much. For losses that are summed over the ranks.

        The true adjoint: each rank gets the sum over ranks of the gradients of its slice.
        """
        if self.size == 1:
            return x
        dim = _dim(x, dim)
        lead = x.shape[:dim]
        whole = ops.allgather(self.exchange, x.reshape(lead.numel(), *x.shape[dim:]))
        return whole.reshape(*lead, *whole.shape[1:])

    def gather_for_loss(self, x: Tensor, dim: int = 1) -> Tensor:
        """Joins the ranks' slices for a loss that every rank computes alike: the gradient is cut, not summed."""
        return _GatherForLoss.apply(x, self, _dim(x, dim)) if self.size > 1 else x

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, heads: int, attention_fn: AttentionFn, mask: Tensor | None = None
    ) -> Tensor:
        """Attends over the whole sequence with the own heads: (B, s, H * D) each to (B, s, H * D).

        `attention_fn(q, k, v, heads, mask)` gets (B, S, h * D) and h, and returns (B, S, h * D). A mask whose last dim
        is the local number of keys is gathered along it; any other is passed whole. It must broadcast over heads.
        Heads that do not divide are dealt by `layout.deal`. Raises ValueError for fewer heads than ranks.
        """
        if self.size == 1:
            return attention_fn(q, k, v, heads, mask)
        if heads < self.size:
            raise ValueError(f"{heads} attention heads cannot be shared by {self.size} ranks: use cp_size <= {heads}")
        if q.shape[-1] % heads:
            raise ValueError(f"{q.shape[-1]} channels do not divide into {heads} heads")
        if mask is not None and mask.shape[-1] == k.shape[1]:
            mask = self.gather(mask, -1)
        own = deal(heads, self.size)[self.rank]
        split = [x.unflatten(2, (heads, -1)) for x in (q, k, v)]
        if q.shape[1] == k.shape[1]:
            traded = ops.send_recv_heads_many(self.exchange, split)
        else:
            traded = (ops.send_recv_heads(self.exchange, split[0]), *ops.send_recv_heads_many(self.exchange, split[1:]))
        out = attention_fn(*(x.flatten(2) for x in traded), own, mask)
        return ops.gather_heads(self.exchange, out.unflatten(2, (own, -1)), num_heads=heads).flatten(2)


class _GatherForLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cp: ContextParallel, dim: int) -> Tensor:
        ctx.dim, ctx.rows, ctx.first = dim, x.shape[dim], cp.rank * x.shape[dim]
        return cp.gather(x, dim)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        return gradient.narrow(ctx.dim, ctx.first, ctx.rows), None, None


def _dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim {dim} is none of a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()
