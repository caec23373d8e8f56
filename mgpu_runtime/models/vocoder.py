"""Vocoder: log-mel spectrograms become sound. Always float32, as the official code runs it whatever a file's dtype."""

import os

import torch
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder, LTX2VocoderWithBWE, UpSample1d
from torch import Tensor

from ..weights.audio_configs import has_bandwidth_extension, vocoder_kwargs
from ..weights.bundle import Checkpoint
from ..weights.registry import StateDictRegistry
from .builder import ComponentBuilder
from .loading import WeightTracker

Vocoder = LTX2Vocoder | LTX2VocoderWithBWE


class VocoderBuilder(ComponentBuilder):
    """Builds LTX-2.0's vocoder or LTX-2.3's with bandwidth extension."""

    component = "vocoder"

    def construct(self, file: Checkpoint) -> Vocoder:
        """Makes the vocoder that the file's config describes."""
        kwargs = vocoder_kwargs(file)
        if not has_bandwidth_extension(file):
            return LTX2Vocoder(**kwargs)
        vocoder = LTX2VocoderWithBWE(**kwargs)
        ratio = kwargs["output_sampling_rate"] // kwargs["input_sampling_rate"]
        with torch.device("cpu"):  # its filter is in no file
            vocoder.resampler = UpSample1d(ratio=ratio, window_type="hann", persistent=False)
        return vocoder

    def build(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Vocoder:
        """Returns the vocoder in float32; another dtype is a caller's mistake."""
        assert dtype == torch.float32, f"the vocoder runs in float32, got {dtype}"
        return super().build(device, dtype)


def build_vocoder(
    checkpoint: str | os.PathLike,
    *,
    registry: StateDictRegistry,
    device: torch.device | str,
    tracker: WeightTracker | None = None,
) -> Vocoder:
    """Builds the vocoder in float32; raises ValueError with one sentence when the file lacks it."""
    return VocoderBuilder(checkpoint, registry=registry, tracker=tracker).build(device)


def sample_rate(vocoder: Vocoder) -> int:
    """Returns the samples per second of the sound a vocoder makes."""
    return vocoder.config.output_sampling_rate


@torch.no_grad()
def synthesize(vocoder: Vocoder, mel_BCTM: Tensor) -> Tensor:
    """Turns a log-mel spectrogram (B, 2, T, 64) into sound (B, 2, N), float32 in -1..1, see sample_rate."""
    with torch.autocast(vocoder.device.type, enabled=False):
        return vocoder(mel_BCTM.to(device=vocoder.device, dtype=torch.float32))
