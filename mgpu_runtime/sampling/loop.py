"""The denoise loop: predict, keep what must be kept, step; the same for every model and stage."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor

from .sigmas import check_sigmas
from .state import StreamState
from .steppers import EulerStepper, Stepper

# (video, audio, sigma, 0-based step) -> clean-latent predictions (B, T, C) float32, None for an absent stream
Denoise = Callable[[StreamState | None, StreamState | None, float, int], tuple[Tensor | None, Tensor | None]]
# (steps done, steps in all, sigma of the step, video prediction, audio prediction)
OnStep = Callable[[int, int, float, Tensor | None, Tensor | None], None]


def denoise_loop(
    video: StreamState | None,
    audio: StreamState | None,
    sigmas: Sequence[float] | Tensor,
    denoise: Denoise,
    *,
    stepper: Stepper | None = None,
    on_step: OnStep | None = None,
) -> tuple[StreamState | None, StreamState | None]:
    """Takes both streams from sigmas[0] down to 0 and returns them; frozen streams come back as they were.

    `on_step` is called after each step on every rank alike, so it may hold a collective (a cancel vote). Euler steps
    where no stepper is given. Raises ValueError for a bad schedule (check_sigmas).
    """
    levels = check_sigmas(sigmas)
    step_once = stepper or EulerStepper()
    for step, (sigma, sigma_next) in enumerate(pairwise(levels)):
        predictions = denoise(video, audio, sigma, step)
        video, video_x0 = _advance(video, predictions[0], step_once, sigma, sigma_next)
        audio, audio_x0 = _advance(audio, predictions[1], step_once, sigma, sigma_next)
        if on_step is not None:
            on_step(step + 1, len(levels) - 1, sigma, video_x0, audio_x0)
    return video, audio


def _advance(
    state: StreamState | None, prediction: Tensor | None, stepper: Stepper, sigma: float, sigma_next: float
) -> tuple[StreamState | None, Tensor | None]:
    """Steps one stream; returns it with the prediction after the kept tokens were put back."""
    if state is None:
        return None, None
    if state.frozen:
        return state, state.clean
    assert prediction is not None, "no prediction for a stream that is generated"
    denoised = state.keep_clean(prediction)
    return state.with_latent(stepper(state, denoised, sigma, sigma_next)), denoised
