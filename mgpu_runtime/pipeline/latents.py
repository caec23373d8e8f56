"""Clips and sound that are to become latents: checked and fitted to a size or a length before they are sent.

Light: knows no model code. Letters: B batch, N frames of a clip or samples of sound, H W rows and columns of pixels.
"""

import logging
import math

import torch
from torch import Tensor

from ..sampling.sizes import AUDIO_LATENTS_PER_SECOND, audio_latent_frames, latent_frames, pixel_frames
from ..weights.facts import ModelFacts
from .images import check_pictures, prepare

log = logging.getLogger("mgpu")

MAX_SOUND_SECONDS = 120  # several times the longest clip that the models were made for
_ONE_LATENT = 1 / AUDIO_LATENTS_PER_SECOND  # seconds


def prepare_clip(images_NHWC: Tensor, facts: ModelFacts, height: int = 0, width: int = 0) -> Tensor:
    """Returns pictures (N, H, W, C) of 0..1 as the pixels (1, 3, N, height, width) that the video encoder takes.

    A size of 0 is the pictures' own. Frames beyond 8k+1 are left out with a warning. Raises ValueError for a size that
    is not whole latent cells, and for what is no clip.
    """
    check_pictures(images_NHWC, "clip")
    frames, *cell = facts.scale_factors
    sides = [asked or own for asked, own in zip((height, width), images_NHWC.shape[1:3], strict=True)]
    for name, side, factor in zip(("height", "width"), sides, cell, strict=True):
        if side < 1 or side % factor:
            below = max(factor, side // factor * factor)
            raise ValueError(
                f"a clip to encode needs a {name} that is a multiple of {factor}, got {side}: give a {name} of {below} "
                f"or {below + factor}, and it is resized"
            )
    num_frames = images_NHWC.shape[0]
    kept = pixel_frames(latent_frames(num_frames, frames), frames)
    if kept < num_frames:
        log.warning("The clip has %d frames; %d (%dk+1) are encoded.", num_frames, kept, frames)
    return prepare(images_NHWC[:kept], *sides, 0)


def check_waveform(waveform: Tensor) -> None:
    """Raises ValueError unless a tensor is sound (B, channels, N) of finite values."""
    if not isinstance(waveform, Tensor) or not waveform.is_floating_point() or waveform.dim() != 3:
        kind = tuple(waveform.shape) if isinstance(waveform, Tensor) else type(waveform).__name__
        raise ValueError(f"sound must be a tensor (clips, channels, samples) as Load Audio gives it, got {kind}")
    if 0 in waveform.shape:
        raise ValueError(f"the sound is empty: {tuple(waveform.shape)} (clips, channels, samples)")
    if not torch.isfinite(waveform).all():
        raise ValueError("the sound holds values that are not finite: load it again")


def check_sound_length(seconds: float) -> None:
    """Raises ValueError for sound that is longer than any clip: the encoder's memory grows with it."""
    if seconds > MAX_SOUND_SECONDS:
        raise ValueError(
            f"{seconds:.0f} s of sound are to be encoded, the limit is {MAX_SOUND_SECONDS} s: cut the sound, or fit it "
            "to the clip (frames and fps, or video_latent, of Encode Audio)"
        )


def fit_sound(waveform: Tensor, num_samples: int) -> Tensor:
    """Cuts sound (B, channels, N) to `num_samples`, or adds silence up to them."""
    missing = num_samples - waveform.shape[-1]
    return torch.nn.functional.pad(waveform, (0, missing)) if missing > 0 else waveform[..., :num_samples]


def fit_sound_to_clip(waveform: Tensor, rate: int, num_frames: int, fps: float) -> tuple[Tensor, int]:
    """Fits sound to a clip's length and returns it with the clip's number of audio latents.

    Says so in a warning where more than one audio latent is cut off or added.
    """
    if num_frames < 1:
        raise ValueError(f"a clip needs at least 1 frame, got {num_frames}")
    num_latents = audio_latent_frames(num_frames, fps)
    seconds, given = num_frames / fps, waveform.shape[-1] / rate
    if given - seconds > _ONE_LATENT:
        log.warning("The sound of %.2f s is cut to the clip's %.2f s.", given, seconds)
    elif seconds - given > _ONE_LATENT:
        log.warning("The sound of %.2f s is shorter than the clip's %.2f s: silence follows.", given, seconds)
    return fit_sound(waveform, max(1, math.ceil(seconds * rate))), num_latents
