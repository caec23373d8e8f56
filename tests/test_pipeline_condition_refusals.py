"""Conditions, samplers and sound that a stage cannot take: one sentence, before anything starts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mgpu_runtime.fleet import MGPUController
from mgpu_runtime.pipeline.client import LTXClient
from mgpu_runtime.pipeline.conditions import (
    ImageCondition,
    LatentCondition,
    ReferenceAudioCondition,
    ReferenceCondition,
    from_record,
    to_record,
)
from mgpu_runtime.pipeline.jobs import LoRASpec, SPStage, TDPStage
from mgpu_runtime.pipeline.jobs import from_record as job_from_record
from mgpu_runtime.pipeline.jobs import to_record as job_to_record
from mgpu_runtime.sampling.guidance import GuiderParams
from tests.conditioned import (
    DISTILLED,
    FIRST,
    FPS,
    HEARD,
    LAST,
    ONE,
    POSITIVE,
    REFERENCE,
    SOUND,
    STAGE,
    pictures,
    six_head_client,
)


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(MGPUController, "start", lambda *args, **kwargs: pytest.fail("a fleet was started"))


def _sp(condition: object, tensor: Tensor, job: SPStage = DISTILLED, latent: Tensor = ONE, **more: object) -> Callable:
    return lambda ltx: ltx.sp_stage(job, POSITIVE, None, latent, conditions=[(condition, tensor)], **more)


def _sp_job(job: SPStage, **more: object) -> Callable:
    return lambda ltx: ltx.sp_stage(job, POSITIVE, None, ONE, **more)


REFUSALS: dict[str, tuple[Callable[[LTXClient], object], str]] = {
    "a frame behind the clip": (
        _sp(ImageCondition(17), pictures(1)),
        "condition 1 is at frame 17, but the clip has 17 frames: choose 0 to 16, or -1 .the last. to -17",
    ),
    "a frame before the clip": (_sp(ImageCondition(-18), pictures(1)), "at frame -18, but the clip has 17 frames"),
    "a piece beyond the clip": (
        _sp(ImageCondition(9), pictures(9)),
        "condition 1 is 9 frames long from frame 9 on, but the clip has 17 frames",
    ),
    "a piece longer than the clip": (_sp(ImageCondition(0), pictures(25)), "25 frames long from frame 0 on"),
    "pictures that are no clip": (_sp(ImageCondition(0), pictures(8)), "8 pictures; .* 8k.1 .* nearest are 1 and 9"),
    "attention in place": (
        _sp(ImageCondition(-17, attention=0.5), pictures(1)),
        "condition 1 lies at frame 0, where it takes the place .* attention of 0.5 has no meaning",
    ),
    "no pictures": (_sp(ImageCondition(0), torch.zeros(1, 3, 4)), "pictures of condition 1 must be"),
    "a latent of another size": (
        _sp(LatentCondition(8), torch.zeros(1, 16, 1, 4, 5)),
        "condition 1 is a latent of 4x5 cells, but this stage's clip has 3x5",
    ),
    "a latent of the first stage in the second": (
        lambda ltx: ltx.tdp_stage(
            TDPStage(1, FPS), POSITIVE, ONE, conditions=[(LatentCondition(8), torch.zeros(1, 16, 1, 3, 5))]
        ),
        "a latent of 3x5 cells, but this stage's clip has 6x10",
    ),
    "a latent of another model": (_sp(LatentCondition(8), torch.zeros(1, 128, 1, 3, 5)), "128 channels"),
    "several latents": (_sp(LatentCondition(8), torch.zeros(2, 16, 1, 3, 5)), "holds 2 latents"),
    "a reference longer than the clip": (
        _sp(ReferenceCondition(time_scale=4), pictures(9)),
        "covers 33 frames .9, time_scale 4., more than the clip's 17",
    ),
    "a reference of half an odd size": (
        _sp(ReferenceCondition(downscale=2), pictures(9)),
        "1/2 of the clip's size, but a height of 96 pixels .* choose a height that is a multiple of 64",
    ),
    "too many tokens with the conditions": (
        _sp(ReferenceCondition(), pictures(17)),
        "45 video tokens of the clip and 45 of its conditions exceed sp_max_tokens 80",
    ),
    "a reference sound without sound": (
        _sp(*HEARD, job=replace(DISTILLED, audio_mode="none")),
        "condition 1 is a reference sound, but this stage has no sound",
    ),
    "a reference sound that is too long": (
        _sp(ReferenceAudioCondition(), torch.zeros(1, 2, 501, 16)),
        "a reference sound of 20.0 s, more than 20 s|a reference sound of 20.04 s",
    ),
    "a reference sound of another model": (_sp(ReferenceAudioCondition(), torch.zeros(1, 8, 4, 16)), "audio latent"),
    "conditions without their tensors": (
        _sp_job(replace(DISTILLED, conditions=(ImageCondition(),))),
        "the job names 1 conditions of its own: give each with its tensor",
    ),
    "a kept sound that is not there": (
        _sp_job(replace(DISTILLED, audio_mode="keep")),
        r"audio_mode keep .* there is no audio latent: connect Encode Audio \(LTX MGPU\) to audio_latent",
    ),
    "a sound of another length": (
        _sp_job(DISTILLED, audio_latent=torch.zeros(1, 2, 26, 16)),
        "the audio latent has 26 frames .25 a second.* needs 18: connect the clip's latent to video_latent of Encode",
    ),
    "a sound for a stage without": (
        _sp_job(replace(DISTILLED, audio_mode="none"), audio_latent=SOUND),
        "audio_mode none has no sound, but an audio latent is given",
    ),
    "a mask of a kept sound": (
        _sp_job(replace(DISTILLED, audio_mode="keep"), audio_latent=SOUND, audio_mask=torch.zeros(1, 18)),
        "an audio noise mask has no meaning with audio_mode keep",
    ),
    "a mask without its sound": (
        _sp_job(DISTILLED, audio_mask=torch.zeros(1, 18)),
        "an audio noise mask needs an audio latent",
    ),
    "a mask of another length": (
        _sp_job(DISTILLED, audio_latent=SOUND, audio_mask=torch.zeros(1, 12)),
        "18 or 1 values, got shape",
    ),
    "eta of a sampler without noise": (
        _sp_job(replace(DISTILLED, sampler="euler", eta=0.5)),
        "eta is 0.5, but the Euler sampler adds no noise",
    ),
    "eta of the second stage": (
        lambda ltx: ltx.tdp_stage(TDPStage(1, FPS, eta=0.5), POSITIVE, ONE),
        "eta is 0.5, but the Euler sampler adds no noise",
    ),
    "guidance at some level without a negative prompt": (
        _sp_job(replace(DISTILLED, audio_by_sigma=((0.5, GuiderParams(cfg=2.0)),))),
        "needs a negative prompt",
    ),
    "a block at some level that is not there": (
        _sp_job(replace(DISTILLED, video_by_sigma=((0.5, GuiderParams(stg=1.0, stg_blocks=(2,))),))),
        "video STG names block 2, but this model's blocks are 0 to 1",
    ),
    "noise without that of the conditions": (
        _sp(*LAST, noise=(torch.zeros(1, 45, 16), torch.zeros(1, 18, 32))),
        r"video noise must be \(1, 60, 16\)",
    ),
    "a LoRA that is not there": (
        _sp_job(replace(DISTILLED, loras=(LoRASpec("/nowhere/lora.safetensors"),))),
        "/nowhere/lora.safetensors",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_conditions_are_refused_in_one_sentence_before_anything_starts(
    six_heads: Path, nothing_starts: None, name: str
) -> None:
    call, sentence = REFUSALS[name]
    with pytest.raises(ValueError, match=sentence) as caught:
        call(six_head_client(six_heads, 2, sp_max_tokens=80))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ImageCondition(0, 1.5), "the image's strength must be from 0 to 1, got 1.5"),
        (lambda: ImageCondition(0, float("nan")), "strength"),
        (lambda: ImageCondition(1.5), "the image's frame cannot be 1.5"),
        (lambda: ImageCondition(0, crf=99), "crf must be 0 .no compression. to 51, got 99"),
        (lambda: ImageCondition(0, attention=0.5), "an attention of 0.5 has no meaning for an image at frame 0"),
        (lambda: LatentCondition(8, attention=-0.1), "the latent's attention must be from 0 to 1"),
        (lambda: ReferenceCondition(downscale=0), "the reference clip's downscale must be 1 to 64, got 0"),
        (lambda: ReferenceCondition(time_scale="2"), "the reference clip's time_scale cannot be '2'"),
        (lambda: ReferenceAudioCondition(-1.0), "the reference audio's strength must be from 0 to 1"),
        (lambda: LoRASpec("lora.safetensors"), "must be an absolute path"),
        (lambda: LoRASpec("/a", float("inf")), "strength must be from -100 to 100"),
        (lambda: replace(DISTILLED, sampler="heun"), "sampler must be one of auto, euler, ancestral, res_2s"),
        (lambda: replace(DISTILLED, audio_mode="mute"), "audio_mode must be one of generate, keep, none"),
        (lambda: replace(DISTILLED, eta=2.0), "eta must be from 0 .no fresh noise. to 1, got 2.0"),
        (lambda: replace(DISTILLED, max_batch_size=-1), "max_batch_size must be 0"),
        (lambda: SPStage(1, FPS, with_audio=False, audio_mode="keep"), "with_audio is off"),
        (lambda: replace(DISTILLED, conditions=("a picture",)), "a condition cannot be 'a picture'"),
        (lambda: TDPStage(1, FPS, sampler="heun"), "sampler must be one of"),
    ],
)
def test_jobs_and_conditions_check_themselves(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_b24_jobs_travel_whole_and_unknown_fields_are_refused() -> None:
    conditions = (FIRST[0], LAST[0], REFERENCE[0], HEARD[0], LatentCondition(8))
    job = replace(
        STAGE, conditions=conditions, loras=(LoRASpec("/a", 0.5),), video_by_sigma=((0.5, GuiderParams(cfg=2.0)),)
    )
    name, fields = job_to_record(job)
    assert job_from_record(name, fields) == job
    tdp = TDPStage(1, FPS, conditions=conditions, loras=job.loras)
    assert job_from_record(*job_to_record(tdp)) == tdp
    assert [from_record(to_record(condition)) for condition in conditions] == list(conditions)
    with pytest.raises(TypeError, match="offset"):
        job_from_record(name, {**fields, "offset": 2.0})
    with pytest.raises(ValueError, match="the condition 'image' does not fit: .*'offset'"):
        job_from_record(name, {**fields, "conditions": [{"kind": "image", "offset": 2.0}]})
    with pytest.raises(ValueError, match="unknown condition 'depth'"):
        from_record({"kind": "depth"})
    with pytest.raises(ValueError, match="video cannot be"):
        job_from_record(name, {**fields, "video": {"cfg": 3.0, "offset": 2.0}})
