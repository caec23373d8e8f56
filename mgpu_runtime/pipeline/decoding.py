"""The decode job as every rank runs it."""

from typing import Any

from torch import Tensor

from ..parallel.distributed_decoder import DistributedDecoder
from ..parallel.pixel_tiles import VAEShape
from .checks import decode_tiling
from .first_rank import on_first_rank
from .jobs import Decode
from .models import LTXModels
from .progress import Progress

DRIVER_RANK = 0


def run_decode(
    request: Decode, tensors: dict[str, Tensor | None], models: LTXModels, progress: Progress
) -> dict[str, Any]:
    """Decodes the picture on all ranks, frames streaming out in order, then the sound on the first."""
    latent, sound = tensors["latent"], tensors["audio_latent"]
    info = models.info

    def on_round(done: int, of: int) -> None:
        progress.step("decode", done, of)
        progress.raise_if_cancelled()

    progress.step("decode", 0, 1)
    decoder = DistributedDecoder(
        models.decode_video,
        VAEShape.of(models.video_vae),
        queue=progress,
        group=info.group if info.world_size > 1 else None,
        tiling=decode_tiling(request, tuple(latent.shape[2:])),
        driver_rank=DRIVER_RANK,
    )
    decoder.decode(latent, on_round=on_round)
    made = None
    if sound is not None:
        made = on_first_rank(info, lambda: models.decode_audio(sound))
        progress.step("decode sound", 1, 1)
    waveform, sample_rate = made or (None, None)
    return {"waveform": waveform, "sample_rate": sample_rate}
