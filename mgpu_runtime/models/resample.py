"""Resamples sound to another rate: bandlimited interpolation with a windowed sinc.

After J. O. Smith, "Digital Audio Resampling" (https://ccrma.stanford.edu/~jos/resample/), with the filter that the
official code uses: a Hann window over six zero crossings a side, and a cutoff at 0.99 of the lower Nyquist frequency.
"""

import math

import torch
from torch import Tensor

ZERO_CROSSINGS = 6
ROLLOFF = 0.99
_MAX_TAPS = 1 << 21  # taps held at once, so that no rate and no length needs much memory


def resample(waveform: Tensor, rate: int, new_rate: int) -> Tensor:
    """Returns sound (..., N) at `rate` as (..., ceil(N * new_rate / rate)) at `new_rate`, float32."""
    if rate == new_rate:
        return waveform.float()
    num_samples = -(-waveform.shape[-1] * new_rate // rate)
    cutoff = ROLLOFF * min(rate, new_rate) / rate  # in Nyquist frequencies of the input
    reach = ZERO_CROSSINGS / cutoff  # input samples on either side that one output sample depends on
    num_taps = math.floor(2 * reach) + 1
    padded = torch.nn.functional.pad(waveform.double(), (num_taps, num_taps))
    chunk = max(1, _MAX_TAPS // num_taps)
    parts = []
    for start in range(0, num_samples, chunk):
        # positions in input samples; whole numbers are divided last, so that a long clip does not drift
        at = torch.arange(start, min(start + chunk, num_samples), dtype=torch.float64) * rate / new_rate
        taps = torch.ceil(at - reach)[:, None] + torch.arange(num_taps)
        weights = _kernel((taps - at[:, None]) * cutoff) * cutoff
        samples = padded[..., (taps.long() + num_taps).clamp(0, padded.shape[-1] - 1).to(padded.device)]
        parts.append((samples * weights.to(padded.device)).sum(-1).float())
    return torch.cat(parts, dim=-1)


def _kernel(distance: Tensor) -> Tensor:
    """Gives the windowed sinc at distances in zero crossings."""
    window = torch.cos(distance.clamp(-ZERO_CROSSINGS, ZERO_CROSSINGS) * math.pi / ZERO_CROSSINGS / 2) ** 2
    return torch.sinc(distance) * window
