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
        clean = predict_clean(video, audio, denoise, sigma, step)
        video, audio = (
            state if state is None or state.frozen else state.with_latent(step_once(state, x0, sigma, sigma_next))
            for state, x0 in zip((video, audio), clean, strict=True)
        )
        if on_step is not None:
            on_step(step + 1, len(levels) - 1, sigma, *clean)
    return video, audio


def predict_clean(
    video: StreamState | None, audio: StreamState | None, denoise: Denoise, sigma: float, step: int
) -> tuple[Tensor | None, Tensor | None]:
    """Evaluates the model and puts the kept tokens back: clean predictions (B, T, C), None for an absent stream."""
    predictions = denoise(video, audio, sigma, step)
    clean_video, clean_audio = (
        _kept(state, prediction) for state, prediction in zip((video, audio), predictions, strict=True)
    )
    return clean_video, clean_audio


def _kept(state: StreamState | None, prediction: Tensor | None) -> Tensor | None:
    if state is None:
        return None
    if state.frozen:
        return state.clean
    assert prediction is not None, "no prediction for a stream that is generated"
    return state.keep_clean(prediction)
