"""What an SP stage will do: its noise levels and its guidance, settled from the job and the model's facts."""

from dataclasses import dataclass

from ..sampling.guidance import GuiderParams, guidance_defaults
from ..sampling.sigmas import DISTILLED_STAGE1, DISTILLED_STAGE2, TDP_STAGE2, ltx2_sigmas
from ..weights.facts import ModelFacts
from .jobs import SPStage, TDPStage


@dataclass(frozen=True)
class SamplingPlan:
    """Holds what a sampling pass runs: levels from the first sigma down to 0, and guidance per stream."""

    sigmas: tuple[float, ...]
    video: GuiderParams
    audio: GuiderParams


def plan_sp_stage(job: SPStage, facts: ModelFacts) -> SamplingPlan:
    """Settles an SP stage: "auto" is the distilled list for a checkpoint that says so, else the LTX-2 schedule.

    Guidance left open is neutral with the distilled schedule and the model's published default with the other.
    """
    schedule = job.schedule
    if schedule == "auto":
        schedule = "distilled" if facts.is_distilled else "ltx2"
    neutral = GuiderParams()
    if job.steps and (job.sigmas is not None or schedule == "distilled"):
        what = "explicit sigmas have" if job.sigmas is not None else "the distilled schedule has"
        raise ValueError(f"steps is {job.steps}, but {what} steps of its own: set steps to 0")
    if schedule == "distilled":
        sigmas, video, audio = DISTILLED_STAGE1, neutral, neutral
    else:
        defaults = guidance_defaults(facts.version, num_layers=facts.num_layers)
        sigmas, video, audio = ltx2_sigmas(job.steps or defaults.steps), defaults.video, defaults.audio
    sound = (job.audio or audio) if job.with_audio else neutral
    return SamplingPlan(job.sigmas or sigmas, job.video or video, sound)


def plan_tdp_stage(job: TDPStage) -> SamplingPlan:
    """Settles a second stage: the list made for its mode unless the job brings one; no guidance."""
    sigmas = job.sigmas or (TDP_STAGE2 if job.mode == "tdp" else DISTILLED_STAGE2)
    return SamplingPlan(sigmas, GuiderParams(), GuiderParams())
