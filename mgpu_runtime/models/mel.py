"""Sound to log-mel spectrograms, as the audio autoencoder was trained on them.

Letters: B batch, N samples, T spectrogram frames, M mel bins.
"""

from functools import lru_cache

import torch
from torch import Tensor
from transformers.audio_utils import mel_filter_bank

from ..weights.audio_configs import MelLayout
from .resample import resample

FLOOR = 1e-5  # silence: the logarithm of less would run away


def log_mel(waveform_BCN: Tensor, rate: int, layout: MelLayout) -> Tensor:
    """Turns sound (B, channels, N) at `rate` into log-mel spectrograms (B, 2, T, M), float32 on the CPU.

    T is 1 + samples // hop at the layout's rate: frames are centred on their samples. Sound shorter than a window is
    followed by silence. One channel becomes two, more are mixed down (see to_stereo).
    """
    sound = resample(to_stereo(waveform_BCN.cpu().float()), rate, layout.rate)
    missing = layout.window - sound.shape[-1]
    if missing > 0:  # reflection at the ends needs half a window
        sound = torch.nn.functional.pad(sound, (0, missing))
    spectrum = torch.stft(
        sound.flatten(0, 1),
        layout.window,
        layout.hop,
        window=torch.hann_window(layout.window),
        center=True,
        pad_mode="reflect",
        return_complex=True,
    )
    mel = spectrum.abs().transpose(1, 2) @ _filters(layout)
    return mel.clamp(min=FLOOR).log().unflatten(0, sound.shape[:2])


def to_stereo(waveform_BCN: Tensor) -> Tensor:
    """Returns sound with two channels: one is doubled, of more both become the mean of all.

    More than two are mixed evenly, since a tensor does not say which loudspeaker a channel is for.
    """
    channels = waveform_BCN.shape[1]
    if channels == 2:
        return waveform_BCN
    return waveform_BCN.mean(dim=1, keepdim=True).repeat(1, 2, 1)


@lru_cache(maxsize=4)
def _filters(layout: MelLayout) -> Tensor:
    """Gives the triangular filters (frequencies, M) of Slaney's mel scale, each of the same area."""
    filters = mel_filter_bank(
        num_frequency_bins=layout.window // 2 + 1,
        num_mel_filters=layout.bins,
        min_frequency=0.0,
        max_frequency=layout.rate / 2,
        sampling_rate=layout.rate,
        norm="slaney",
        mel_scale="slaney",
    )
    return torch.from_numpy(filters).float()
