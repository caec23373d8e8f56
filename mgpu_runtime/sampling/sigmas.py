"""Noise schedules: descending noise levels from at most 1 down to 0, one more than there are steps."""

import math
from collections.abc import Sequence

import torch
from scipy import special
from torch import Tensor

# Published lists of the distilled models: full generation, refinement after the upscale, refinement in tiles.
DISTILLED_STAGE1 = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0)
DISTILLED_STAGE2 = (0.909375, 0.725, 0.421875, 0.0)
TDP_STAGE2 = (0.625, 0.4, 0.0)

ANCHOR_TOKENS = 4096  # the official pipelines shift by this count whatever the resolution
_SHIFT_LOW, _SHIFT_HIGH = (1024, 0.95), (4096, 2.05)  # (tokens, shift); a straight line goes through both
_TERMINAL = 0.1  # the last level before 0
_LINEAR_END = 0.025  # how far below 1 the linear half of "linear_quadratic" ends
_BETA_SHAPE, _BETA_SHIFT, _BETA_ENTRIES = 0.6, 2.37, 10000


def ltx2_sigmas(
    steps: int, tokens: int = ANCHOR_TOKENS, *, stretch: bool = True, terminal: float = _TERMINAL
) -> tuple[float, ...]:
    """Gives LTX-2's schedule of steps + 1 levels: evenly spaced, shifted towards 1 by the token count, stretched.

    Stretching scales the levels so that the last one before 0 is `terminal`, also where it is the only one. `tokens`
    counts the whole latent, never a rank's share of it. Source: the official LTX2Scheduler. Raises ValueError for
    fewer than 1 step or token.
    """
    if steps < 1 or tokens < 1:
        raise ValueError(f"A schedule needs at least 1 step and 1 token, got {steps} steps and {tokens} tokens.")
    slope = (_SHIFT_HIGH[1] - _SHIFT_LOW[1]) / (_SHIFT_HIGH[0] - _SHIFT_LOW[0])
    shift = math.exp(_SHIFT_LOW[1] + slope * (tokens - _SHIFT_LOW[0]))
    even = torch.linspace(1, 0, steps + 1, dtype=torch.float64)[:-1]
    odds = 1 / even - 1
    distances = odds / (shift + odds)  # 1 - level: near 1 the levels themselves would lose their digits
    if stretch and steps > 1:
        distances = distances / distances[-1] * (1 - terminal)
    levels = torch.full_like(even, terminal) if stretch and steps == 1 else 1 - distances
    return (*levels.tolist(), 0.0)


def linear_quadratic_sigmas(steps: int, *, linear_end: float = _LINEAR_END) -> tuple[float, ...]:
    """Gives steps + 1 levels that fall by `linear_end` over the first half of the steps, then faster and faster to 0.

    With L = steps // 2 linear steps out of N, the distance from 1 after i steps is linear_end * i / L, and past L also
    (1 - linear_end * N / L) * ((i - L) / (N - L))^2. Source: the schedule published with Mochi and the first LTX-Video.
    Raises ValueError for fewer than 1 step.
    """
    _check_steps(steps)
    linear = steps // 2
    if linear == 0:
        return 1.0, 0.0
    slope = linear_end / linear
    rest = 1.0 - slope * steps
    distances = [slope * i + rest * (max(0, i - linear) / (steps - linear)) ** 2 for i in range(steps)]
    return (*(1.0 - distance for distance in distances), 0.0)


def beta_sigmas(steps: int, *, alpha: float = _BETA_SHAPE, beta: float = _BETA_SHAPE) -> tuple[float, ...]:
    """Gives levels that are dense at both ends: the beta distribution's quantiles at even steps, shifted towards 1.

    Source: the official BetaScheduler, which looks the quantiles up in a table of 10000 shifted times; the idea is from
    "Beta Sampling is All You Need" (2024). Of many steps some meet in one entry and count once, so that there are at
    most steps + 1 levels. Raises ValueError for fewer than 1 step.
    """
    _check_steps(steps)
    quantiles = special.betaincinv(alpha, beta, [1.0 - i / steps for i in range(steps)])
    entries = dict.fromkeys(round(quantile * (_BETA_ENTRIES - 1)) for quantile in quantiles.tolist())
    times = ((entry + 1) / _BETA_ENTRIES for entry in entries)
    shift = math.exp(_BETA_SHIFT)
    return (*(shift / (shift + 1 / time - 1) for time in times), 0.0)


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"A schedule needs at least 1 step, got {steps}.")


def check_sigmas(sigmas: Sequence[float] | Tensor) -> tuple[float, ...]:
    """Returns an explicit list unchanged, with the final 0 appended where it is absent.

    Raises ValueError where a level is not a finite number in [0, 1], or is not smaller than the one before.
    """
    levels = tuple(float(sigma) for sigma in sigmas)
    for sigma in levels:
        if not (math.isfinite(sigma) and 0.0 <= sigma <= 1.0):
            raise ValueError(f"Sigmas must be finite numbers from 0 to 1, got {sigma} in {_shown(levels)}.")
    for before, after in zip(levels, levels[1:], strict=False):
        if after >= before:
            raise ValueError(f"Sigmas must fall at every step, but {after} follows {before} in {_shown(levels)}.")
    if not levels or levels[0] == 0.0:
        raise ValueError(f"Sigmas must hold at least one level above 0, got {_shown(levels)}.")
    return levels if levels[-1] == 0.0 else (*levels, 0.0)


def _shown(levels: Sequence[float]) -> str:
    return "[" + ", ".join(f"{sigma:g}" for sigma in levels) + "]"
