"""Sequence parallelism: the video tokens spread over the ranks, the result that of one process.

Letters: B batch, T real video tokens.
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
from .limits import check_heads
from .shares import Shares


class SequenceParallelModelWrapper(nn.Module):
    """Runs a transformer on this rank's share of the video tokens; audio and text are replicated.

    Same call as LTXTransformer.predict, whole sequences in, whole sequences out, on every rank. Raises ValueError for a
    model with fewer heads, of video or of audio, than there are ranks.
    """

    def __init__(self, model: LTXTransformer, attn_mgr: AttentionManager) -> None:
        super().__init__()
        for num_heads in (model.config.num_attention_heads, model.config.audio_num_attention_heads):
            check_heads(num_heads, attn_mgr.world_size)
        self.model = model
        self.attn_mgr = attn_mgr
        model.use_attention(video_self=attn_mgr.video_self, video_to_audio=attn_mgr.video_to_audio)

    def predict(
        self, video: StreamInput | None, audio: StreamInput | None, perturbation: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the velocities of the whole streams, (B, T, channels); None for an absent stream.

        Raises ValueError when the video has more tokens than `max_tokens`.
        """
        if video is None:
            return self.model.predict(None, audio, perturbation)
        shape = (video.latent.shape[0], -1 if audio is None else audio.num_tokens)
        with self.attn_mgr.sequence(video.num_tokens, video.latent.device, shape) as shares:
            velocity, audio_velocity = self.model.predict(self._share(video, shares), audio, perturbation)
            return self.attn_mgr.join_tokens(velocity), audio_velocity

    def _share(self, video: StreamInput, shares: Shares) -> StreamInput:
        """Cuts this rank's rows out of the stream; the attention mask stays whole, attention sees all tokens."""
        rank = self.attn_mgr.exchange.rank
        first, rows, real = shares.first[rank], shares.rows[rank], shares.tokens[rank]

        def cut(x: Tensor, dim: int) -> Tensor:
            held = x.narrow(dim, min(first, x.shape[dim]), real)
            return nn.functional.pad(held, [0, 0] * (x.dim() - dim - 1) + [0, rows - real])

        shared_timestep = video.timesteps.shape[1] == 1
        return replace(
            video,
            latent=cut(video.latent, 1),
            timesteps=video.timesteps if shared_timestep else cut(video.timesteps, 1),
            positions=cut(video.positions, 2),
            keyframes_mask=None if video.keyframes_mask is None else cut(video.keyframes_mask, 1),
        )


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
