"""LTX-2's dual-stream transformer: the layers of `diffusers`, driven by a forward pass of our own.

`diffusers`' forward cannot express four things LTX does: own timesteps for a2v/v2a scale and shift beside the other
stream's sigma for the gate, soft self-attention masks, spatio-temporal guidance per stream, a run without one stream.

Letters: B batch, T tokens, S text tokens, D width of a stream. "a2v" is video attending to audio, "v2a" the reverse.
"""

from collections.abc import Sequence

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2Attention, LTX2VideoTransformer3DModel
from torch import Tensor

from .attention import LOCAL, Attend, LTXAttentionProcessor
from .block import BlockStream, run_block
from .stored import compute_dtype
from .streams import NUM_PERTURBATION_KINDS, Keep, StreamInput, log_bias


class LTXTransformer(LTX2VideoTransformer3DModel):
    """Predicts velocities for video and audio; same constructor, layers and keys as the `diffusers` class."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.use_attention()

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in, whatever its weights are stored in."""
        return compute_dtype(self)

    def use_attention(self, *, video_self: Attend = LOCAL, video_to_audio: Attend = LOCAL) -> None:
        """Chooses who attends where video tokens are keys; all other attentions stay in this process."""
        for module in self.modules():
            if isinstance(module, LTX2Attention):
                module.set_processor(LTXAttentionProcessor())
        for block in self.transformer_blocks:
            block.attn1.set_processor(LTXAttentionProcessor(video_self))
            block.video_to_audio_attn.set_processor(LTXAttentionProcessor(video_to_audio))

    def predict(
        self, video: StreamInput | None, audio: StreamInput | None, perturbation: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the velocity of each stream, (B, T, channels) in the weights' dtype; None for an absent stream.

        `perturbation` is (4, num_layers, B), 1 keep and 0 perturb, rows as in `streams`: video self-attention, audio
        self-attention, a2v, v2a. It is read on the host: keep it on the CPU.
        """
        if video is None and audio is None:
            raise ValueError("nothing to predict: give a video stream, an audio stream, or both")
        keeps = self._keeps(perturbation)
        video_state = None if video is None else self._open_video(video, audio)
        audio_state = None if audio is None else self._open_audio(audio, video)
        unfinished = None
        for block, keep in zip(self.transformer_blocks, keeps, strict=True):
            unfinished = run_block(block, video_state, audio_state, keep, unfinished)
        if unfinished is not None:
            unfinished.finish()
        return self._close_video(video_state), self._close_audio(audio_state)

    def _keeps(self, perturbation: Tensor | None) -> Sequence[Sequence[Keep | None]]:
        num_layers = len(self.transformer_blocks)
        if perturbation is None:
            return [(None,) * NUM_PERTURBATION_KINDS] * num_layers
        if perturbation.shape[:2] != (NUM_PERTURBATION_KINDS, num_layers):
            raise ValueError(
                f"perturbation must be ({NUM_PERTURBATION_KINDS}, {num_layers}, batch), got {tuple(perturbation.shape)}"
            )
        by_layer = (perturbation > 0).transpose(0, 1).tolist()
        rows = {tuple(row) for layer in by_layer for row in layer}
        keeps = {row: None if all(row) else Keep(row, self.device) for row in rows}
        return [[keeps[tuple(row)] for row in layer] for layer in by_layer]

    def _open_video(self, video: StreamInput, audio: StreamInput | None) -> BlockStream:
        hidden = self.proj_in(video.latent.to(self.dtype))
        if self.config.use_keyframes_abs_pos_embedding and video.keyframes_mask is not None:
            hidden = hidden + (video.keyframes_mask > 0).to(hidden.dtype) * self.keyframes_abs_pos_embedding
        return self._open(
            video,
            audio,
            hidden,
            rotary=self.rope(video.positions),
            # a2v and v2a turn with time only: the first axis
            cross_rotary=self.cross_attn_rope(video.positions[:, :1]),
            time_embed=self.time_embed,
            prompt_embed=getattr(self, "prompt_adaln", None),
            cross_embed=self.av_cross_attn_video_scale_shift,
            gate_embed=self.av_cross_attn_video_a2v_gate,
            caption_projection=getattr(self, "caption_projection", None),
        )

    def _open_audio(self, audio: StreamInput, video: StreamInput | None) -> BlockStream:
        return self._open(
            audio,
            video,
            self.audio_proj_in(audio.latent.to(self.dtype)),
            rotary=self.audio_rope(audio.positions),
            cross_rotary=self.cross_attn_audio_rope(audio.positions[:, :1]),
            time_embed=self.audio_time_embed,
            prompt_embed=getattr(self, "audio_prompt_adaln", None),
            cross_embed=self.av_cross_attn_audio_scale_shift,
            gate_embed=self.av_cross_attn_audio_v2a_gate,
            caption_projection=getattr(self, "audio_caption_projection", None),
        )

    def _open(
        self, own: StreamInput, other: StreamInput | None, hidden: Tensor, *, rotary, cross_rotary,
        time_embed, prompt_embed, cross_embed, gate_embed, caption_projection,
    ) -> BlockStream:  # fmt: skip
        """Builds what all blocks share of one stream: modulations, rotary tables, projected text, masks."""
        scale = self.config.timestep_scale_multiplier
        gate_scale = self.config.cross_attn_timestep_scale_multiplier
        modulation, embedded = _modulation(time_embed, own.timesteps * scale, hidden.dtype)
        cross = gate = None
        if other is not None:
            cross, _ = _modulation(cross_embed, own.timesteps * scale, hidden.dtype)
            # the gate listens to the other stream's noise level; scale and shift listen to the own tokens'
            gate, _ = _modulation(gate_embed, other.sigma[:, None] * gate_scale, hidden.dtype)
        prompt = None
        if prompt_embed is not None:
            prompt, _ = _modulation(prompt_embed, own.sigma[:, None] * scale, hidden.dtype)
        context = own.context.to(hidden.dtype)
        return BlockStream(
            hidden=hidden,
            context=context if caption_projection is None else caption_projection(context),
            modulation=modulation,
            embedded_timestep=embedded,
            cross_modulation=cross,
            cross_gate=gate,
            prompt_modulation=prompt,
            rotary=rotary,
            cross_rotary=cross_rotary,
            self_bias=None if own.attention_mask is None else log_bias(own.attention_mask, hidden.dtype)[:, None],
            context_bias=None if own.context_mask is None else log_bias(own.context_mask, hidden.dtype)[:, None, None],
        )

    def _close_video(self, state: BlockStream | None) -> Tensor | None:
        return state and _close(state, self.scale_shift_table, self.norm_out, self.proj_out)

    def _close_audio(self, state: BlockStream | None) -> Tensor | None:
        return state and _close(state, self.audio_scale_shift_table, self.audio_norm_out, self.audio_proj_out)


def _close(state: BlockStream, table: Tensor, norm: torch.nn.Module, projection: torch.nn.Module) -> Tensor:
    """Turns the last hidden state into a velocity, (B, T, channels)."""
    shift, scale = (table[None, None] + state.embedded_timestep[:, :, None]).unbind(2)
    return projection(norm(state.hidden) * (1 + scale) + shift)


def _modulation(embed: torch.nn.Module, timesteps_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Embeds scaled timesteps: returns (B, T, rows * D) modulation and the (B, T, D) embedding it came from."""
    batch = timesteps_BT.shape[0]
    modulation, embedded = embed(timesteps_BT.flatten(), batch_size=batch, hidden_dtype=dtype)
    return modulation.unflatten(0, (batch, -1)), embedded.unflatten(0, (batch, -1))
