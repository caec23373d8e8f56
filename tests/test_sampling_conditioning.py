"""Conditioning: where tokens lie, what of them is kept, who sees whom; against the official values and diffusers."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2ConditionPipeline
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2InContextPipeline
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mgpu_runtime.sampling.conditioning import (
    append_keyframe,
    append_reference,
    append_reference_audio,
    place_latent,
)
from mgpu_runtime.sampling.denoiser import GuidedDenoiser
from mgpu_runtime.sampling.loop import denoise_loop
from mgpu_runtime.sampling.noise import item_generators
from mgpu_runtime.sampling.patchify import audio_latent, video_latent, video_tokens
from mgpu_runtime.sampling.positions import audio_positions, reference_positions, video_positions
from mgpu_runtime.sampling.state import StreamState, add_noise, audio_state, video_state
from tests.goldens import Case, golden, relative_error
from tests.tiny import transformer

OFFICIAL = load_file(Path(__file__).parent / "conditioning_23.safetensors")  # of the golden case tdp_23_cond


def latent(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def official_state() -> StreamState:
    """The conditions of the golden case: first frame, keyframe, negative-time keyframe, half-size reference."""
    video = place_latent(video_state(torch.zeros(1, 16, 2, 6, 7), 24.0), latent(1, 16, 1, 6, 7), 1.0)
    video = append_keyframe(video, latent(1, 16, 1, 6, 7), 8, 0.8, 24.0)
    video = append_keyframe(video, latent(1, 16, 1, 6, 7), -8, 1.0, 24.0)
    return append_reference(video, latent(1, 16, 2, 3, 3), 1.0, 24.0, downscale=2, attention=0.6)


def test_positions_of_all_kinds_equal_the_official_ones_exactly():
    assert torch.equal(official_state().positions, OFFICIAL["positions"])


def test_masks_of_all_kinds_equal_the_official_ones():
    state = official_state()
    torch.testing.assert_close(state.denoise_mask, OFFICIAL["denoise_mask"], atol=1e-6, rtol=0)
    assert torch.equal(state.keyframes_mask, OFFICIAL["keyframes_mask"].float())
    torch.testing.assert_close(state.attention_mask, OFFICIAL["attention_percent"].float() / 100, atol=1e-6, rtol=0)
    assert state.num_own == 84 and state.num_appended == 102


def i2v_state(case: Case, stage: str) -> StreamState:
    initial = case.get(f"{stage}.initial_video_latent")
    grid = tuple(case[f"out.{stage}.video"].shape[2:])
    video = video_state(torch.zeros(1, 16, *grid) if initial is None else initial, case.facts["fps"])
    video = place_latent(video, case[f"{stage}.image_latent_frame0"], 1.0)
    return append_keyframe(video, case[f"{stage}.image_latent_keyframe"], 8, 0.8, case.facts["fps"])


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_image_to_video_states_and_loops_equal_golden(stage):
    case = golden("loop_23_i2v_distilled")
    video = i2v_state(case, stage)
    for name in ("positions", "denoise_mask", "keyframes_mask"):
        torch.testing.assert_close(getattr(video, name), case[f"{stage}.video_{name}"], atol=1e-6, rtol=0)
    # the golden holds what its own tokens start from, which the mask lets through only where it is 1
    kept = video.denoise_mask < 1
    assert torch.equal((video.clean * kept), case[f"{stage}.video_clean_latent"] * kept)
    level = case[f"{stage}.sigmas"][0].item()
    sound = torch.zeros(1, 2, 9, 16) if stage == "stage1" else case["out.stage1.audio"]
    context = SimpleNamespace(video=case["video_context"], audio=case["audio_context"], mask=None)
    video, audio = denoise_loop(
        video.with_noise(case[f"{stage}.video_noise"], level),
        audio_state(sound).with_noise(case[f"{stage}.audio_noise"], level),
        case[f"{stage}.sigmas"],
        GuidedDenoiser(transformer("23"), context),
    )
    out = case[f"out.{stage}.video"]
    assert relative_error(video_latent(video.latent, tuple(out.shape[2:])), out) < 1e-3
    assert relative_error(audio_latent(audio.latent, 2), case[f"out.{stage}.audio"]) < 1e-3


def diffusers_condition() -> SimpleNamespace:
    return SimpleNamespace(
        transformer_spatial_patch_size=1,
        transformer_temporal_patch_size=1,
        vae_temporal_compression_ratio=8,
        vae_spatial_compression_ratio=32,
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(-40, 40), st.sampled_from([24.0, 29.97]))
def test_b39_keyframe_positions_equal_diffusers(frames, height, width, frame, fps):
    if frame == 0:  # diffusers has no rule of its own there: such a picture takes the clip's first frame
        frame = 1
    video = append_keyframe(
        video_state(torch.zeros(1, 2, 1, 1, 1), fps), torch.zeros(1, 2, frames, height, width), frame, 1.0, fps
    )
    expected = LTX2ConditionPipeline._prepare_keyframe_coords(
        diffusers_condition(), frames, height, width, frame, 1 if frames == 1 else 9, fps, torch.device("cpu")
    )
    assert torch.equal(video.positions[:, :, 1:], expected)


def test_b39_keyframes_land_at_the_same_place_in_any_order_and_number():
    base = video_state(torch.zeros(1, 2, 3, 2, 2), 24.0)
    one, other = latent(1, 2, 1, 2, 2, seed=1), latent(1, 2, 1, 2, 2, seed=2)
    first = append_keyframe(append_keyframe(base, one, 16, 1.0, 24.0), other, 8, 1.0, 24.0)
    second = append_keyframe(append_keyframe(base, other, 8, 1.0, 24.0), one, 16, 1.0, 24.0)
    assert torch.equal(first.positions[:, :, 12:16], second.positions[:, :, 16:])
    assert torch.equal(first.positions[:, :, 16:], second.positions[:, :, 12:16])
    torch.testing.assert_close(first.positions[0, 0, 12], torch.tensor([16 / 24, 17 / 24]))


def test_a_keyframe_at_frame_0_lies_as_the_clip_itself():
    video = append_keyframe(video_state(torch.zeros(1, 2, 3, 2, 2), 25.0), latent(1, 2, 3, 2, 2), 0, 1.0, 25.0)
    assert torch.equal(video.positions[:, :, 12:], video.positions[:, :, :12])


@pytest.mark.parametrize("time_scale", [1, 2, 4])
@pytest.mark.parametrize("downscale", [1, 2])
def test_a_reference_covers_the_whole_clip(time_scale, downscale):
    """A reference of (N-1)/S + 1 frames begins and ends with the clip of N frames, at its full size."""
    frames = 2 * time_scale + 1
    clip = video_positions((frames, 4, 4), 24.0)
    reference = reference_positions(
        (3, 4 // downscale, 4 // downscale), 24.0, downscale=downscale, time_scale=time_scale
    )
    torch.testing.assert_close(reference.amin((0, 2, 3)), clip.amin((0, 2, 3)))
    torch.testing.assert_close(reference.amax((0, 2, 3)), clip.amax((0, 2, 3)))
    first = clip[..., 0, :] * torch.tensor([1.0, downscale, downscale])[:, None]
    torch.testing.assert_close(reference[..., 0, :], first)
    torch.testing.assert_close(reference[0, 0, :, 1].diff().max(), torch.tensor(8 * time_scale / 24))


@pytest.mark.parametrize("num_keyframes", [0, 1])
@pytest.mark.parametrize("strengths", [(0.6,), (0.0, 0.25)])
def test_attention_strength_equals_diffusers(num_keyframes, strengths):
    video = video_state(torch.zeros(1, 2, 2, 2, 3), 24.0)
    for _ in range(num_keyframes):
        video = append_keyframe(video, latent(1, 2, 1, 2, 3), 8, 1.0, 24.0)
    prefix = video.latent.shape[1]
    for strength in strengths:
        video = append_reference(video, latent(1, 2, 2, 1, 1), 1.0, 24.0, attention=strength)
    expected = LTX2InContextPipeline._build_video_self_attention_mask(
        12, prefix, [torch.full((1, 2), strength) for strength in strengths], torch.device("cpu")
    )
    assert torch.equal(video.attention_mask, expected)


def test_without_any_strength_there_is_no_mask_and_after_one_there_is():
    base = video_state(torch.zeros(2, 2, 2, 2, 2), 24.0)
    plain = append_keyframe(base, latent(1, 2, 1, 2, 2), 8, 1.0, 24.0)
    assert plain.attention_mask is None
    masked = append_keyframe(plain, latent(1, 2, 1, 2, 2), 4, 1.0, 24.0, attention=0.5)
    later = append_keyframe(masked, latent(1, 2, 1, 2, 2), 2, 1.0, 24.0)
    assert later.attention_mask.shape == (1, 20, 20)  # one for both clips
    assert torch.equal(later.attention_mask[:, :16, :16], masked.attention_mask)
    assert (later.attention_mask[:, 16:, :8] == 1).all() and (later.attention_mask[:, 8:16, 16:] == 0).all()


@pytest.mark.parametrize("strength", [0.0, 0.25, 0.75, 1.0])
def test_b40_strength_enters_once_in_place_and_appended(strength):
    """Before the first step a token is clean*(1 - l) + noise*l at level l = (1-s)*sigma, which its timestep says."""
    picture, sigma = latent(1, 4, 1, 2, 2), 0.909375
    video = place_latent(video_state(torch.zeros(1, 4, 2, 2, 2), 24.0), picture, strength)
    video = append_keyframe(video, picture, 8, strength, 24.0)
    noise = latent(1, 12, 4, seed=3)
    noisy = video.with_noise(noise, sigma)
    level = (1 - strength) * sigma
    clean = video_tokens(picture)
    torch.testing.assert_close(noisy.latent[:, :4], clean * (1 - level) + noise[:, :4] * level)
    # an appended token starts from nothing, so that the content it does not keep fades with the noise it gets
    appended = strength * clean + (1 - strength) * sigma * noise[:, 8:]
    torch.testing.assert_close(noisy.latent[:, 8:], appended)
    timesteps = noisy.timesteps(sigma)
    expected = torch.full((1, 4), level)
    if strength == 0.0:  # all tokens share one
        assert timesteps.shape == (1, 1) and timesteps.item() == pytest.approx(sigma)
    else:
        torch.testing.assert_close(timesteps[:, :4], expected)
        torch.testing.assert_close(timesteps[:, 8:], expected)


@pytest.mark.parametrize("channels", [3, 12, 20])
def test_b25_masks_of_conditions_scale_tokens_not_channels(channels):
    """8 + 4 tokens, as many as, more and fewer than channels; two clips."""
    base = video_state(latent(2, channels, 2, 2, 2), 24.0)
    video = append_keyframe(
        place_latent(base, latent(1, channels, 1, 2, 2), 1.0), latent(1, channels, 1, 2, 2), 8, 0.5, 24.0
    )
    assert video.denoise_mask.shape == (2, 12, 1)
    tokens = latent(2, 12, channels, seed=4)
    kept = video.keep_clean(tokens)
    assert torch.equal(kept[:, :4], video.clean[:, :4]) and torch.equal(kept[:, 4:8], tokens[:, 4:8])
    torch.testing.assert_close(kept[:, 8:], (tokens[:, 8:] + video.clean[:, 8:]) / 2)


def test_a_clip_in_place_fills_its_latent_frames():
    clip = latent(1, 4, 2, 2, 3)
    video = place_latent(video_state(torch.zeros(1, 4, 3, 2, 3), 24.0), clip, 1.0)
    assert torch.equal(video_latent(video.clean, (3, 2, 3))[:, :, :2], clip)
    assert video.denoise_mask.flatten().tolist() == [0.0] * 12 + [1.0] * 6 and not video.generates_all


def test_noise_is_drawn_for_appended_tokens_video_first():
    video = append_keyframe(video_state(torch.zeros(1, 4, 2, 1, 1), 24.0), latent(1, 4, 1, 1, 1), 8, 0.5, 24.0)
    audio = append_reference_audio(audio_state(torch.zeros(1, 2, 3, 2)), latent(1, 2, 2, 2), 1.0)
    noisy_video, noisy_audio = add_noise(video, audio, item_generators(6, 1), 1.0)
    generator = torch.Generator().manual_seed(6)
    video_noise, audio_noise = torch.randn(1, 3, 4, generator=generator), torch.randn(1, 5, 4, generator=generator)
    assert torch.equal(noisy_video.latent[:, :2], video_noise[:, :2])
    torch.testing.assert_close(noisy_video.latent[:, 2:], torch.lerp(video.clean[:, 2:], video_noise[:, 2:], 0.5))
    assert torch.equal(noisy_audio.latent[:, :3], audio_noise[:, :3])
    assert torch.equal(noisy_audio.latent[:, 3:], audio.clean[:, 3:])


@pytest.mark.parametrize("length", [1, 5, 126])
def test_a_reference_sound_ends_just_before_the_clip(length):
    audio = append_reference_audio(audio_state(torch.zeros(2, 2, 9, 16)), latent(1, 2, length, 16), 1.0)
    heard = audio.positions[:, :, 9:]
    torch.testing.assert_close(heard.max(), torch.tensor(-0.04))
    shifted = audio_positions(length, batch=2)
    torch.testing.assert_close(heard - heard[:, :, :1, :1], shifted - shifted[:, :, :1, :1], atol=1e-6, rtol=0)
    assert audio.num_own == 9 and (audio.denoise_mask[:, 9:] == 0).all() and audio.keyframes_mask is None


def test_conditions_are_shared_by_all_clips_of_a_batch():
    two = append_keyframe(video_state(latent(2, 4, 2, 1, 2), 24.0), latent(1, 4, 1, 1, 2), 8, 1.0, 24.0)
    assert torch.equal(two.clean[0, 4:], two.clean[1, 4:]) and two.positions.shape == (2, 3, 6, 2)
