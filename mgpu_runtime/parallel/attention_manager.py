"""Attention over a sequence that is spread over ranks, by trading tokens for heads around it.

Letters: B batch, T real video tokens, P padded video tokens (a multiple of W), W world size, H heads, h = H/W, D
channels of a head, A audio tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ..exchange import exchange_for
from ..models.attention import attend_locally
from .limits import check_heads, check_tokens


class AttentionManager:
    """Holds the exchange of one transformer and what it needs to know of the sequence in flight.

    Raises ValueError when the heads cannot be dealt evenly to the ranks.
    """

    def __init__(
        self,
        max_tokens: int,
        num_heads: int,
        head_dim: int,
        tensor_dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        copy_out_: bool = False,
    ) -> None:
        self.exchange = exchange_for(group)
        check_heads(num_heads, self.exchange.world_size)
        if max_tokens < 1:
            raise ValueError(f"sp_max_tokens must be at least 1, got {max_tokens}")
        self.max_tokens = max_tokens
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.tensor_dtype = tensor_dtype
        # transports that answer with a view of their own buffer copy it when set; torch.distributed never does
        self.copy_out = copy_out_
        self._num_tokens: int | None = None

    @property
    def world_size(self) -> int:
        return self.exchange.world_size

    @contextmanager
    def sequence(self, num_tokens: int) -> Iterator[None]:
        """Announces the real token count of the forward inside; the attentions drop what lies behind it."""
        check_tokens(num_tokens, self.max_tokens)
        self._num_tokens = num_tokens
        try:
            yield
        finally:
            self._num_tokens = None

    def attend_video(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """Attends video to video: (B, P/W, H, D) each to (B, P/W, H, D); bias covers the real tokens, (B, 1, T, T).

        Padded rows sit at the end of the whole sequence, so they are cut off before attention instead of masked in it:
        exact for every attention backend, and real rows see the same numbers as in one process.
        """
        local = torch.cat([q, k, v])  # one exchange, one synchronisation
        q, k, v = self._real(self.exchange.send_recv_heads(local)).chunk(3)
        out = attend_locally(q, k, v, bias)
        return self.exchange.gather_heads(self._padded(out, local.shape[1] * self.world_size))

    def attend_audio_to_video(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """Attends replicated audio queries (B, A, H, D) to spread video keys (B, P/W, H, D); returns (B, A, H, D).

        Each rank serves its share of the heads over the whole video, then the heads are joined: the same sums as in one
        process, where merging partial softmaxes would only be close.
        """
        k, v = self._real(self.exchange.send_recv_heads(torch.cat([k, v]))).chunk(2)
        own = q.unflatten(2, (self.world_size, -1))[:, :, self.exchange.rank]
        out = attend_locally(own, k, v, bias)
        return self.exchange.allgather(out.transpose(1, 2)).transpose(1, 2)

    def _real(self, x: Tensor) -> Tensor:
        assert self._num_tokens is not None, "attention outside of AttentionManager.sequence()"
        return x[:, : self._num_tokens]

    def _padded(self, x: Tensor, num_rows: int) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, num_rows - x.shape[1]))
