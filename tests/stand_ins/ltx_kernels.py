"""Stands in for the package `ltx_kernels`: its class, its limits and its single buffer, over torch.distributed."""

import torch
import torch.distributed as dist
from torch import Tensor


class All2All:
    made: list["All2All"] = []

    def __init__(
        self,
        rank: int,
        world_size: int,
        seqlen: int,
        hidden_dim: int,
        num_sms: int,
        tensor_dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        assert num_sms > 0 and tensor_dtype in (torch.bfloat16, torch.float8_e4m3fn)
        self.rank, self.world_size, self.group = rank, world_size, group
        self.timeout_seconds = timeout_seconds
        self.calls = 0
        self.destroyed = False
        self._buffer = torch.zeros(seqlen * hidden_dim, dtype=torch.uint8).repeat_interleave(tensor_dtype.itemsize)
        self._dtype = tensor_dtype
        All2All.made.append(self)

    def set_timeout_seconds(self, seconds: float) -> None:
        self.timeout_seconds = seconds

    def send_recv_heads(self, x: Tensor, *, copy_out: bool = False) -> Tensor:
        heads = x.shape[2] // self.world_size
        mine = slice(self.rank * heads, (self.rank + 1) * heads)
        return self._give(torch.cat([whole[:, :, mine] for whole in self._gather(x)], dim=1), copy_out)

    def gather_heads(self, x: Tensor, *, copy_out: bool = False) -> Tensor:
        tokens = x.shape[1] // self.world_size
        mine = slice(self.rank * tokens, (self.rank + 1) * tokens)
        return self._give(torch.cat([whole[:, mine] for whole in self._gather(x)], dim=2), copy_out)

    def allgather(self, x: Tensor, *, copy_out: bool = False) -> Tensor:
        return self._give(torch.cat(self._gather(x), dim=1), copy_out)

    def destroy(self) -> None:
        self.destroyed = True

    def _gather(self, x: Tensor) -> list[Tensor]:
        assert x.dim() == 4 and x.is_contiguous() and x.dtype == self._dtype and not self.destroyed
        sent = x.flatten().view(torch.uint8)
        parts = [torch.empty_like(sent) for _ in range(self.world_size)]
        dist.all_gather(parts, sent, group=self.group)
        return [part.view(x.dtype).view(x.shape) for part in parts]

    def _give(self, result: Tensor, copy_out: bool) -> Tensor:
        self.calls += 1
        place = self._buffer[: result.numel() * result.element_size()]
        assert place.numel() == result.numel() * result.element_size(), "more than the instance was made for"
        place.copy_(result.flatten().view(torch.uint8))
        view = place.view(result.dtype).view(result.shape)
        return view.clone() if copy_out else view
