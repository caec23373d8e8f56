"""Where each token lies: [start, end) per axis in float32; seconds and pixels for video, seconds for audio.

Half precision must never touch these: 1 s of audio already needs steps of 0.01 s at full resolution.
"""

import math

import torch
from torch import Tensor

from .sizes import LTX_SCALE, ScaleFactors

_HOP_LENGTH, _SAMPLING_RATE = 160, 16000  # a mel frame is 0.01 s
_MEL_PER_LATENT = 4
_MAX_TOKENS = 1 << 22  # far above any clip; a grid given in pixels by mistake is a thousand times larger still
_REFERENCE_GAP = 0.04  # seconds between the end of a reference sound and the start of the clip: one audio latent


def video_positions(
    grid: tuple[int, int, int], fps: float, *, scale: ScaleFactors = LTX_SCALE, batch: int = 1
) -> Tensor:
    """Gives the positions (B, 3, F*H*W, 2) of a video latent's cells.

    `grid` is (F, H, W) in latent cells. Latent frame 0 is the first pixel frame alone, each later one the next eight.
    Raises ValueError where the grid can only be one in pixels.
    """
    pixels = _causal_pixels(grid, scale)
    pixels[0] /= fps
    return pixels[None].repeat(batch, 1, 1, 1)


def keyframe_positions(
    grid: tuple[int, int, int], frame: int, fps: float, *, scale: ScaleFactors = LTX_SCALE
) -> Tensor:
    """Gives the positions (1, 3, F*H*W, 2) of an encoded piece of video that starts at a pixel frame of the clip.

    A single latent frame covers one pixel frame. Several cover `scale.frames` each, the first one too, except at frame
    0, where they lie as the clip's own. A negative frame lies before the clip. Source: the official keyframe
    conditioning.
    """
    pixels = _causal_pixels(grid, scale) if frame == 0 else _pixels(grid, scale)
    pixels[0] += frame
    if grid[0] == 1:
        pixels[0, :, 1] = pixels[0, :, 0] + 1
    pixels[0] /= fps
    return pixels[None]


def reference_positions(
    grid: tuple[int, int, int], fps: float, *, downscale: int = 1, time_scale: int = 1, scale: ScaleFactors = LTX_SCALE
) -> Tensor:
    """Gives the positions (1, 3, F*H*W, 2) of a reference clip that is laid over the whole clip.

    `downscale` and `time_scale` say how many times fewer pixels and frames it has than the clip; its cells grow by as
    much. It is moved so that both end together. Source: the official IC-LoRA conditioning.
    """
    pixels = _causal_pixels(grid, scale)
    pixels[0] /= fps / time_scale
    if time_scale > 1:
        frame = torch.tensor(1.0) / fps  # rounded to float32, as the clip's own first token ends
        pixels[0] = (pixels[0] - (time_scale - 1) * frame).clamp(min=0)
    pixels[1:] *= downscale
    return pixels[None]


def _causal_pixels(grid: tuple[int, int, int], scale: ScaleFactors) -> Tensor:
    """Gives [start, end) of each cell in pixels, (3, T, 2), where the first latent frame is a single pixel frame."""
    pixels = _pixels(grid, scale)
    pixels[0] = (pixels[0] + 1 - scale.frames).clamp(min=0)
    return pixels


def _pixels(grid: tuple[int, int, int], scale: ScaleFactors) -> Tensor:
    """Gives [start, end) of each cell in pixels, (3, T, 2), every latent frame as long as the others."""
    if math.prod(grid) > _MAX_TOKENS:
        raise ValueError(
            f"A grid of {grid[0]}x{grid[1]}x{grid[2]} has {math.prod(grid)} tokens, more than {_MAX_TOKENS}. "
            "Give the grid in latent cells, not pixels."
        )
    axes = [torch.arange(length, dtype=torch.float32) for length in grid]
    starts = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)  # (3, T)
    corners = torch.stack([starts, starts + 1], dim=-1)
    return corners * torch.tensor(scale, dtype=torch.float32)[:, None, None]


def reference_audio_positions(num_tokens: int) -> Tensor:
    """Gives the positions (1, 1, T, 2) of a sound heard before the clip: its last frame ends 0.04 s before time 0.

    Source: the official reference-audio conditioning (Dub-It), which ComfyUI's follows.
    """
    positions = audio_positions(num_tokens)
    return positions - positions[0, 0, -1, 1] - _REFERENCE_GAP


def audio_positions(num_tokens: int, *, batch: int = 1) -> Tensor:
    """Gives the positions (B, 1, T, 2) of audio latent frames: the mel frames each one covers, in seconds."""
    mel = torch.arange(num_tokens + 1, dtype=torch.float32) * _MEL_PER_LATENT
    edges = (mel + 1 - _MEL_PER_LATENT).clamp(min=0) * _HOP_LENGTH / _SAMPLING_RATE
    return torch.stack([edges[:-1], edges[1:]], dim=-1)[None, None].repeat(batch, 1, 1, 1)
