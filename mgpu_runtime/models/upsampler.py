"""Latent upsampler: normalised video latents (B, C, F, H, W) become larger ones, (B, C, F, sH, sW)."""

import os

import torch
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from torch import Tensor

from ..weights.bundle import Checkpoint
from ..weights.registry import StateDictRegistry
from ..weights.vae_configs import upsampler_kwargs
from .builder import ComponentBuilder
from .loading import WeightTracker
from .video_vae import VideoVAE


class UpsamplerBuilder(ComponentBuilder):
    """Builds an LTX2LatentUpsamplerModel from its own file."""

    component = "upsampler"

    def construct(self, file: Checkpoint) -> LTX2LatentUpsamplerModel:
        """Makes the upsampler that the file's config describes."""
        return LTX2LatentUpsamplerModel(**upsampler_kwargs(file))


def build_upsampler(
    path: str | os.PathLike,
    *,
    registry: StateDictRegistry,
    device: torch.device | str,
    dtype: torch.dtype,
    tracker: WeightTracker | None = None,
) -> LTX2LatentUpsamplerModel:
    """Builds the upsampler; raises ValueError with one sentence when the file holds none."""
    return UpsamplerBuilder(path, registry=registry, tracker=tracker).build(device, dtype)


@torch.no_grad()
def upsample(upsampler: LTX2LatentUpsamplerModel, vae: VideoVAE, latent_BCFHW: Tensor) -> Tensor:
    """Upsamples a normalised latent to a normalised latent, float32; the statistics are the video autoencoder's."""
    raw = vae.un_normalize(latent_BCFHW.to(vae.device))
    larger = upsampler(raw.to(device=upsampler.device, dtype=upsampler.dtype))
    return vae.normalize(larger.to(vae.device))
