"""Stream states: masks, strengths, noise per clip, incoming audio."""

import logging

import pytest
import torch

from mgpu_runtime.sampling.loop import denoise_loop
from mgpu_runtime.sampling.noise import draw_noise, item_generators
from mgpu_runtime.sampling.patchify import video_tokens
from mgpu_runtime.sampling.state import StreamState, add_noise, audio_state, fit_audio_latent, video_state


def test_noise_is_video_first_and_goes_on_in_the_same_stream():
    shapes = [(12, 4), (5, 3)]
    generator = torch.Generator().manual_seed(10)
    expected = [torch.randn(1, *shape, generator=generator) for _ in range(2) for shape in shapes]
    generators = item_generators(10, 1)
    drawn = draw_noise(generators, shapes) + draw_noise(generators, shapes)  # stage 1, then stage 2
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))


def test_b37_item_k_of_a_batch_has_the_noise_of_seed_plus_k():
    video, audio = draw_noise(item_generators(7, 3), [(12, 4), (5, 3)])
    for item in range(3):
        alone = draw_noise(item_generators(7 + item, 1), [(12, 4), (5, 3)])
        assert torch.equal(video[item], alone[0][0])
        assert torch.equal(audio[item], alone[1][0])


def test_the_largest_seed_wraps():
    assert item_generators(2**64 - 1, 2)[1].initial_seed() == 0


def test_plain_latent_becomes_pure_noise_at_scale_1():
    video, audio = video_state(torch.zeros(2, 4, 3, 2, 2), 24.0), audio_state(torch.zeros(2, 2, 9, 16))
    noisy_video, noisy_audio = add_noise(video, audio, item_generators(3, 2), 1.0)
    noise = draw_noise(item_generators(3, 2), [(12, 4), (9, 32)])
    assert torch.equal(noisy_video.latent, noise[0]) and torch.equal(noisy_audio.latent, noise[1])
    assert noisy_video.timesteps(0.5).shape == (2, 1)  # one timestep does for all tokens


def test_b22_second_stage_starts_from_a_mix_at_its_first_sigma():
    latent = torch.randn(1, 4, 3, 2, 2)
    (noise,) = draw_noise(item_generators(3, 1), [(12, 4)])
    video, _ = add_noise(video_state(latent, 24.0), None, item_generators(3, 1), 0.909375)
    expected = video_tokens(latent) * (1 - 0.909375) + noise * 0.909375
    torch.testing.assert_close(video.latent, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("channels", [6, 12, 20])  # below, equal to and above the 12 tokens
def test_b25_mask_scales_tokens_not_channels(channels):
    latent = torch.randn(2, channels, 3, 2, 2)
    mask = torch.ones(2, 1, 3, 2, 2)
    mask[:, :, 0] = 0.0
    state = video_state(latent, 24.0, noise_mask=mask)
    assert state.denoise_mask.shape == (2, 12, 1)
    (noise,) = draw_noise(item_generators(0, 2), [(12, channels)])
    noisy = state.with_noise(noise, 1.0)
    assert torch.equal(noisy.latent[:, :4], video_tokens(latent)[:, :4])  # the first frame is kept
    assert torch.equal(noisy.latent[:, 4:], noise[:, 4:])
    kept = state.keep_clean(torch.zeros(2, 12, channels))
    assert torch.equal(kept[:, :4], video_tokens(latent)[:, :4]) and torch.all(kept[:, 4:] == 0)
    assert torch.equal(state.timesteps(0.5), (state.denoise_mask * 0.5)[..., 0])


def test_b25_a_mask_without_its_trailing_axis_is_not_accepted():
    tokens = torch.zeros(1, 4, 4)
    with pytest.raises(AssertionError):
        StreamState(tokens, tokens, torch.ones(1, 4), torch.zeros(1, 3, 4, 2))


@pytest.mark.parametrize("strength", [0.0, 0.25, 0.75, 1.0])
def test_b40_strength_enters_once(strength):
    latent = torch.randn(1, 4, 2, 2, 2)
    mask = torch.ones(1, 1, 2, 1, 1)
    mask[:, :, 0] = 1.0 - strength
    state = video_state(latent, 24.0, noise_mask=mask)
    noise = torch.randn(1, 8, 4)
    noisy = state.with_noise(noise, 1.0)
    level = state.timesteps(1.0).expand(1, 8)[0, 0].item()
    assert level == pytest.approx(1.0 - strength)
    expected = (1 - level) * video_tokens(latent)[:, :4] + level * noise[:, :4]
    torch.testing.assert_close(noisy.latent[:, :4], expected, rtol=0, atol=1e-6)


def test_b40_a_perfect_model_ends_at_a_pinned_frame():
    latent = torch.randn(1, 4, 2, 2, 2)
    mask = torch.ones(2, 1, 1)
    mask[0] = 0.0
    state = video_state(latent, 24.0, noise_mask=mask)
    noisy = state.with_noise(torch.randn(1, 8, 4), 1.0)
    result, _ = denoise_loop(noisy, None, [1.0, 0.5, 0.0], lambda video, audio, sigma, step: (video.latent * 0, None))
    assert torch.equal(result.latent[:, :4], video_tokens(latent)[:, :4])
    assert result.latent[:, 4:].abs().max() < 1e-6


@pytest.mark.parametrize("shape", [(1, 1, 3, 1, 1), (2, 1, 3, 2, 4), (3, 2, 4), (3, 1, 1), (2, 4), (1, 1, 1, 2, 4)])
def test_noise_masks_of_many_shapes(shape):
    mask = torch.rand(shape)
    state = video_state(torch.zeros(2, 5, 3, 2, 4), 24.0, noise_mask=mask)
    five = mask if mask.dim() == 5 else mask.reshape(1, 1, -1, *shape[-2:])
    assert torch.equal(state.denoise_mask, video_tokens(five.expand(2, 1, 3, 2, 4)))


def test_noise_mask_of_the_picture_size_is_resampled():
    state = video_state(torch.zeros(1, 5, 3, 2, 4), 24.0, noise_mask=torch.ones(1, 64, 128))
    assert state.generates_all


@pytest.mark.parametrize(
    "mask, words",
    [
        (torch.ones(3, 1, 3, 2, 4), "2 clips"),
        (torch.ones(2, 5, 3, 2, 4), "2 clips"),
        (torch.full((3, 2, 4), 1.5), "0 .keep. to 1"),
        (torch.full((3, 2, 4), float("nan")), "0 .keep. to 1"),
        (torch.ones(4), "2 to 5 axes"),
    ],
)
def test_bad_noise_masks_are_refused(mask, words):
    with pytest.raises(ValueError, match=words):
        video_state(torch.zeros(2, 5, 3, 2, 4), 24.0, noise_mask=mask)


def test_first_latent_frame_is_a_keyframe():
    state = video_state(torch.zeros(1, 5, 3, 2, 4), 24.0)
    assert state.keyframes_mask[0, :, 0].tolist() == [1.0] * 8 + [0.0] * 16


def test_frozen_audio_keeps_its_latent_and_draws_no_noise():
    latent = torch.randn(1, 2, 9, 16)
    video, audio = video_state(torch.zeros(1, 4, 3, 2, 2), 24.0), audio_state(latent, frozen=True)
    noisy_video, same = add_noise(video, audio, item_generators(5, 1), 1.0)
    assert same is audio
    assert torch.equal(noisy_video.latent, draw_noise(item_generators(5, 1), [(12, 4)])[0])
    assert torch.equal(audio.timesteps(0.7), torch.zeros(1, 1)) and audio.stream_sigma(0.7) == 0.0


def test_b31_audio_one_frame_off_is_fitted_with_a_warning(caplog):
    latent = torch.randn(1, 2, 9, 16)
    with caplog.at_level(logging.WARNING, logger="mgpu"):
        shorter, longer = fit_audio_latent(latent, 8, 1), fit_audio_latent(latent, 10, 1)
    assert torch.equal(shorter, latent[:, :, :8])
    assert torch.equal(longer[:, :, :9], latent) and torch.equal(longer[:, :, 9], latent[:, :, 8])
    assert [record.args[:2] for record in caplog.records] == [(9, 8), (9, 10)]


def test_b31_audio_further_off_is_refused():
    with pytest.raises(ValueError, match="9 frames.*needs 11"):
        fit_audio_latent(torch.zeros(1, 2, 9, 16), 11, 1)


def test_b35_audio_batch_of_1_is_shared_and_others_are_refused():
    assert fit_audio_latent(torch.zeros(1, 2, 9, 16), 9, 10).shape == (10, 2, 9, 16)
    with pytest.raises(ValueError, match="3 clips.*10"):
        fit_audio_latent(torch.zeros(3, 2, 9, 16), 9, 10)


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[1.0, 0.0, 1.0]]),
        torch.tensor([[1.0, 0.0, 1.0]]).view(1, 1, 3, 1).expand(1, 2, 3, 16),
        torch.tensor([[1.0, 0.0]]),  # one off, as an audio latent may be
        torch.tensor([[1.0, 0.0, 1.0, 1.0]]),
    ],
)
def test_a_noise_mask_of_the_sound_keeps_moments(mask):
    latent = torch.randn(2, 2, 3, 16)
    state = audio_state(latent, noise_mask=mask)
    expected = [1.0, 0.0, 0.0] if mask.shape[1] == 2 and mask.dim() == 2 else [1.0, 0.0, 1.0]
    assert state.denoise_mask[:, :, 0].tolist() == [expected] * 2 and not state.generates_all
    noisy = state.with_noise(torch.randn(2, 3, 32), 1.0)
    assert torch.equal(noisy.latent[:, 1], state.clean[:, 1])
    assert noisy.timesteps(0.5)[:, :2].tolist() == [[0.5, 0.0]] * 2


@pytest.mark.parametrize(
    "mask, words",
    [
        (torch.ones(1, 6), "3 or 1 values"),
        (torch.ones(3, 3), "2 or 1 by"),
        (torch.ones(1, 1, 3, 16).cumsum(3) / 16, "same over all frequencies"),
        (torch.full((1, 3), -1.0), "0 .keep. to 1"),
        (torch.ones(3), "clips, frames"),
    ],
)
def test_bad_noise_masks_of_a_sound_are_refused(mask, words):
    with pytest.raises(ValueError, match=words):
        audio_state(torch.zeros(2, 2, 3, 16), noise_mask=mask)


def test_a_mask_of_ones_generates_the_whole_sound():
    assert audio_state(torch.zeros(1, 2, 3, 16), noise_mask=torch.ones(1, 1)).generates_all
