"""The decode job as every rank runs it."""

from typing import Any

from torch import Tensor

from ..parallel.distributed_decoder import DistributedDecoder
from ..parallel.pixel_tiles import VAEShape
from ..sampling.sizes import pixel_frames
from .checks import decode_tiling
from .first_rank import on_first_rank
from .jobs import Decode
from .latents import fit_sound
from .models import LTXModels
from .progress import Progress

DRIVER_RANK = 0


def run_decode(
    request: Decode, tensors: dict[str, Tensor | None], models: LTXModels, progress: Progress
) -> dict[str, Any]:
    """Decodes the picture on all ranks, frames streaming out in order, then the sound on the first."""
    latent, sound = tensors["latent"], tensors["audio_latent"]
    if latent is not None:
        _decode_picture(request, latent, models, progress)
    made = None
    if sound is not None:
        made = on_first_rank(models.info, lambda: models.decode_audio(sound))
        progress.step("decode sound", 1, 1)
    waveform, sample_rate = made or (None, None)
    if waveform is not None and latent is not None and request.fps is not None:
        frames = pixel_frames(latent.shape[2], models.facts.scale_factors[0])
        waveform = fit_sound(waveform, round(frames / request.fps * sample_rate))
    return {"waveform": waveform, "sample_rate": sample_rate}


def _decode_picture(request: Decode, latent: Tensor, models: LTXModels, progress: Progress) -> None:
    """Decodes a latent on all ranks; the first one's frames go to `progress`."""
    info, shape = models.info, VAEShape.of(models.video_vae)

    def on_round(done: int, of: int) -> None:
        progress.step("decode", done, of)
        progress.raise_if_cancelled()

    progress.step("decode", 0, 1)
    decoder = DistributedDecoder(
        lambda tile, place: models.decode_video(tile, place=place, seed=request.seed),
        shape,
        queue=progress,
        group=info.group if info.world_size > 1 else None,
        tiling=decode_tiling(request, tuple(latent.shape[2:]), shape),
        driver_rank=DRIVER_RANK,
    )
    decoder.decode(latent, on_round=on_round)
