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


def video_positions(
    grid: tuple[int, int, int], fps: float, *, scale: ScaleFactors = LTX_SCALE, batch: int = 1
) -> Tensor:
    """Gives the positions (B, 3, F*H*W, 2) of a video latent's cells.

    `grid` is (F, H, W) in latent cells. Latent frame 0 is the first pixel frame alone, each later one the next eight.
    Raises ValueError where the grid can only be one in pixels.
    """
    if math.prod(grid) > _MAX_TOKENS:
        raise ValueError(
            f"A grid of {grid[0]}x{grid[1]}x{grid[2]} has {math.prod(grid)} tokens, more than {_MAX_TOKENS}. "
            "Give the grid in latent cells, not pixels."
        )
    axes = [torch.arange(length, dtype=torch.float32) for length in grid]
    starts = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)  # (3, T)
    corners = torch.stack([starts, starts + 1], dim=-1)
    pixels = corners * torch.tensor(scale, dtype=torch.float32)[:, None, None]
    pixels[0] = (pixels[0] + 1 - scale.frames).clamp(min=0) / fps
    return pixels[None].repeat(batch, 1, 1, 1)


def audio_positions(num_tokens: int, *, batch: int = 1) -> Tensor:
    """Gives the positions (B, 1, T, 2) of audio latent frames: the mel frames each one covers, in seconds."""
    mel = torch.arange(num_tokens + 1, dtype=torch.float32) * _MEL_PER_LATENT
    edges = (mel + 1 - _MEL_PER_LATENT).clamp(min=0) * _HOP_LENGTH / _SAMPLING_RATE
    return torch.stack([edges[:-1], edges[1:]], dim=-1)[None, None].repeat(batch, 1, 1, 1)
