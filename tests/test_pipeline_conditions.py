"""Stages with conditions, samplers and sound to keep, through the client on two workers.

That the clips are the same for 1, 2 and 3 workers is checked in test_pipeline.py.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mgpu_runtime.fleet import Event, JobCancelled, stop
from mgpu_runtime.pipeline.client import LTXClient, Watch
from mgpu_runtime.pipeline.conditions import ImageCondition, LatentCondition
from mgpu_runtime.pipeline.jobs import TDPStage
from tests.conditioned import (
    DISTILLED,
    FIRST,
    FPS,
    HEARD,
    LAST,
    NEGATIVE,
    ONE,
    POSITIVE,
    REFERENCE,
    SOUND,
    STAGE,
    noise,
    pictures,
    six_head_client,
)
from tests.goldens import relative_error


@pytest.fixture(scope="module", autouse=True)
def no_fleet_left():
    yield
    stop()


@pytest.fixture(scope="module")
def two(six_heads: Path) -> LTXClient:
    return six_head_client(six_heads, 2)


def encoded(ltx: LTXClient, images: Tensor, height: int, width: int) -> Tensor:
    return ltx.encode_video(images, height=height, width=width)


@pytest.mark.slow
def test_b40_strength_1_pins_the_frame_and_strength_0_is_text_to_video(two: LTXClient) -> None:
    plain = two.sp_stage(DISTILLED, POSITIVE, None, ONE)
    ignored = [(replace(condition, strength=0.0), tensor) for condition, tensor in (FIRST, LAST, REFERENCE, HEARD)]
    same = two.sp_stage(DISTILLED, POSITIVE, None, ONE, conditions=ignored)
    assert torch.equal(same.video, plain.video) and torch.equal(same.audio, plain.audio)
    pinned = two.sp_stage(DISTILLED, POSITIVE, None, ONE, conditions=[(ImageCondition(0, 1.0, crf=0), pictures(1))])
    assert relative_error(pinned.video[:, :, :1], encoded(two, pictures(1), 96, 160)) < 1e-5
    assert not torch.allclose(pinned.video[:, :, 1:], plain.video[:, :, 1:], atol=1e-3)


def test_pictures_are_encoded_at_each_stages_own_size(two: LTXClient) -> None:
    condition = (ImageCondition(0, 1.0, crf=0), pictures(1))
    stage = TDPStage(4, FPS, tiles="1x2", overlap=1, preview=False)
    fine = two.tdp_stage(stage, POSITIVE, ONE, conditions=[condition])
    assert relative_error(fine.video[:, :, :1], encoded(two, pictures(1), 192, 320)) < 1e-5


def test_pictures_and_their_latent_are_the_same_condition(two: LTXClient) -> None:
    """A clip from frame 8 on, and its first picture alone at the last frame; a negative frame is the same frame."""
    images = pictures(9, seed=3)
    latent = encoded(two, images, 96, 160)
    stage = replace(DISTILLED, sigmas=(1.0, 0.5, 0.0))
    by_picture = two.sp_stage(stage, POSITIVE, None, ONE, conditions=[(ImageCondition(8), images)])
    by_latent = two.sp_stage(stage, POSITIVE, None, ONE, conditions=[(LatentCondition(8), latent)])
    by_negative = two.sp_stage(stage, POSITIVE, None, ONE, conditions=[(ImageCondition(-9), images)])
    assert torch.equal(by_picture.video, by_latent.video) and torch.equal(by_picture.video, by_negative.video)
    in_place = two.sp_stage(stage, POSITIVE, None, ONE, conditions=[(ImageCondition(-17), images)])
    assert relative_error(in_place.video[:, :, :2], latent) < 1e-5


def test_b39_a_second_negative_keyframe_lands_where_it_would_alone(two: LTXClient) -> None:
    """Two guides at -1: the second is not moved by the tokens of the first, and their order does not matter."""
    stage = replace(DISTILLED, sigmas=(1.0, 0.5, 0.0))
    one, other = ((ImageCondition(-1, 1.0, crf=0), pictures(1, seed=seed)) for seed in (1, 2))
    drawn = (noise(1, 45 + 2 * 15, 16, seed=8), noise(1, 18, 32, seed=9))
    swapped = (torch.cat([drawn[0][:, :45], drawn[0][:, 60:], drawn[0][:, 45:60]], dim=1), drawn[1])
    first = two.sp_stage(stage, POSITIVE, None, ONE, conditions=[one, other], noise=drawn)
    second = two.sp_stage(stage, POSITIVE, None, ONE, conditions=[other, one], noise=swapped)
    assert relative_error(first.video, second.video) < 1e-5
    positive = ((ImageCondition(16, 1.0, crf=0), image) for _, image in (one, other))
    third = two.sp_stage(stage, POSITIVE, None, ONE, conditions=list(positive), noise=drawn)
    assert torch.equal(first.video, third.video)


def test_the_sound_that_is_kept_is_heard(two: LTXClient) -> None:
    keep = replace(DISTILLED, audio_mode="keep")
    clips = [two.sp_stage(keep, POSITIVE, None, ONE, audio_latent=sound) for sound in (SOUND, -SOUND)]
    assert torch.equal(clips[0].audio, SOUND) and not torch.allclose(clips[0].video, clips[1].video, atol=1e-4)
    silent = two.sp_stage(replace(DISTILLED, audio_mode="none"), POSITIVE, None, ONE)
    old_name = two.sp_stage(replace(DISTILLED, with_audio=False), POSITIVE, None, ONE)
    assert silent.audio is None and torch.equal(silent.video, old_name.video)


def test_a_reference_sound_is_heard_and_dropped(two: LTXClient) -> None:
    plain = two.sp_stage(DISTILLED, POSITIVE, None, ONE)
    heard = two.sp_stage(DISTILLED, POSITIVE, None, ONE, conditions=[HEARD])
    assert heard.audio.shape == plain.audio.shape and not torch.allclose(heard.audio, plain.audio, atol=1e-4)


def test_a_stage_starts_from_a_latent_when_its_sigmas_start_below_1(two: LTXClient) -> None:
    """Video to video: at a small first level the clip stays close to what it was, whatever the sampler."""
    start, sound = noise(1, 16, 3, 3, 5, seed=10), noise(1, 2, 18, 16, seed=11)
    for sampler in ("auto", "ancestral", "res_2s"):
        stage = replace(DISTILLED, sigmas=(0.002, 0.001, 0.0), sampler=sampler)
        made = two.sp_stage(stage, POSITIVE, None, start, audio_latent=sound)
        assert relative_error(made.video, start) < 0.1 and relative_error(made.audio, sound) < 0.1
        assert not torch.equal(made.video, start)


def test_one_pass_at_a_time_gives_the_same_clip(two: LTXClient) -> None:
    clips = [two.sp_stage(replace(STAGE, max_batch_size=rows), POSITIVE, NEGATIVE, ONE) for rows in (0, 1, 3)]
    for clip in clips[1:]:
        assert relative_error(clip.video, clips[0].video) < 1e-5 and relative_error(clip.audio, clips[0].audio) < 1e-5


def test_b108_res_2s_reports_each_step_once_and_is_cancelled_at_a_step(two: LTXClient) -> None:
    stage = replace(STAGE, steps=3, sampler="res_2s", preview=True)
    steps, images = [], []

    def note(event: Event) -> None:
        if event.kind == "preview":
            images.append(event.data["image"])
        elif event.data["stage"] == "SP stage":
            steps.append(event.data["step"])

    whole = two.sp_stage(stage, POSITIVE, NEGATIVE, ONE, watch=Watch(on_event=note))
    assert steps == [0, 1, 2, 3] and len(images) == 3 and images[0].shape == (96, 160, 3)
    steps.clear()
    long = replace(stage, steps=200, preview=False)
    with pytest.raises(JobCancelled):
        two.sp_stage(long, POSITIVE, NEGATIVE, ONE, watch=Watch(note, lambda: len(steps) > 2))
    assert steps[-1] < 100
    again = two.sp_stage(stage, POSITIVE, NEGATIVE, ONE)
    assert torch.equal(again.video, whole.video)
