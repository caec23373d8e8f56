"""The diffusion video decoder: a context grown from the latent, and pixels denoised under it.

Letters: B batch, C channels, F H W latent frames, rows and columns, f h w the same in pixels.
"""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import LTX2VideoDiffusionDecoderModel
from diffusers.models.autoencoders.ltx2_diffusion_decoder import LTX2VideoDiffusionDecoder3d
from torch import Tensor

from ..tiling import Grid, TilePlace
from .video_decoder_attention import NeighborhoodAttention


def make_diffusion_decoder(kwargs: Mapping[str, Any]) -> LTX2VideoDiffusionDecoder3d:
    """Makes the decoder of LTX2VideoDiffusionDecoderModel with an attention that runs without a compiler."""
    model = LTX2VideoDiffusionDecoderModel(**kwargs)
    model.set_attn_processor(NeighborhoodAttention())
    return model.decoder


def decode_by_diffusion(
    decoder: LTX2VideoDiffusionDecoder3d,
    latent_BCFHW: Tensor,
    *,
    min_grid: Grid,
    factors: Grid,
    place: TilePlace,
    seed: int,
) -> Tensor:
    """Decodes one un-normalised latent (1, C, F, H, W) to pixels (1, 3, 8(F-1)+1, 32H, 32W), about -1..1.

    `min_grid` is the smallest latent on which every attention window is full; a smaller one is padded by its edges,
    as the official decoder does, and the pixels are cut back. The noise is that of the whole clip, cut to the tile.
    """
    frames, rows, columns = latent_BCFHW.shape[2:]
    padded, top, left = _pad(latent_BCFHW, min_grid)
    context = decoder.forward_stage_4(decoder.forward_stages_1_to_3(padded))
    num_frames = 1 + factors[0] * (padded.shape[2] - 1)
    canvas = [max(side, least) * factor for side, least, factor in zip(place.grid, min_grid, factors, strict=True)][1:]
    starts = [first * factor for first, factor in zip(place.first, factors, strict=True)]
    noise = pixel_noise(
        seed + place.item,
        (decoder.out_channels, *canvas),
        frames=range(starts[0], starts[0] + num_frames),
        rows=slice(starts[1], starts[1] + padded.shape[3] * factors[1]),
        columns=slice(starts[2], starts[2] + padded.shape[4] * factors[2]),
        like=padded,
    )
    pixels = decoder.denoise(context, noise, decoder.default_num_inference_steps)
    top, left, height, width = top * factors[1], left * factors[2], rows * factors[1], columns * factors[2]
    return pixels[:, :, : 1 + factors[0] * (frames - 1), top : top + height, left : left + width]


def pixel_noise(
    seed: int,
    frame: tuple[int, int, int],
    *,
    frames: range,
    rows: slice,
    columns: slice,
    like: Tensor,
) -> Tensor:
    """Draws the noise of a clip on the CPU, one `frame` (C, h, w) after the other, and keeps a part of it.

    Returns (1, C, frames, rows, columns) in the dtype and on the device of `like`. The same pixel gets the same noise
    however the clip is cut, and no more than one whole frame is held.
    """
    generator = torch.Generator().manual_seed(seed % 2**64)
    kept = []
    for index in range(frames.stop):
        drawn = torch.randn(frame, generator=generator)
        if index >= frames.start:
            kept.append(drawn[:, rows, columns].to(device=like.device, dtype=like.dtype))
    return torch.stack(kept, dim=1)[None]


def _pad(latent: Tensor, min_grid: Grid) -> tuple[Tensor, int, int]:
    """Repeats a latent's last frame and its outer rows and columns until it holds `min_grid` cells.

    Returns it with the number of rows put before the first row, and of columns before the first column.
    """
    lengths = latent.shape[2:]
    missing = [max(0, least - length) for least, length in zip(min_grid, lengths, strict=True)]
    before = [0, missing[1] // 2, missing[2] // 2]
    for axis, (length, more, first) in enumerate(zip(lengths, missing, before, strict=True)):
        if more:
            at = torch.arange(-first, length + more - first, device=latent.device).clamp(0, length - 1)
            latent = latent.index_select(axis + 2, at)
    return latent, before[1], before[2]
