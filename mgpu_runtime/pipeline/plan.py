"""What a stage will do: its noise levels, its guidance and its sampler, settled from the job and the model's facts."""

from dataclasses import dataclass

from ..sampling.guidance import HQ_DEFAULTS, BySigma, GuidanceDefaults, GuiderParams, guidance_defaults
from ..sampling.res2s import DEFAULT_ETA
from ..sampling.sigmas import (
    ANCHOR_TOKENS,
    DISTILLED_STAGE1,
    DISTILLED_STAGE2,
    TDP_STAGE2,
    beta_sigmas,
    linear_quadratic_sigmas,
    ltx2_sigmas,
)
from ..weights.facts import ModelFacts
from .jobs import SPStage, TDPStage

ANCESTRAL_SINCE = (2, 5)  # the distilled models from this version on are sampled with fresh noise in their first stage
_NEUTRAL = GuiderParams()
_DISTILLED = GuidanceDefaults(steps=len(DISTILLED_STAGE1) - 1, video=_NEUTRAL, audio=_NEUTRAL)
_ETA = {"euler": 0.0, "ancestral": 1.0, "res_2s": DEFAULT_ETA}  # the published values


@dataclass(frozen=True)
class SamplingPlan:
    """Holds what a sampling pass runs.

    Attributes:
        sigmas: levels from the first down to 0.
        video, audio: guidance per stream, `*_by_sigma` from some level downwards (guidance.guider_at).
        sampler: "euler", "ancestral" or "res_2s".
        eta: share of fresh noise in a step.
        max_batch_size: most rows of one forward; None sets no limit.
    """

    sigmas: tuple[float, ...]
    video: GuiderParams = _NEUTRAL
    audio: GuiderParams = _NEUTRAL
    video_by_sigma: BySigma = ()
    audio_by_sigma: BySigma = ()
    sampler: str = "euler"
    eta: float = 0.0
    max_batch_size: int | None = None


def plan_sp_stage(job: SPStage, facts: ModelFacts, num_tokens: int = ANCHOR_TOKENS) -> SamplingPlan:
    """Settles an SP stage for a clip of so many video tokens; without the clip, all but the levels is settled alike.

    Guidance left open is neutral for the distilled schedule, and on a distilled checkpoint for the schedules that are
    no model's own; it is the model's published default elsewhere. A sound that is kept or absent has none.
    """
    schedule = _schedule(job, facts)
    defaults = _defaults(schedule, facts)
    if job.steps and (job.sigmas is not None or schedule == "distilled"):
        what = "explicit sigmas have" if job.sigmas is not None else "the distilled schedule has"
        raise ValueError(f"steps is {job.steps}, but {what} steps of its own: set steps to 0")
    sigmas = job.sigmas or _levels(job, schedule, job.steps or defaults.steps, num_tokens)
    sampler = _sampler(job, schedule, sigmas, facts)
    makes_sound = job.sound == "generate"
    return SamplingPlan(
        sigmas,
        job.video or defaults.video,
        (job.audio or defaults.audio) if makes_sound else _NEUTRAL,
        job.video_by_sigma,
        job.audio_by_sigma if makes_sound else (),
        sampler,
        _eta(job, sampler),
        job.max_batch_size or None,
    )


def plan_tdp_stage(job: TDPStage) -> SamplingPlan:
    """Settles a second stage: the list made for its mode unless the job brings one; no guidance."""
    sigmas = job.sigmas or (TDP_STAGE2 if job.mode == "tdp" else DISTILLED_STAGE2)
    sampler = "euler" if job.sampler == "auto" else job.sampler
    return SamplingPlan(sigmas, sampler=sampler, eta=_eta(job, sampler), max_batch_size=job.max_batch_size or None)


def _schedule(job: SPStage, facts: ModelFacts) -> str:
    """Settles "auto": the distilled list for a checkpoint that says so, else the LTX-2 schedule."""
    if job.schedule != "auto":
        return job.schedule
    return "distilled" if facts.is_distilled else "ltx2"


def _defaults(schedule: str, facts: ModelFacts) -> GuidanceDefaults:
    if schedule == "hq":
        return HQ_DEFAULTS
    if schedule == "distilled" or (facts.is_distilled and schedule in ("linear_quadratic", "beta")):
        return _DISTILLED
    return guidance_defaults(facts.version, num_layers=facts.num_layers)


def _levels(job: SPStage, schedule: str, steps: int, num_tokens: int) -> tuple[float, ...]:
    if schedule == "distilled":
        return DISTILLED_STAGE1
    if schedule == "linear_quadratic":
        return linear_quadratic_sigmas(steps)
    if schedule == "beta":
        return beta_sigmas(steps)
    by_clip = job.schedule_tokens == "clip" or (job.schedule_tokens == "auto" and schedule == "hq")
    return ltx2_sigmas(steps, num_tokens if by_clip else ANCHOR_TOKENS)


def _sampler(job: SPStage, schedule: str, sigmas: tuple[float, ...], facts: ModelFacts) -> str:
    """Settles "auto": the official pipelines' choice; a pass that starts below level 1 refines, by Euler."""
    if job.sampler != "auto":
        return job.sampler
    if schedule == "hq":
        return "res_2s"
    makes_from_noise = schedule == "distilled" and sigmas[0] == 1.0
    return "ancestral" if makes_from_noise and facts.version_tuple >= ANCESTRAL_SINCE else "euler"


def _eta(job: SPStage | TDPStage, sampler: str) -> float:
    if job.eta is None:
        return _ETA[sampler]
    if sampler == "euler" and job.eta:
        raise ValueError(
            f"eta is {job.eta:g}, but the Euler sampler adds no noise: choose ancestral or res_2s, or leave eta open"
        )
    return job.eta
