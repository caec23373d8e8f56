"""Audio autoencoder: latents (B, C, T, M) as the transformer sees them to log-mel spectrograms (B, 2, 4T - 3, 64)."""

import os

import torch
from diffusers import AutoencoderKLLTX2Audio
from torch import Tensor

from ..weights.audio_configs import audio_vae_kwargs
from ..weights.bundle import Checkpoint
from ..weights.registry import StateDictRegistry
from .builder import ComponentBuilder
from .loading import WeightTracker
from .stored import compute_dtype


class AudioVAEBuilder(ComponentBuilder):
    """Builds an AutoencoderKLLTX2Audio; its latent statistics stay float32."""

    component = "audio_vae"

    def construct(self, file: Checkpoint) -> AutoencoderKLLTX2Audio:
        """Makes the autoencoder that the file's config describes."""
        return AutoencoderKLLTX2Audio(**audio_vae_kwargs(file))


def build_audio_vae(
    checkpoint: str | os.PathLike,
    *,
    registry: StateDictRegistry,
    device: torch.device | str,
    dtype: torch.dtype,
    tracker: WeightTracker | None = None,
) -> AutoencoderKLLTX2Audio:
    """Builds the audio autoencoder; raises ValueError with one sentence when the file lacks it."""
    return AudioVAEBuilder(checkpoint, registry=registry, tracker=tracker).build(device, dtype)


@torch.no_grad()
def decode_mel(vae: AutoencoderKLLTX2Audio, latent_BCTM: Tensor) -> Tensor:
    """Decodes a normalised audio latent to a log-mel spectrogram in the autoencoder's dtype."""
    mean, std = _statistics(vae, latent_BCTM.shape[1])
    latent = latent_BCTM.to(vae.device).float() * std + mean
    return vae.decode(latent.to(compute_dtype(vae)), return_dict=False)[0]


@torch.no_grad()
def encode_mel(vae: AutoencoderKLLTX2Audio, mel_BCTM: Tensor) -> Tensor:
    """Encodes a log-mel spectrogram (B, 2, T, 64) to the normalised mean of the latent, float32."""
    posterior = vae.encode(mel_BCTM.to(device=vae.device, dtype=compute_dtype(vae)), return_dict=False)[0]
    mode = posterior.mode().float()
    mean, std = _statistics(vae, mode.shape[1])
    return (mode - mean) / std


def _statistics(vae: AutoencoderKLLTX2Audio, num_channels: int) -> tuple[Tensor, Tensor]:
    """Returns mean and std as (C, 1, M): the file keeps them per token entry, channel-major."""
    shape = (num_channels, 1, -1)
    return vae.latents_mean.float().view(shape), vae.latents_std.float().view(shape)
