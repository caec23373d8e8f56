"""The jobs that encode clips and sound, as every rank runs them."""

from typing import Any

from torch import Tensor

from .first_rank import on_first_rank
from .jobs import EncodeAudio, EncodeVideo
from .models import LTXModels
from .progress import Progress


def run_encode_video(
    request: EncodeVideo, tensors: dict[str, Tensor | None], models: LTXModels, progress: Progress
) -> dict[str, Any]:
    """Encodes a clip on the first rank."""
    progress.step("encode video", 0, 1)
    latent = on_first_rank(models.info, lambda: models.encode_video(tensors["pixels"]))
    progress.step("encode video", 1, 1)
    return {"latent": latent}


def run_encode_audio(
    request: EncodeAudio, tensors: dict[str, Tensor | None], models: LTXModels, progress: Progress
) -> dict[str, Any]:
    """Encodes sound on the first rank."""
    progress.step("encode sound", 0, 1)
    latent = on_first_rank(models.info, lambda: models.encode_audio(tensors["waveform"], request.rate))
    progress.step("encode sound", 1, 1)
    if latent is not None and request.num_latents:
        latent = latent[:, :, : request.num_latents].contiguous()
    return {"latent": latent}
