"""Guidance: how the predictions of several passes become one, per stream.

A pass is one forward of the model: cond (the prompt), uncond (the negative prompt), perturbed (the prompt, with
self-attention bypassed in some blocks: STG), isolated (the prompt, with video and audio not listening to each other).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from ..weights.facts import version_numbers


@dataclass(frozen=True)
class GuiderParams:
    """Guidance of one stream; the defaults are neutral, so that only the cond pass is run.

    Attributes:
        cfg: weight of the prompt against the negative prompt; 1 is neutral.
        stg: weight against the perturbed pass; 0 is neutral.
        stg_blocks: blocks whose self-attention the perturbed pass bypasses.
        rescale: how far the result's spread is pulled back to the cond pass's, 0..1.
        modality: weight against the isolated pass; 1 is neutral.
        skip_step: after each guided step, this many steps reuse its prediction.
    """

    cfg: float = 1.0
    stg: float = 0.0
    stg_blocks: tuple[int, ...] = ()
    rescale: float = 0.0
    modality: float = 1.0
    skip_step: int = 0

    def __post_init__(self) -> None:
        for name in ("cfg", "stg", "rescale", "modality"):
            object.__setattr__(self, name, _number(getattr(self, name), name))
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"Guidance value {name} must be a finite number, got {getattr(self, name)}.")
        object.__setattr__(self, "skip_step", _whole(self.skip_step, "skip_step"))
        if isinstance(self.stg_blocks, str) or not isinstance(self.stg_blocks, Iterable):
            raise ValueError(f"Guidance stg_blocks must be a list of block numbers, got {self.stg_blocks!r}.")
        # a list after its way between processes
        object.__setattr__(self, "stg_blocks", tuple(_whole(block, "stg_blocks entry") for block in self.stg_blocks))
        if not 0.0 <= self.rescale <= 1.0:
            raise ValueError(f"Guidance rescale must be from 0 to 1, got {self.rescale}.")
        if self.skip_step < 0:
            raise ValueError(f"Guidance skip_step must be at least 0, got {self.skip_step}.")
        if any(block < 0 for block in self.stg_blocks):
            raise ValueError(f"STG block numbers start at 0, got {list(self.stg_blocks)}.")
        if self.needs_perturbed and not self.stg_blocks:
            raise ValueError(f"STG of {self.stg} needs at least one block to perturb; give stg_blocks or set stg to 0.")

    @property
    def needs_uncond(self) -> bool:
        """Whether this stream uses the negative prompt."""
        return self.cfg != 1.0

    @property
    def needs_perturbed(self) -> bool:
        """Whether this stream uses the perturbed pass."""
        return self.stg != 0.0

    @property
    def needs_isolated(self) -> bool:
        """Whether this stream uses the isolated pass."""
        return self.modality != 1.0

    def is_due(self, step: int) -> bool:
        """Whether this stream is evaluated at a step (0-based), or reuses its last prediction."""
        return step % (self.skip_step + 1) == 0


def _number(value: Any, name: str) -> float:
    """Reads a number of any library; raises ValueError with the field's name for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"Guidance value {name} must be a number, got {value!r}.")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _whole(value: Any, name: str) -> int:
    """Reads a whole number of any library; raises ValueError with the field's name for anything else."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"Guidance {name} must be a whole number, got {value!r}.")
    return int(value)


NEUTRAL = GuiderParams()

BySigma = tuple[tuple[float, GuiderParams], ...]  # (from this noise level downwards, guidance)


def read_guider(value: GuiderParams | dict[str, Any]) -> GuiderParams:
    """Returns guidance given as itself or as its fields; raises TypeError for anything else."""
    if isinstance(value, GuiderParams):
        return value
    return GuiderParams(**value)


def read_guiders(pairs: Iterable[tuple[float, GuiderParams | dict[str, Any]]]) -> BySigma:
    """Returns (level, guidance) pairs from the highest level down.

    Raises ValueError for a level outside (0, 1] and for one that occurs twice.
    """
    made = sorted(((float(level), read_guider(guider)) for level, guider in pairs), key=lambda pair: -pair[0])
    levels = [level for level, _ in made]
    for level in levels:
        if not 0.0 < level <= 1.0:  # false for NaN too
            raise ValueError(f"Guidance changes at a noise level above 0 and up to 1, got {level}.")
    if len(set(levels)) < len(levels):
        raise ValueError(f"Guidance changes twice at one noise level: {levels}. Give each level once.")
    return tuple(made)


def guider_at(sigma: float, base: GuiderParams, by_sigma: BySigma) -> GuiderParams:
    """Gives the guidance of a step: that of the smallest level at or above sigma, `base` above all levels."""
    holding = [pair for pair in by_sigma if pair[0] >= sigma]
    return min(holding, key=lambda pair: pair[0])[1] if holding else base


def check_guidance(
    video: GuiderParams, audio: GuiderParams, *, has_negative: bool, num_layers: int | None = None
) -> None:
    """Raises ValueError where guidance needs a negative prompt that is not there, or names a block that is not."""
    if (video.needs_uncond or audio.needs_uncond) and not has_negative:
        raise ValueError(
            f"Guidance of cfg {video.cfg:g} (video) and {audio.cfg:g} (audio) needs a negative prompt: connect the "
            "negative output of Encode Prompt, or set both to 1."
        )
    for name, guider in (("video", video), ("audio", audio)):
        outside = [block for block in guider.stg_blocks if num_layers is not None and block >= num_layers]
        if outside and guider.needs_perturbed:
            raise ValueError(
                f"The {name} STG names block {outside[0]}, but this model's blocks are 0 to {num_layers - 1}."
            )


def check_all_guidance(
    video: GuiderParams,
    audio: GuiderParams,
    video_by_sigma: BySigma,
    audio_by_sigma: BySigma,
    *,
    has_negative: bool,
    num_layers: int | None = None,
) -> None:
    """Raises ValueError, as check_guidance does, where the guidance of any noise level lacks what it needs."""
    pairs = [(video, audio), *((g, NEUTRAL) for _, g in video_by_sigma), *((NEUTRAL, g) for _, g in audio_by_sigma)]
    for pair in pairs:
        check_guidance(*pair, has_negative=has_negative, num_layers=num_layers)


def combine(
    params: GuiderParams,
    cond: Tensor,
    uncond: Tensor | None = None,
    perturbed: Tensor | None = None,
    isolated: Tensor | None = None,
) -> Tensor:
    """Combines clean-latent predictions (any one shape) in float32.

    p = c + (cfg-1)(c-u) + stg(c-p_stg) + (modality-1)(c-p_iso), then p * (rescale * std(c)/std(p) + 1 - rescale), with
    std over the whole tensor, so give one batch item at a time to keep items independent. A pass whose scale is
    neutral is ignored and may be None. Source: facts of the official implementation, section (e).
    """
    cond = cond.float()
    result = cond
    if params.needs_uncond:
        result = result + (params.cfg - 1.0) * (cond - _given(uncond, "uncond"))
    if params.needs_perturbed:
        result = result + params.stg * (cond - _given(perturbed, "perturbed"))
    if params.needs_isolated and isolated is not None:  # absent where there is no other stream to listen to
        result = result + (params.modality - 1.0) * (cond - isolated.float())
    if params.rescale != 0.0 and result is not cond:
        # in float64, where the order in which threads add up does not survive rounding
        spread = cond.double().std() / result.double().std()
        result = result * (params.rescale * spread + (1.0 - params.rescale)).float()
    return result


def _given(prediction: Tensor | None, name: str) -> Tensor:
    assert prediction is not None, f"the {name} pass is needed but was not run"
    return prediction.float()


@dataclass(frozen=True)
class GuidanceDefaults:
    """Published settings of a full (not distilled) model."""

    steps: int
    video: GuiderParams
    audio: GuiderParams


HQ_DEFAULTS = GuidanceDefaults(
    steps=15,
    video=GuiderParams(cfg=3.0, rescale=0.45, modality=3.0),
    audio=GuiderParams(cfg=7.0, rescale=1.0, modality=3.0),
)  # the official high-quality preset, made for the res_2s sampler


def guidance_defaults(model_version: str | None, *, num_layers: int = 48) -> GuidanceDefaults:
    """Gives the published steps and guidance for a checkpoint's `model_version` ("2.3.0"; absent is the oldest).

    A model with fewer layers than the published ones perturbs its last one instead.
    """
    steps, block = (30, 28) if version_numbers(model_version) >= (2, 3) else (40, 29)
    shared = {"stg": 1.0, "stg_blocks": (min(block, num_layers - 1),), "rescale": 0.7, "modality": 3.0}
    return GuidanceDefaults(steps, video=GuiderParams(cfg=3.0, **shared), audio=GuiderParams(cfg=7.0, **shared))
