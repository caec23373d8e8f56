"""Sizes of a clip: what a person asks for in pixels and frames, and the latents that follow from it."""

import math
from dataclasses import dataclass
from typing import NamedTuple

AUDIO_LATENTS_PER_SECOND = 25.0  # 16 kHz / hop 160 / 4 mel frames a latent


class ScaleFactors(NamedTuple):
    """Pixel frames, rows and columns per latent cell, as the video autoencoder's configuration gives them."""

    frames: int
    height: int
    width: int


LTX_SCALE = ScaleFactors(frames=8, height=32, width=32)  # of all published models


@dataclass(frozen=True)
class LatentSize:
    """A clip's size in latent cells (never pixels), and its number of audio latent frames."""

    frames: int
    height: int
    width: int
    audio_frames: int

    @property
    def grid(self) -> tuple[int, int, int]:
        """The video latent's (F, H, W)."""
        return self.frames, self.height, self.width

    @property
    def video_tokens(self) -> int:
        """The number of video tokens: one per latent cell."""
        return self.frames * self.height * self.width


def latent_size(
    frames: int,
    height: int,
    width: int,
    fps: float,
    *,
    scale: ScaleFactors = LTX_SCALE,
    spatial_upscale: float = 1,
    max_tokens: int | None = None,
) -> LatentSize:
    """Gives the latent size of a clip of `frames` frames of height x width pixels.

    `spatial_upscale` is the factor between the stages of a two-stage run (2 for the usual upsampler): both sizes must
    then be whole latents. Raises ValueError, with the nearest allowed values, where frames is not 8k+1 or a side not a
    multiple of 32 (64 with two stages), and where the clip has more than max_tokens video tokens.
    """
    _check_frames(frames, scale.frames)
    for name, pixels, factor in (("height", height, scale.height), ("width", width, scale.width)):
        _check_side(name, pixels, _side_step(factor, spatial_upscale))
    size = LatentSize(
        frames=latent_frames(frames, scale.frames),
        height=height // scale.height,
        width=width // scale.width,
        audio_frames=audio_latent_frames(frames, fps),
    )
    if max_tokens is not None and size.video_tokens > max_tokens:
        raise ValueError(
            f"A clip of {frames} frames of {height}x{width} pixels is a latent of {size.frames}x{size.height}x"
            f"{size.width} = {size.video_tokens} tokens, more than the limit of {max_tokens}. Ask for fewer frames or "
            "a smaller picture."
        )
    return size


def pixel_frames(latent_frames: int, factor: int = 8) -> int:
    """Gives the number of frames that a video latent decodes to: the first latent is one frame, each other `factor`."""
    return 1 + factor * (latent_frames - 1)


def latent_frames(frames: int, factor: int = 8) -> int:
    """Gives the latent frames of so many frames: the first alone, then each `factor` together; a rest is left out."""
    return (frames - 1) // factor + 1


def round_frames_up(frames: int, factor: int = 8) -> int:
    """Gives the next allowed frame count (8k+1) at or above `frames`; raises ValueError below 1."""
    if frames < 1:
        raise ValueError(f"A clip needs at least 1 frame, got {frames}.")
    return pixel_frames(math.ceil((frames - 1) / factor) + 1, factor)


def audio_latent_frames(frames: int, fps: float) -> int:
    """Gives the audio latent frames of a clip: its seconds times 25, rounded to nearest, halves to even; at least 1."""
    if not (math.isfinite(fps) and fps > 0):
        raise ValueError(f"fps must be a number above 0, got {fps}.")
    return max(1, round(frames / fps * AUDIO_LATENTS_PER_SECOND))


def _check_frames(frames: int, factor: int) -> None:
    if frames < 1:
        raise ValueError(f"A clip needs at least 1 frame, got {frames}.")
    below = pixel_frames(latent_frames(frames, factor), factor)
    if frames != below:
        raise ValueError(
            f"The number of frames must be {factor}k+1, got {frames}. The nearest are {below} and {below + factor}."
        )


def _side_step(factor: int, spatial_upscale: float) -> int:
    """Gives the smallest side in pixels that is whole latents in both stages; its multiples are the allowed sides."""
    numerator, denominator = float(spatial_upscale).as_integer_ratio()
    if numerator < 1:
        raise ValueError(f"The upscale factor must be above 0, got {spatial_upscale}.")
    return factor * numerator


def _check_side(name: str, pixels: int, step: int) -> None:
    if pixels < 1:
        raise ValueError(f"The {name} must be at least {step} pixels, got {pixels}.")
    if pixels % step:
        below = pixels // step * step
        nearest = f"{below} and {below + step}" if below else f"{step}"
        raise ValueError(f"The {name} must be a multiple of {step}, got {pixels}. The nearest: {nearest}.")
