"""The picture shown while a clip is made."""

import torch
from torch import Tensor

from .models import LTXModels


def middle_frame(latent: Tensor, models: LTXModels) -> Tensor:
    """Decodes the middle latent frame of the first clip of (B, C, F, H, W): one picture, (H', W', 3) uint8 on the CPU.

    A single latent frame decodes to a single picture, so this costs a small share of a step.
    """
    middle = latent.shape[2] // 2
    pixels = models.decode_video(latent[:1, :, middle : middle + 1])
    picture = pixels[0, :, 0].permute(1, 2, 0).float()
    return ((picture + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu()
