"""Guidance as the nodes hold it: which values are given by hand, which are left to the model, from which level on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mgpu_runtime.pipeline.jobs import SPStage
from mgpu_runtime.pipeline.plan import SamplingPlan, plan_sp_stage
from mgpu_runtime.sampling.guidance import GuiderParams, guidance_defaults, read_guiders
from mgpu_runtime.weights.facts import ModelFacts

BY_MODEL = -1.0
FROM_THE_START = 1.0


@dataclass(frozen=True)
class StreamGuidance:
    """Holds the guidance of one stream; -1, or no blocks, leaves a value to the model."""

    cfg: float = BY_MODEL
    stg: float = BY_MODEL
    stg_blocks: tuple[int, ...] = ()
    rescale: float = BY_MODEL
    modality: float = BY_MODEL
    skip_step: int = 0

    def over(self, base: GuiderParams, published_blocks: tuple[int, ...]) -> GuiderParams:
        """Returns the guidance with the values given here over those of `base`."""
        widgets = {"cfg": self.cfg, "stg": self.stg, "rescale": self.rescale, "modality": self.modality}
        given = {name: value for name, value in widgets.items() if value >= 0}
        return replace(base, stg_blocks=self.stg_blocks or published_blocks, skip_step=self.skip_step, **given)


@dataclass(frozen=True)
class GuidanceSet:
    """Holds what one Guidance node says: the guidance of both streams from a noise level downwards."""

    from_sigma: float
    video: StreamGuidance
    audio: StreamGuidance


@dataclass(frozen=True)
class GuidanceWidgets:
    """Holds the seven widgets of SP Stage; -1 leaves a value to the model."""

    video_cfg: float = BY_MODEL
    audio_cfg: float = BY_MODEL
    video_stg: float = BY_MODEL
    audio_stg: float = BY_MODEL
    stg_block: int = int(BY_MODEL)
    rescale: float = BY_MODEL
    modality_scale: float = BY_MODEL

    def guide(self, job: SPStage, facts: ModelFacts, sets: tuple[GuidanceSet, ...] = ()) -> SPStage:
        """Returns the job with guidance: the widgets over what its schedule would take, then the connected sets.

        Raises ValueError where a set that holds from the start would leave the widgets nothing to say.
        """
        plan = plan_sp_stage(job, facts)
        blocks = guidance_defaults(facts.version, num_layers=facts.num_layers).video.stg_blocks
        if self != GuidanceWidgets():
            if any(one.from_sigma >= FROM_THE_START for one in sets):
                raise ValueError(
                    "guidance is connected, and guidance widgets of SP Stage are set too: put them back to -1, or "
                    "disconnect the Guidance node"
                )
            job = self._guide(job, plan, blocks)
        if not sets:
            return job
        return replace(
            job,
            video_by_sigma=read_guiders((one.from_sigma, one.video.over(plan.video, blocks)) for one in sets),
            audio_by_sigma=read_guiders((one.from_sigma, one.audio.over(plan.audio, blocks)) for one in sets),
        )

    def _guide(self, job: SPStage, plan: SamplingPlan, published_blocks: tuple[int, ...]) -> SPStage:
        blocks = () if self.stg_block < 0 else (self.stg_block,)
        shared = {"stg_blocks": blocks, "rescale": self.rescale, "modality": self.modality_scale}
        video = StreamGuidance(cfg=self.video_cfg, stg=self.video_stg, **shared)
        audio = StreamGuidance(cfg=self.audio_cfg, stg=self.audio_stg, **shared)
        return replace(
            job, video=video.over(plan.video, published_blocks), audio=audio.over(plan.audio, published_blocks)
        )


def read_blocks(text: str) -> tuple[int, ...]:
    """Returns the block numbers of a text such as "28" or "14, 19"; none for an empty one.

    Raises ValueError for anything else.
    """
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f'STG blocks are numbers such as "28" or "14, 19", got {text!r}')
    return tuple(int(part) for part in parts)
