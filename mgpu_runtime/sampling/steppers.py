"""One step from a noise level to the next, given the model's prediction of the clean latent.

A stepper is called as stepper(state, denoised, sigma, sigma_next) and returns the next tokens (B, T, C). Within a step
the video comes before the audio, which fixes the order of random numbers.
"""

import math
from collections.abc import Callable

from torch import Tensor

from .noise import draw_noise, item_generators
from .state import StreamState

Stepper = Callable[[StreamState, Tensor, float, float], Tensor]

_ANCESTRAL_SEED_OFFSET = 10000  # official: the step noise comes from a generator of its own


def euler(sample: Tensor, denoised: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """Moves along the straight line to the prediction: x + (x - denoised)/sigma * (sigma_next - sigma)."""
    return sample + (sample - denoised) / sigma * (sigma_next - sigma)


def ancestral(
    sample: Tensor, denoised: Tensor, sigma: float, sigma_next: float, noise: Tensor, eta: float = 1.0
) -> Tensor:
    """Steps below sigma_next and comes back up to it with fresh noise; eta 0 is plain Euler, eta 1 the most noise.

    Source: the official ancestral Euler step for rectified flow. The last step returns the prediction.
    """
    if sigma_next == 0.0:
        return denoised
    sigma_down = sigma_next * (1.0 + (sigma_next / sigma - 1.0) * eta)
    ratio = sigma_down / sigma
    lower = ratio * sample + (1.0 - ratio) * denoised
    scale = (1.0 - sigma_next) / (1.0 - sigma_down)
    return scale * lower + noise * math.sqrt(max(0.0, sigma_next**2 - (sigma_down * scale) ** 2))


class EulerStepper:
    """Steps every token, conditioning tokens included, with the scalar sigma."""

    def __call__(self, state: StreamState, denoised: Tensor, sigma: float, sigma_next: float) -> Tensor:
        return euler(state.latent, denoised, sigma, sigma_next)


class AncestralStepper:
    """Ancestral Euler steps for one job; batch item k draws its noise from seed + 10000 + k."""

    def __init__(self, seed: int, batch: int, *, eta: float = 1.0) -> None:
        self._generators = item_generators(seed + _ANCESTRAL_SEED_OFFSET, batch)
        self._eta = eta

    def __call__(self, state: StreamState, denoised: Tensor, sigma: float, sigma_next: float) -> Tensor:
        if sigma_next == 0.0:  # no noise is drawn
            return denoised
        num_tokens, channels = denoised.shape[1:]
        (noise,) = draw_noise(self._generators, [(num_tokens, channels)])
        noise = noise.to(denoised.device)
        return state.keep_clean(ancestral(state.latent, denoised, sigma, sigma_next, noise, self._eta))
