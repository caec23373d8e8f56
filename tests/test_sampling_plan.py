"""What a stage does when its settings are left open: levels, guidance and sampler by model version and schedule."""

from dataclasses import replace

import pytest

from mgpu_runtime.pipeline.jobs import SPStage, TDPStage
from mgpu_runtime.pipeline.plan import plan_sp_stage, plan_tdp_stage
from mgpu_runtime.sampling.guidance import HQ_DEFAULTS, NEUTRAL, GuiderParams, guidance_defaults
from mgpu_runtime.sampling.sigmas import (
    DISTILLED_STAGE1,
    DISTILLED_STAGE2,
    TDP_STAGE2,
    beta_sigmas,
    linear_quadratic_sigmas,
    ltx2_sigmas,
)
from mgpu_runtime.weights.facts import ModelFacts, describe
from tests.weights_files import TINY_23

STAGE = SPStage(1, 24.0)


def facts(version: str | None = "2.3.0", *, distilled: bool | None = None) -> ModelFacts:
    return replace(describe(TINY_23), version=version, is_distilled=distilled, num_layers=48)


@pytest.mark.parametrize(
    ("version", "schedule", "sampler"),
    [
        ("2.3.0", "distilled", "euler"),
        (None, "distilled", "euler"),
        ("2.4.9", "distilled", "euler"),
        ("2.5.0", "distilled", "ancestral"),
        ("2.5-rc1", "distilled", "ancestral"),
        ("3.0", "distilled", "ancestral"),
        ("2.5.0", "ltx2", "euler"),
        ("2.5.0", "linear_quadratic", "euler"),
        ("2.5.0", "hq", "res_2s"),
        ("2.3.0", "hq", "res_2s"),
    ],
)
def test_the_sampler_follows_the_version_and_the_schedule(version: str | None, schedule: str, sampler: str) -> None:
    plan = plan_sp_stage(replace(STAGE, schedule=schedule), facts(version))
    assert plan.sampler == sampler and plan.eta == {"euler": 0.0, "ancestral": 1.0, "res_2s": 0.5}[sampler]


def test_a_distilled_pass_that_refines_steps_by_euler() -> None:
    """Fresh noise belongs to the making from noise; a pass that starts below level 1 is a second stage."""
    newest = facts("2.5.0", distilled=True)
    assert plan_sp_stage(replace(STAGE, sigmas=DISTILLED_STAGE2), newest).sampler == "euler"
    assert plan_sp_stage(replace(STAGE, sigmas=(1.0, 0.5, 0.0)), newest).sampler == "ancestral"
    assert plan_tdp_stage(TDPStage(1, 24.0)).sampler == "euler"


def test_a_chosen_sampler_and_eta_are_taken() -> None:
    chosen = plan_sp_stage(replace(STAGE, schedule="distilled", sampler="ancestral", eta=0.3), facts())
    assert (chosen.sampler, chosen.eta) == ("ancestral", 0.3)
    assert plan_sp_stage(replace(STAGE, sampler="res_2s", eta=0.0), facts()).eta == 0.0
    refine = plan_tdp_stage(TDPStage(1, 24.0, sampler="res_2s"))
    assert (refine.sampler, refine.eta, refine.sigmas) == ("res_2s", 0.5, TDP_STAGE2)


def test_b20_only_the_high_quality_preset_shifts_by_the_clips_own_tokens() -> None:
    by_clip = plan_sp_stage(replace(STAGE, schedule="hq"), facts(), num_tokens=8160)
    assert by_clip.sigmas == ltx2_sigmas(15, 8160) != ltx2_sigmas(15)
    assert plan_sp_stage(replace(STAGE, schedule="ltx2"), facts(), num_tokens=8160).sigmas == ltx2_sigmas(30)
    clip = replace(STAGE, schedule="ltx2", schedule_tokens="clip", steps=12)
    assert plan_sp_stage(clip, facts(), num_tokens=777).sigmas == ltx2_sigmas(12, 777)
    anchor = replace(STAGE, schedule="hq", schedule_tokens="anchor")
    assert plan_sp_stage(anchor, facts(), num_tokens=8160).sigmas == ltx2_sigmas(15)


@pytest.mark.parametrize(("version", "steps", "block"), [("2.0", 40, 29), ("2.3.0", 30, 28), ("2.5.0", 30, 28)])
def test_defaults_follow_the_version(version: str, steps: int, block: int) -> None:
    plan = plan_sp_stage(replace(STAGE, schedule="ltx2"), facts(version))
    assert len(plan.sigmas) == steps + 1
    assert (plan.video, plan.audio) == (guidance_defaults(version).video, guidance_defaults(version).audio)
    assert plan.video.stg_blocks == (block,)


def test_the_high_quality_preset_brings_its_own_guidance() -> None:
    plan = plan_sp_stage(replace(STAGE, schedule="hq"), facts())
    assert (plan.video, plan.audio) == (HQ_DEFAULTS.video, HQ_DEFAULTS.audio)
    own = plan_sp_stage(replace(STAGE, schedule="hq", video=NEUTRAL, steps=4), facts())
    assert own.video == NEUTRAL and own.audio == HQ_DEFAULTS.audio and len(own.sigmas) == 5


def test_other_schedules_take_the_models_steps_and_guidance() -> None:
    for schedule, levels in (("linear_quadratic", linear_quadratic_sigmas), ("beta", beta_sigmas)):
        full = plan_sp_stage(replace(STAGE, schedule=schedule), facts())
        assert full.sigmas == levels(30) and full.video.cfg == 3.0
        distilled = plan_sp_stage(replace(STAGE, schedule=schedule), facts(distilled=True))
        assert distilled.sigmas == levels(8) and distilled.video == distilled.audio == NEUTRAL


def test_b22_explicit_sigmas_replace_every_schedule() -> None:
    for schedule in ("auto", "distilled", "ltx2", "linear_quadratic", "beta", "hq"):
        assert plan_sp_stage(replace(STAGE, schedule=schedule, sigmas=(0.7, 0.2)), facts()).sigmas == (0.7, 0.2, 0.0)
    with pytest.raises(ValueError, match="steps is 4, but explicit sigmas have steps of their own|steps of its own"):
        plan_sp_stage(replace(STAGE, sigmas=(0.7,), steps=4), facts())


@pytest.mark.parametrize("mode", ["keep", "none"])
def test_a_sound_that_is_not_made_is_not_guided(mode: str) -> None:
    guided = replace(STAGE, audio=GuiderParams(cfg=7.0), audio_by_sigma=((0.5, GuiderParams(cfg=2.0)),))
    assert plan_sp_stage(guided, facts()).audio.cfg == 7.0
    plan = plan_sp_stage(replace(guided, audio_mode=mode), facts())
    assert plan.audio == NEUTRAL and plan.audio_by_sigma == () and plan.video.cfg == 3.0


def test_rows_without_limit_are_none() -> None:
    assert plan_sp_stage(STAGE, facts()).max_batch_size is None
    assert plan_sp_stage(replace(STAGE, max_batch_size=2), facts()).max_batch_size == 2


def test_the_schedule_follows_the_file_name() -> None:
    assert plan_sp_stage(STAGE, facts(distilled=True)).sigmas == DISTILLED_STAGE1
    assert plan_sp_stage(STAGE, facts(distilled=False)).sigmas == ltx2_sigmas(30)
