"""Sequence parallelism: the video tokens spread over the ranks, the result that of one process.

Letters: B batch, T real video tokens, P padded video tokens, W world size.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..models.loading import WeightTracker
from ..models.streams import StreamInput
from ..models.transformer import LTXTransformer
from ..models.transformer_builder import TransformerBuilder
from ..weights.registry import StateDictRegistry
from .attention_manager import AttentionManager

# Vectorised CPU loops treat the last elements of a buffer with scalar code that may round differently. Shards of whole
# multiples of this many rows keep real rows out of that tail, whatever the world size.
CPU_ROWS = 32


class SequenceParallelModelWrapper(nn.Module):
    """Runs a transformer on this rank's share of the video tokens; audio and text are replicated.

    Same call as LTXTransformer.predict, whole sequences in, whole sequences out, on every rank.
    """

    def __init__(self, model: LTXTransformer, attn_mgr: AttentionManager) -> None:
        super().__init__()
        self.model = model
        self.attn_mgr = attn_mgr
        model.use_attention(video_self=attn_mgr.attend_video, video_to_audio=attn_mgr.attend_audio_to_video)

    def predict(
        self, video: StreamInput | None, audio: StreamInput | None, perturbation: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the velocities of the whole streams, (B, T, channels); None for an absent stream.

        Raises ValueError when the video has more tokens than `max_tokens`.
        """
        if video is None:
            return self.model.predict(None, audio, perturbation)
        with self.attn_mgr.sequence(video.num_tokens):
            velocity, audio_velocity = self.model.predict(self._share(video), audio, perturbation)
        whole = self.attn_mgr.exchange.allgather(velocity)
        return whole[:, : video.num_tokens], audio_velocity

    def _share(self, video: StreamInput) -> StreamInput:
        """Cuts this rank's rows out of the padded stream; the attention mask stays whole, attention sees all tokens."""
        rank, world = self.attn_mgr.exchange.rank, self.attn_mgr.world_size
        rows = _rows_per_rank(video.num_tokens, world, video.latent.device)
        start = rank * rows

        def cut(x: Tensor, dim: int) -> Tensor:
            held = x.narrow(dim, min(start, x.shape[dim]), max(0, min(rows, x.shape[dim] - start)))
            missing = [0, 0] * (x.dim() - dim - 1) + [0, rows - held.shape[dim]]
            return nn.functional.pad(held, missing)

        shared_timestep = video.timesteps.shape[1] == 1
        return replace(
            video,
            latent=cut(video.latent, 1),
            timesteps=video.timesteps if shared_timestep else cut(video.timesteps, 1),
            positions=cut(video.positions, 2),
            keyframes_mask=None if video.keyframes_mask is None else cut(video.keyframes_mask, 1),
        )


def _rows_per_rank(num_tokens: int, world_size: int, device: torch.device) -> int:
    rows = -(-num_tokens // world_size)
    return rows if device.type != "cpu" else -(-rows // CPU_ROWS) * CPU_ROWS


class SequenceParallelBuilder:
    """Builds a sequence-parallel transformer around an inner builder, on each rank of the manager's group.

    `registry` and `tracker`, where given, take the place of the inner builder's.
    """

    def __init__(
        self,
        inner: TransformerBuilder,
        attn_mgr: AttentionManager,
        registry: StateDictRegistry | None = None,
        tracker: WeightTracker | None = None,
    ) -> None:
        self.inner = inner if registry is None and tracker is None else inner.with_sources(registry, tracker)
        self.attn_mgr = attn_mgr

    def build(self, device: torch.device, dtype: torch.dtype) -> SequenceParallelModelWrapper:
        """Returns the wrapped model on `device` in `dtype`."""
        return SequenceParallelModelWrapper(self.inner.build(device, dtype), self.attn_mgr)
