"""The res_2s sampler: a second-order exponential integrator with fresh noise, two evaluations a step.

A step from level s to s' with h = log(s/s') and the middle level m = sqrt(s s') is, per stream,

    middle = x + (1 - m/s) (D(x, s) - x)
    next   = x + (1 - s'/s - w) (D(x, s) - x) + w (D(middle, m) - x),    w = 2 (e^-h - 1 + h) / h

where D is the model's clean prediction. In t = -log s the flow reads dx/dt = D - x, and this is the exponential
Runge-Kutta method of order 2 with its node in the middle (Hochbruck and Ostermann, "Exponential integrators", Acta
Numerica 2010; its weights are h phi_1(-h) = 1 - s'/s and 2 h phi_2(-h) = w). Fresh noise, the refined start of a short
step and the last level are those of the official high-quality pipeline's res_2s loop.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .loop import Denoise, OnStep, predict_clean
from .noise import item_generators
from .sigmas import check_sigmas
from .state import StreamState

Streams = tuple[StreamState | None, StreamState | None]  # video, audio

DEFAULT_ETA = 0.5
_MIDDLE_ETA = 0.5  # official: the middle's noise does not follow eta
_MOST_FRESH = 0.9999  # of a level's noise; all of it would leave nothing to divide by
_LAST_LEVEL = 0.0011  # stands for 0, whose logarithm there is not
_SHORT_STEP, _REFINE_ABOVE = 0.5, 0.03
_SEED_OFFSET, _MIDDLE_SEED_OFFSET = 10000, 20000


@dataclass(frozen=True)
class Span:
    """One step: its levels and the weights that follow from them.

    Attributes:
        sigma, middle, sigma_next: the levels, falling, all above 0.
        to_middle: how far the middle lies on the way from the start to the first prediction.
        first, second: weights of the two predictions, each minus the start, in the whole step.
    """

    sigma: float
    middle: float
    sigma_next: float
    to_middle: float
    first: float
    second: float

    @classmethod
    def of(cls, sigma: float, sigma_next: float) -> "Span":
        """Finds the weights of a step between two levels above 0."""
        h = math.log(sigma / sigma_next)
        middle = math.sqrt(sigma * sigma_next)
        second = 2.0 * (math.expm1(-h) + h) / h
        return cls(sigma, middle, sigma_next, 1.0 - middle / sigma, 1.0 - sigma_next / sigma - second, second)

    @property
    def is_refined(self) -> bool:
        """Whether the start is moved to where the noisy middle would have come from."""
        return math.log(self.sigma / self.sigma_next) < _SHORT_STEP and self.sigma > _REFINE_ABOVE


class FreshNoise:
    """Draws the noise of one job's steps; batch item k draws from generators of its own, so that it runs as alone.

    Source: the official loop draws in float64 and scales each draw to mean 0 and deviation 1.
    """

    def __init__(self, seed: int, batch: int, *, eta: float = DEFAULT_ETA) -> None:
        """Prepares the noise of a seed; an eta of 0 adds none at all, not in the middle either."""
        self.eta = eta
        self.middle_eta = _MIDDLE_ETA if eta > 0.0 else 0.0
        self._steps = item_generators(seed + _SEED_OFFSET, batch)
        self._middles = item_generators(seed + _MIDDLE_SEED_OFFSET, batch)

    def for_step(self, state: StreamState) -> Tensor | None:
        """Gives the noise (B, T, C) float64 for a stream's step, None where there is none."""
        return _draw(self._steps, state) if self.eta > 0.0 else None

    def for_middle(self, state: StreamState) -> Tensor | None:
        """Gives the noise (B, T, C) float64 for a stream's middle, None where there is none."""
        return _draw(self._middles, state) if self.middle_eta > 0.0 else None


def _draw(generators: Sequence[torch.Generator], state: StreamState) -> Tensor:
    items = []
    for generator in generators:
        # numpy adds up in one order; torch's order, and so the last bits, would follow the number of threads
        noise = torch.randn(state.token_shape, generator=generator, dtype=torch.float64).numpy()
        items.append(torch.from_numpy((noise - noise.mean()) / noise.std(ddof=1)))
    return torch.stack(items).to(state.latent.device)


def renoise(start: Tensor, end: Tensor, sigma: float, sigma_next: float, noise: Tensor | None, eta: float) -> Tensor:
    """Replaces a share of the noise at the end of a move from `start` at sigma to `end` at sigma_next by fresh noise.

    eta is that share, of the deviation; the amount of noise stays what sigma_next says. Source: the official res_2s
    step.
    """
    if noise is None:
        return end
    fresh = sigma_next * min(eta, _MOST_FRESH)
    old = math.sqrt(sigma_next**2 - fresh**2)
    direction = (start - end) / (sigma - sigma_next)
    clean = start - sigma * direction
    return (1.0 - sigma_next + old) * clean + old * direction + fresh * noise


def res2s_loop(
    video: StreamState | None,
    audio: StreamState | None,
    sigmas: Sequence[float] | Tensor,
    denoise: Denoise,
    *,
    noise: FreshNoise,
    on_step: OnStep | None = None,
) -> Streams:
    """Takes both streams from sigmas[0] down to 0 and returns them; same contract as loop.denoise_loop.

    Every step evaluates the model twice, the last one once more at its end. The middle is always evaluated: skip_step
    counts steps.
    """
    levels = check_sigmas(sigmas)
    num_steps = len(levels) - 1
    last = min(_LAST_LEVEL, levels[-2] / 2)
    for step, (sigma, sigma_next) in enumerate(pairwise((*levels[:-1], last))):
        span = Span.of(sigma, sigma_next)
        video, audio, clean = _advance((video, audio), span, denoise, noise, step)
        if step + 1 == num_steps:
            clean = predict_clean(video, audio, denoise, last, num_steps)
            video, audio = _with_latents((video, audio), clean)
        if on_step is not None:
            on_step(step + 1, num_steps, sigma, *clean)
    return video, audio


def _advance(
    streams: Streams, span: Span, denoise: Denoise, noise: FreshNoise, step: int
) -> tuple[StreamState | None, StreamState | None, tuple[Tensor | None, Tensor | None]]:
    """Takes one step; returns both streams and the clean predictions of the middle."""
    first = predict_clean(*streams, denoise, span.sigma, step)
    moves = [
        None if state is None or state.frozen else _Move(state, prediction, span, noise)
        for state, prediction in zip(streams, first, strict=True)
    ]
    middles = _with_latents(streams, [move and move.middle for move in moves])
    second = predict_clean(*middles, denoise, span.middle, 0)
    ends = [move and move.end(prediction, noise) for move, prediction in zip(moves, second, strict=True)]
    video, audio = _with_latents(streams, ends)
    return video, audio, second


class _Move:
    """One stream's way through a step, in float64."""

    def __init__(self, state: StreamState, prediction: Tensor, span: Span, noise: FreshNoise) -> None:
        self.state = state
        self.span = span
        self.first = prediction.double()
        self.start = state.latent.double()
        middle = self.start + span.to_middle * (self.first - self.start)
        fresh = noise.for_middle(state)
        self.middle = state.keep_clean(renoise(self.start, middle, span.sigma, span.middle, fresh, noise.middle_eta))
        if fresh is not None and span.is_refined:
            # the fixed point of: start = middle - to_middle * (first - start)
            self.start = (self.middle - span.to_middle * self.first) / (1.0 - span.to_middle)

    def end(self, prediction: Tensor, noise: FreshNoise) -> Tensor:
        """Returns the tokens at the step's end, given the prediction at its middle."""
        span, start = self.span, self.start
        end = start + span.first * (self.first - start) + span.second * (prediction.double() - start)
        fresh = noise.for_step(self.state)
        return self.state.keep_clean(renoise(start, end, span.sigma, span.sigma_next, fresh, noise.eta))


def _with_latents(streams: Streams, latents: Sequence[Tensor | None]) -> Streams:
    """Returns the streams with other tokens, in float32; an absent or frozen stream stays as it is."""
    video, audio = (
        state if state is None or state.frozen else state.with_latent(latent.float())
        for state, latent in zip(streams, latents, strict=True)
    )
    return video, audio
