"""Video autoencoder: pixels (B, 3, F, H, W) about -1..1, and latents (B, C, f, h, w) as the transformer sees them."""

import os

import torch
from diffusers import AutoencoderKLLTX2Video
from torch import Tensor

from ..weights.checkpoint import CheckpointFile
from ..weights.registry import StateDictRegistry
from ..weights.vae_configs import video_vae_kwargs
from .builder import ComponentBuilder
from .loading import WeightTracker


class VideoVAEBuilder(ComponentBuilder):
    """Builds an AutoencoderKLLTX2Video; its latent statistics stay float32."""

    component = "video_vae"

    def construct(self, file: CheckpointFile) -> AutoencoderKLLTX2Video:
        """Makes the autoencoder that the file's config describes."""
        return AutoencoderKLLTX2Video(**video_vae_kwargs(file))


def build_video_vae(
    checkpoint: str | os.PathLike,
    *,
    registry: StateDictRegistry,
    device: torch.device | str,
    dtype: torch.dtype,
    tracker: WeightTracker | None = None,
) -> AutoencoderKLLTX2Video:
    """Builds the video autoencoder; raises ValueError with one sentence when the file lacks it."""
    return VideoVAEBuilder(checkpoint, registry=registry, tracker=tracker).build(device, dtype)


def normalize(latent_BCFHW: Tensor, vae: AutoencoderKLLTX2Video) -> Tensor:
    """Returns (latent - mean) / std per channel, in float32: what the transformer works on."""
    mean, std = _statistics(vae)
    return (latent_BCFHW.float() - mean) / std


def un_normalize(latent_BCFHW: Tensor, vae: AutoencoderKLLTX2Video) -> Tensor:
    """Returns latent * std + mean per channel, in float32: what autoencoder and upsampler work on."""
    mean, std = _statistics(vae)
    return latent_BCFHW.float() * std + mean


@torch.no_grad()
def decode(vae: AutoencoderKLLTX2Video, latent_BCFHW: Tensor) -> Tensor:
    """Decodes a normalised latent to pixels about -1..1, not clamped, in the autoencoder's dtype.

    The result has (f - 1) * 8 + 1 frames and 32 times the rows and columns (by the file's scale factors).
    """
    latent = un_normalize(latent_BCFHW.to(vae.device), vae)
    return vae.decode(latent.to(vae.dtype), return_dict=False)[0]


@torch.no_grad()
def encode(vae: AutoencoderKLLTX2Video, pixels_BCFHW: Tensor) -> Tensor:
    """Encodes pixels in -1..1 (8k+1 frames) to the normalised mean of the latent, float32."""
    frames, rows, columns = pixels_BCFHW.shape[2:]
    time, space = vae.temporal_compression_ratio, vae.spatial_compression_ratio
    if frames % time != 1 % time or rows % space or columns % space:
        raise ValueError(
            f"A clip to encode needs {time}k+1 frames and sides that are multiples of {space}, "
            f"got {frames} frames of {rows}x{columns}."
        )
    posterior = vae.encode(pixels_BCFHW.to(device=vae.device, dtype=vae.dtype), return_dict=False)[0]
    return normalize(posterior.mode(), vae)


def _statistics(vae: AutoencoderKLLTX2Video) -> tuple[Tensor, Tensor]:
    shape = (1, -1, 1, 1, 1)
    return vae.latents_mean.float().view(shape), vae.latents_std.float().view(shape)
