"""The LTX runner: what each rank of the fleet does with a job."""

from typing import Any

import torch
from torch import Tensor

from ..fleet import JobContext, MGPURunner
from ..weights.facts import describe
from .checks import needed_components
from .decoding import run_decode
from .encoding import run_encode, run_predict_length
from .jobs import Decode, Encode, EncodeAudio, EncodeVideo, PredictLength, SPStage, TDPStage, from_record
from .latents_encoding import run_encode_audio, run_encode_video
from .memory import give_back_freed
from .models import LTXModels
from .progress import Progress
from .settings import LTXSettings
from .stages import run_sp_stage, run_tdp_stage

_RUNS = {
    Encode: run_encode,
    SPStage: run_sp_stage,
    TDPStage: run_tdp_stage,
    Decode: run_decode,
    EncodeVideo: run_encode_video,
    EncodeAudio: run_encode_audio,
    PredictLength: run_predict_length,
}


class LTXRunner(MGPURunner):
    """Holds one rank's models and runs jobs on them; models load when a job first needs them and then stay."""

    def setup(self, *, settings: dict[str, Any]) -> None:
        """Prepares the rank; reads file headers only."""
        torch.backends.cudnn.allow_tf32 = False  # float32 is asked for where rounding would be heard: the vocoder
        self.settings = LTXSettings(**settings)
        facts = describe(self.settings.checkpoint_files(), self.settings.upsampler, self.settings.text_encoder)
        self.models = LTXModels(self.settings, facts, self.info)

    def check(self, *, name: str, fields: dict[str, Any], tensors: dict[str, Tensor | None]) -> None:
        """Refuses a job this rank cannot read or whose files do not fit, before any rank enters a collective."""
        request = from_record(name, fields)
        describe(self.settings.checkpoint_files(), self.settings.upsampler, self.settings.text_encoder)
        given = {name for name, tensor in tensors.items() if tensor is not None}
        if isinstance(request, Encode):
            self.models.text.check()
        self.models.check(
            needed_components(request, with_sound="audio_latent" in given, with_picture="latent" in given)
        )

    @torch.no_grad()
    def __call__(
        self, job: JobContext, *, name: str, fields: dict[str, Any], tensors: dict[str, Tensor | None]
    ) -> dict[str, Any]:
        """Runs one job on this rank; the result also tells how many weight files this rank has read so far."""
        request = from_record(name, fields)
        progress = Progress(job, self.info)
        self.models.announce = progress.loading
        try:
            result = _RUNS[type(request)](request, tensors, self.models, progress)
        finally:
            give_back_freed()
        return {**result, "files_read": self.models.registry.files_read}
