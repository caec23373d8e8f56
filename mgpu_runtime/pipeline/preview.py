"""The picture shown while a clip is made."""

import logging

import torch
from torch import Tensor

from .models import LTXModels
from .progress import Progress

log = logging.getLogger("mgpu")


class Preview:
    """Shows the clip's middle frame after a step; a picture that cannot be made never costs the clip."""

    def __init__(self, models: LTXModels, progress: Progress) -> None:
        self._models = models
        self._progress = progress
        # a diffusion decoder would take longer for the picture than a step takes
        self._works = "video_vae" in models.facts.components and not models.facts.has_diffusion_decoder

    def __call__(self, latent: Tensor) -> None:
        """Decodes and shows the middle of the first clip of a video latent (B, C, F, H, W)."""
        if not self._works:
            return
        try:
            self._progress.preview(middle_frame(latent, self._models))
        except (ValueError, RuntimeError) as error:  # a size the autoencoder cannot pad, no memory left
            self._works = False
            log.warning("No previews for this clip: %s", error)


def middle_frame(latent: Tensor, models: LTXModels) -> Tensor:
    """Decodes the middle latent frame of the first clip of (B, C, F, H, W): one picture, (H', W', 3) uint8 on the CPU.

    A single latent frame decodes to a single picture, so this costs a small share of a step.
    """
    middle = latent.shape[2] // 2
    pixels = models.decode_video(latent[:1, :, middle : middle + 1])
    picture = pixels[0, :, 0].permute(1, 2, 0).float()
    return ((picture + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu()
