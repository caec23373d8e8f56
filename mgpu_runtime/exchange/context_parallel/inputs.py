"""Sizes that divide over a group: padded sequences, model inputs cut and joined, frame counts."""

import torch
from torch import Tensor

from .group import ContextParallel

Lengths = dict[str, int | None]  # video_original_length, audio_original_length


def padded(cp: ContextParallel, x: Tensor, dim: int = 1) -> tuple[Tensor, int]:
    """Appends zeros along a dim until it divides over the group; returns them with the length before."""
    length = x.shape[dim]
    missing = -length % cp.size
    if missing == 0:
        return x, length
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim), length


def prepare(
    cp: ContextParallel,
    video_latent: Tensor,
    audio_latent: Tensor | None = None,
    video_positions: Tensor | None = None,
    audio_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Lengths]:
    """Pads and cuts latents (B, T, ...) and positions (B, axes, T, ...); see `prepare_cp_inputs`."""
    _check_positions("video", video_latent, video_positions)
    _check_positions("audio", audio_latent, audio_positions)

    def cut(x: Tensor | None, dim: int) -> Tensor | None:
        return None if x is None else cp.scatter(padded(cp, x, dim)[0], dim)

    lengths: Lengths = {
        "video_original_length": video_latent.shape[1],
        "audio_original_length": None if audio_latent is None else audio_latent.shape[1],
    }
    return cut(video_latent, 1), cut(audio_latent, 1), cut(video_positions, 2), cut(audio_positions, 2), lengths


def joined(
    cp: ContextParallel, video_output: Tensor, audio_output: Tensor | None = None, metadata: Lengths | None = None
) -> tuple[Tensor, Tensor | None]:
    """Joins outputs (B, t, ...) for the loss and drops the padding; see `gather_cp_outputs`."""
    metadata = metadata or {}

    def join(x: Tensor | None, length: int | None) -> Tensor | None:
        whole = None if x is None else cp.gather_for_loss(x)
        return whole if whole is None or length is None else whole.narrow(1, 0, length)

    return (
        join(video_output, metadata.get("video_original_length")),
        join(audio_output, metadata.get("audio_original_length")),
    )


def compute_cp_divisible_frames(frames: int, cp_size: int, temporal_stride: int = 8) -> int:
    """Returns a frame count whose latent frames divide over a group.

    Rounds down to `temporal_stride` n + 1, then up until the n + 1 latent frames are a multiple of `cp_size`. Raises
    ValueError for numbers below 1.
    """
    for name, value in (("frames", frames), ("cp_size", cp_size), ("temporal_stride", temporal_stride)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    latent_frames = (frames - 1) // temporal_stride + 1
    latent_frames += -latent_frames % cp_size
    return (latent_frames - 1) * temporal_stride + 1


def _check_positions(name: str, latent: Tensor | None, positions: Tensor | None) -> None:
    if positions is None:
        return
    if latent is None:
        raise ValueError(f"{name}_positions were given without {name}_latent")
    if positions.shape[2] != latent.shape[1]:
        raise ValueError(
            f"{name}_positions are for {positions.shape[2]} tokens (dim 2), {name}_latent has {latent.shape[1]} (dim 1)"
        )
