"""The guidance widgets of SP Stage: which values are given by hand and which are left to the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mgpu_runtime.pipeline.jobs import SPStage
from mgpu_runtime.pipeline.plan import plan_sp_stage
from mgpu_runtime.sampling.guidance import GuiderParams, guidance_defaults
from mgpu_runtime.weights.facts import ModelFacts

BY_MODEL = -1.0


@dataclass(frozen=True)
class GuidanceWidgets:
    """Holds the seven widgets; -1 leaves a value to the model."""

    video_cfg: float = BY_MODEL
    audio_cfg: float = BY_MODEL
    video_stg: float = BY_MODEL
    audio_stg: float = BY_MODEL
    stg_block: int = int(BY_MODEL)
    rescale: float = BY_MODEL
    modality_scale: float = BY_MODEL

    def guide(self, job: SPStage, facts: ModelFacts) -> SPStage:
        """Returns the job with guidance: the values given here over those that its schedule would take."""
        if self == GuidanceWidgets():
            return job
        plan = plan_sp_stage(job, facts)
        return replace(
            job,
            video=self._over(plan.video, self.video_cfg, self.video_stg, facts),
            audio=self._over(plan.audio, self.audio_cfg, self.audio_stg, facts),
        )

    def _over(self, base: GuiderParams, cfg: float, stg: float, facts: ModelFacts) -> GuiderParams:
        widgets = {"cfg": cfg, "stg": stg, "rescale": self.rescale, "modality": self.modality_scale}
        given = {name: value for name, value in widgets.items() if value >= 0}
        published = guidance_defaults(facts.version, num_layers=facts.num_layers).video.stg_blocks
        blocks = published if self.stg_block < 0 else (self.stg_block,)
        return replace(base, stg_blocks=blocks, **given)
