"""Steppers and whole denoise loops against the official ones."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch

from mgpu_runtime.models.transformer_builder import build_transformer
from mgpu_runtime.sampling.denoiser import GuidedDenoiser
from mgpu_runtime.sampling.guidance import NEUTRAL
from mgpu_runtime.sampling.loop import denoise_loop
from mgpu_runtime.sampling.patchify import audio_latent, video_latent
from mgpu_runtime.sampling.state import StreamState, audio_state, video_state
from mgpu_runtime.sampling.steppers import AncestralStepper, ancestral, euler
from mgpu_runtime.weights.registry import StateDictRegistry
from tests.goldens import GOLDEN, Case, golden, guider, relative_error

STEPS = (0, 3, 5, 7)


@cache
def tiny_transformer(style: str):
    path = GOLDEN / "checkpoints" / f"tiny_ltx{style}.safetensors"
    return build_transformer(path, registry=StateDictRegistry(), device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("step", STEPS)
def test_one_step_equals_golden(step):
    case = golden("steppers")
    sigma, sigma_next = case["sigmas"][step : step + 2].tolist()
    stepped = euler(case["sample"], case["denoised"], sigma, sigma_next)
    assert relative_error(stepped, case[f"out.euler.step{step}"]) < 1e-5
    for eta in (0.5, 1.0):
        stepped = ancestral(case["sample"], case["denoised"], sigma, sigma_next, case["noise"], eta)
        assert relative_error(stepped, case[f"out.ancestral.eta{eta}.step{step}"]) < 1e-5


def test_ancestral_without_noise_is_euler():
    sample, denoised = torch.randn(1, 4, 3), torch.randn(1, 4, 3)
    stepped = ancestral(sample, denoised, 0.8, 0.5, torch.randn(1, 4, 3), eta=0.0)
    torch.testing.assert_close(stepped, euler(sample, denoised, 0.8, 0.5))


def test_ancestral_noise_is_seeded_per_clip_and_keeps_what_must_be_kept():
    latent = torch.randn(2, 4, 2, 2, 2)
    mask = torch.ones(2, 2, 2)
    mask[0] = 0.0
    state = video_state(latent, 24.0, noise_mask=mask)
    denoised = torch.randn(2, 8, 4)
    stepped = AncestralStepper(7, 2)(state, denoised, 0.9, 0.5)
    assert torch.equal(stepped[:, :4], state.clean[:, :4])
    generator = torch.Generator().manual_seed(10000 + 8)
    noise = torch.randn(1, 8, 4, generator=generator)
    expected = ancestral(state.latent[1:], denoised[1:], 0.9, 0.5, noise)
    assert torch.equal(stepped[1:, 4:], expected[:, 4:])
    assert torch.equal(AncestralStepper(7, 2)(state, denoised, 0.4, 0.0), denoised)


def contexts(case: Case, tail: str = "") -> SimpleNamespace:
    return SimpleNamespace(video=case[f"video_context{tail}"], audio=case[f"audio_context{tail}"], mask=None)


def first_states(case: Case, stage: str, audio: torch.Tensor) -> tuple[StreamState, StreamState]:
    """Builds the states of a stage from the case's latents, the way a stage does from ComfyUI's."""
    grid = video_grid(case, stage)
    initial = case.get(f"{stage}.initial_video_latent")
    video = video_state(torch.zeros(1, 16, *grid) if initial is None else initial, case.facts["fps"])
    clean, mask = case[f"{stage}.video_clean_latent"], case[f"{stage}.video_denoise_mask"]
    if not torch.equal(mask, video.denoise_mask):  # conditioned: kept frame 0, appended keyframe tokens
        latent = torch.zeros_like(clean)
        latent[:, : video.latent.shape[1]] = video.latent
        positions, keyframes = case[f"{stage}.video_positions"], case[f"{stage}.video_keyframes_mask"]
        video = StreamState(latent, clean, mask, positions, keyframes)
    assert torch.equal(video.positions, case[f"{stage}.video_positions"])
    assert torch.equal(video.keyframes_mask, case[f"{stage}.video_keyframes_mask"])
    level = case[f"{stage}.sigmas"][0].item()
    return (
        video.with_noise(case[f"{stage}.video_noise"], level),
        audio_state(audio).with_noise(case[f"{stage}.audio_noise"], level),
    )


def video_grid(case: Case, stage: str) -> tuple[int, int, int]:
    frames, height, width = case.facts["latent"]
    factor = int(stage[-1])
    return frames, height * factor, width * factor


@pytest.mark.parametrize("name", ["loop_23_t2v_distilled", "loop_23_i2v_distilled", "loop_20_t2v_distilled"])
@torch.no_grad()
def test_both_stages_equal_golden(name):
    case = golden(name)
    model = tiny_transformer(case.facts["style"])
    audio = torch.zeros(1, 2, case.facts["audio_frames"], 16)
    for stage in ("stage1", "stage2"):  # the second goes on with the first one's sound
        video_in, audio_in = first_states(case, stage, audio)
        seen = []
        video, sound = denoise_loop(
            video_in,
            audio_in,
            case[f"{stage}.sigmas"],
            GuidedDenoiser(model, contexts(case)),
            on_step=lambda *step: seen.append(step),  # noqa: B023 (used within this turn only)
        )
        for number, (done, of, _, video_x0, audio_x0) in enumerate(seen):
            assert (done, of) == (number + 1, len(seen))
            kept = video_in.keep_clean(case[f"{stage}.step{number}.video_denoised"])
            assert relative_error(video_x0, kept) < 1e-4
            assert relative_error(audio_x0, case[f"{stage}.step{number}.audio_denoised"]) < 1e-4
        audio = audio_latent(sound.latent, channels=2)
        result = video_latent(video.latent, video_grid(case, stage))
        assert relative_error(result, case[f"out.{stage}.video"]) < 1e-5
        assert relative_error(audio, case[f"out.{stage}.audio"]) < 1e-5


@pytest.mark.parametrize("max_batch_size", [None, 1])
@torch.no_grad()
def test_guided_loop_with_a_first_frame_equals_golden(max_batch_size):
    case = golden("loop_23_guided")
    guiders = [guider(case.facts[name]) for name in ("video_guider", "audio_guider")]
    latent = torch.zeros(1, 16, 2, 2, 3)
    latent[:, :, :1] = case["image_latent_frame0"]
    noise_mask = torch.ones(1, 1, 2, 1, 1)
    noise_mask[:, :, 0] = 0.0
    denoise = GuidedDenoiser(
        tiny_transformer("23"),
        contexts(case, "_positive"),
        contexts(case, "_negative"),
        video=guiders[0],
        audio=guiders[1],
        num_layers=2,
        max_batch_size=max_batch_size,
    )
    video, audio = denoise_loop(
        video_state(latent, 24.0, noise_mask=noise_mask).with_noise(case["video_noise"], case["sigmas"][0].item()),
        audio_state(torch.zeros(1, 2, 9, 16)).with_noise(case["audio_noise"], case["sigmas"][0].item()),
        case["sigmas"],
        denoise,
    )
    assert relative_error(video_latent(video.latent, (2, 2, 3)), case["out.video"]) < 1e-4
    assert relative_error(audio_latent(audio.latent, 2), case["out.audio"]) < 1e-4


def test_loop_leaves_absent_and_frozen_streams_alone():
    audio = audio_state(torch.randn(1, 2, 3, 4), frozen=True)

    def denoise(video, audio, sigma, step):
        return None, None

    assert denoise_loop(None, audio, [0.5, 0.0], denoise) == (None, audio)


def test_a_bad_schedule_is_refused_before_the_model_is_called():
    with pytest.raises(ValueError, match="Sigmas must fall"):
        denoise_loop(None, None, [0.5, 0.6], None)


def test_neutral_guidance_is_the_default():
    assert not (NEUTRAL.needs_uncond or NEUTRAL.needs_perturbed or NEUTRAL.needs_isolated)
