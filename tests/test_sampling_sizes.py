"""Sizes, schedules, token order and positions against golden values and their sentences."""

import json
import re
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.mochi.pipeline_mochi import linear_quadratic_schedule
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from mgpu_runtime.sampling.patchify import audio_latent, audio_tokens, video_latent, video_tokens
from mgpu_runtime.sampling.positions import audio_positions, video_positions
from mgpu_runtime.sampling.sigmas import (
    DISTILLED_STAGE1,
    DISTILLED_STAGE2,
    TDP_STAGE2,
    beta_sigmas,
    check_sigmas,
    linear_quadratic_sigmas,
    ltx2_sigmas,
)
from mgpu_runtime.sampling.sizes import audio_latent_frames, latent_size, pixel_frames, round_frames_up

GOLDEN = Path(__file__).parent / "golden" / "golden"
SIGMAS = load_file(GOLDEN / "sigmas.safetensors")
POSITIONS = load_file(GOLDEN / "positions.safetensors")
SIZES = json.loads((GOLDEN / "latent_sizes.json").read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("name", [name for name in SIGMAS if name.startswith("ltx2")])
def test_b20_b21_schedule_equals_golden(name):
    steps, tokens = map(int, re.fullmatch(r".*steps(\d+)\.tokens\D*(\d+)", name).groups())
    options = {"stretch": False} if "nostretch" in name else {"terminal": 0.05} if "terminal0.05" in name else {}
    torch.testing.assert_close(torch.tensor(ltx2_sigmas(steps, tokens, **options)), SIGMAS[name], rtol=0, atol=3e-7)


def test_b20_the_anchor_is_the_default_and_the_token_count_matters():
    assert ltx2_sigmas(20) == ltx2_sigmas(20, 4096) != ltx2_sigmas(20, 6144)


@pytest.mark.parametrize("steps", [2, 3, 8, 25, 30, 40])
def test_b21_linear_quadratic_equals_diffusers(steps):
    expected = [*linear_quadratic_schedule(steps, 0.025), 0.0]
    assert linear_quadratic_sigmas(steps) == pytest.approx(expected, abs=1e-12)


def test_the_distilled_list_is_linear_quadratic():
    assert linear_quadratic_sigmas(8) == pytest.approx(DISTILLED_STAGE1, abs=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 8, 30])
def test_b21_beta_is_the_official_shift_of_diffusers_quantiles(steps):
    quantiles = FlowMatchEulerDiscreteScheduler()._convert_to_beta(torch.tensor([1.0, 0.0]), steps + 1)[:-1]
    times = ((torch.tensor(quantiles, dtype=torch.float64) * 9999).round() + 1) / 10000
    expected = (2.37 + (times / (1 - times)).log()).sigmoid()
    assert beta_sigmas(steps) == pytest.approx([*expected.tolist(), 0.0], abs=1e-9)


def test_steps_that_meet_in_beta_count_once():
    assert len(beta_sigmas(1000)) < 1001 and check_sigmas(beta_sigmas(1000)) == beta_sigmas(1000)


@given(st.integers(1, 200), st.sampled_from([linear_quadratic_sigmas, beta_sigmas]))
def test_other_schedules_pass_the_check_too(steps, schedule):
    sigmas = schedule(steps)
    assert check_sigmas(sigmas) == sigmas and len(sigmas) <= steps + 1
    assert sigmas[0] == 1.0 and sigmas[-1] == 0.0


@pytest.mark.parametrize("schedule", [linear_quadratic_sigmas, beta_sigmas, ltx2_sigmas])
def test_a_schedule_of_no_step_is_refused(schedule):
    with pytest.raises(ValueError, match="at least 1 step"):
        schedule(0)


def test_b22_fixed_lists_equal_golden():
    for levels, name in (
        (DISTILLED_STAGE1, "distilled_stage1"),
        (DISTILLED_STAGE2, "distilled_stage2"),
        (TDP_STAGE2, "tdp_stage2"),
    ):
        assert torch.equal(torch.tensor(levels), SIGMAS[name])


def test_b22_explicit_sigmas_are_unchanged_and_0_is_appended_once():
    assert check_sigmas(DISTILLED_STAGE1) == DISTILLED_STAGE1
    assert check_sigmas([0.625, 0.4]) == (0.625, 0.4, 0.0)
    assert check_sigmas(torch.tensor([0.5, 0.25, 0.0])) == (0.5, 0.25, 0.0)


@given(st.integers(1, 60), st.integers(1, 200_000))
def test_every_schedule_passes_its_own_check(steps, tokens):
    sigmas = ltx2_sigmas(steps, tokens)
    assert len(sigmas) == steps + 1 and sigmas[-2] == pytest.approx(0.1)
    assert check_sigmas(sigmas) == sigmas


@pytest.mark.parametrize(
    "levels, words",
    [
        ([0.5, 0.5], "0.5 follows 0.5"),
        ([0.4, 0.6, 0], "0.6 follows 0.4"),
        ([1.5, 0.0], "1.5"),
        ([0.5, -0.1], "-0.1"),
        ([float("nan"), 0.0], "nan"),
        ([], "at least one"),
        ([0.0], "at least one"),
    ],
)
def test_bad_sigmas_are_refused(levels, words):
    with pytest.raises(ValueError, match=words):
        check_sigmas(levels)


@pytest.mark.parametrize("row", SIZES, ids=str)
def test_b31_latent_sizes_equal_golden(row):
    frames, height, width, fps, *expected = row
    size = latent_size(frames, height, width, fps)
    assert [*size.grid, size.audio_frames] == expected
    assert pixel_frames(size.frames) == frames


def test_b31_audio_count_rounds_halves_to_even():
    assert audio_latent_frames(49, 50) == 24  # 24.5
    assert audio_latent_frames(51, 50) == 26  # 25.5
    assert audio_latent_frames(121, 24) == 126  # 126.04
    assert audio_latent_frames(1, 240) == 1


def test_b27_frames_round_up_to_8k_plus_1():
    assert [round_frames_up(n) for n in (1, 2, 9, 72, 73)] == [1, 9, 9, 73, 73]
    with pytest.raises(ValueError, match="got 72. The nearest are 65 and 73"):
        latent_size(72, 64, 64, 24)
    for frames in (0, -1):
        with pytest.raises(ValueError, match="at least 1 frame"):
            round_frames_up(frames)
        with pytest.raises(ValueError, match="at least 1 frame"):
            latent_size(frames, 64, 64, 24)


def test_b29_two_stages_need_multiples_of_64():
    assert latent_size(9, 800, 1920, 24).grid == (2, 25, 60)
    with pytest.raises(ValueError, match="height must be a multiple of 64, got 800. The nearest: 768 and 832"):
        latent_size(9, 800, 1920, 24, spatial_upscale=2)


def test_b30_other_factors_give_other_steps():
    assert latent_size(9, 576, 768, 24, spatial_upscale=1.5).grid == (2, 18, 24)
    with pytest.raises(ValueError, match="height must be a multiple of 96, got 512"):
        latent_size(9, 512, 768, 24, spatial_upscale=1.5)


@pytest.mark.parametrize("height, width, words", [(0, 64, "at least 32"), (64, -32, "at least 32"), (16, 64, "32")])
def test_bad_sides_are_refused(height, width, words):
    with pytest.raises(ValueError, match=words):
        latent_size(9, height, width, 24)


@pytest.mark.parametrize("fps", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_fps_is_refused(fps):
    with pytest.raises(ValueError, match="fps"):
        audio_latent_frames(9, fps)


def test_b16_too_many_tokens_are_refused_before_anything_is_allocated():
    with pytest.raises(ValueError, match=r"768x1280.*16x24x40 = 15360.*limit of 1000"):
        latent_size(121, 768, 1280, 24, max_tokens=1000)
    with pytest.raises(ValueError, match="not pixels"):
        video_positions((16, 768, 1280), 24)


def test_token_order_equals_golden():
    golden = load_file(GOLDEN / "patchify.safetensors")
    video, audio = golden["video"], golden["audio"]
    assert torch.equal(video_tokens(video), golden["out.video_tokens"])
    assert torch.equal(audio_tokens(audio), golden["out.audio_tokens"])
    assert torch.equal(video_latent(golden["out.video_tokens"], video.shape[2:]), video)
    assert torch.equal(audio_latent(golden["out.audio_tokens"], audio.shape[1]), audio)


def test_appended_tokens_are_dropped():
    tokens = torch.randn(2, 12 + 5, 4)
    assert torch.equal(video_tokens(video_latent(tokens, (3, 2, 2))), tokens[:, :12])


@pytest.mark.parametrize("name", sorted(POSITIONS))
def test_b18_positions_equal_golden_exactly(name):
    if name.startswith("audio"):
        positions = audio_positions(int(name.removeprefix("audio.n")))
    else:
        *grid, fps = re.fullmatch(r"video\.f(\d+)h(\d+)w(\d+)fps(.+)", name).groups()
        positions = video_positions(tuple(map(int, grid)), float(fps))
    assert positions.dtype == torch.float32
    assert torch.equal(positions, POSITIONS[name])
