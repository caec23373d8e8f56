"""Guidance: the combination, which passes are run, and that clips of a batch stay independent."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mgpu_runtime.models.streams import AUDIO_SELF, AUDIO_TO_VIDEO, VIDEO_SELF, VIDEO_TO_AUDIO
from mgpu_runtime.sampling.denoiser import GuidedDenoiser
from mgpu_runtime.sampling.guidance import (
    HQ_DEFAULTS,
    NEUTRAL,
    GuiderParams,
    combine,
    guidance_defaults,
    guider_at,
    read_guiders,
)
from mgpu_runtime.sampling.noise import item_generators
from mgpu_runtime.sampling.state import add_noise, audio_state, video_state
from tests.goldens import golden, guider, relative_error

VIDEO = GuiderParams(cfg=3.0, stg=1.0, stg_blocks=(1,), rescale=0.7, modality=3.0)
AUDIO = GuiderParams(cfg=7.0, stg=1.0, stg_blocks=(0, 2), rescale=0.7, modality=3.0)
POSITIVE = SimpleNamespace(video=torch.full((1, 3, 2), 1.0), audio=torch.full((1, 3, 2), 1.0), mask=None)
NEGATIVE = SimpleNamespace(video=torch.full((1, 3, 2), -1.0), audio=torch.full((1, 3, 2), -1.0), mask=None)


class FakeModel:
    """A per-token model whose velocity tells text, perturbation and timestep apart; it records its calls."""

    def __init__(self):
        self.calls = []

    def predict(self, video, audio, perturbation=None):
        rows = (video or audio).latent.shape[0]
        keep = torch.ones(4, 3, rows) if perturbation is None else perturbation
        self.calls.append(SimpleNamespace(video=video, audio=audio, perturbation=perturbation, rows=rows))
        return tuple(None if stream is None else self.velocity(stream, keep) for stream in (video, audio))

    @staticmethod
    def velocity(stream, keep):
        weight = (keep * torch.arange(1.0, 13.0).view(4, 3, 1)).sum((0, 1)) / 50  # every switch counts differently
        text = stream.context.mean((1, 2))
        return torch.tanh(stream.latent * (1 + weight[:, None, None]) + 0.3 * text[:, None, None])


def streams(batch=1, seed=5):
    return add_noise(
        video_state(torch.zeros(batch, 6, 3, 2, 2), 24.0), audio_state(torch.zeros(batch, 2, 9, 4)),
        item_generators(seed, batch), 1.0,
    )  # fmt: skip


def test_combination_equals_golden():
    case = golden("guidance")
    for name, published in case.facts.items():
        result = combine(guider(published), case["cond"], case["uncond"], case["perturbed"], case["isolated"])
        assert relative_error(result, case[f"out.{name}"]) < 1e-6


def test_neutral_guidance_returns_the_cond_pass():
    cond = torch.randn(1, 4, 3)
    assert torch.equal(combine(NEUTRAL, cond), cond)
    assert torch.equal(combine(GuiderParams(rescale=0.7), cond), cond)


def test_defaults_follow_the_version():
    assert guidance_defaults("2.3.0").video == GuiderParams(3.0, 1.0, (28,), 0.7, 3.0)
    assert guidance_defaults("2.5-rc1").audio.cfg == 7.0
    for oldest in (None, "", "2.0.0", "2-0"):
        defaults = guidance_defaults(oldest)
        assert (defaults.steps, defaults.video.stg_blocks) == (40, (29,))
    assert guidance_defaults("2.3.0", num_layers=4).video.stg_blocks == (3,)


@pytest.mark.parametrize(
    "values, words",
    [
        ({"cfg": float("nan")}, "cfg"),
        ({"rescale": 1.5}, "rescale"),
        ({"skip_step": -1}, "skip_step"),
        ({"stg": 1.0}, "at least one block"),
        ({"stg_blocks": (-1,)}, "start at 0"),
        *[({name: value}, name) for name in ("cfg", "stg", "rescale", "modality") for value in ("2", None, True, 1j)],
        ({"cfg": 10**400}, "cfg"),
        *[({"stg_blocks": value}, "stg_blocks") for value in (1, None, "1", ("1",), (1.5,), (None,), (True,))],
        *[({"skip_step": value}, "skip_step") for value in (None, 1.5, True, "1")],
    ],
)
def test_bad_guidance_is_refused(values, words):
    with pytest.raises(ValueError, match=words):
        GuiderParams(**values)


def test_guidance_takes_the_numbers_of_other_libraries():
    given = GuiderParams(cfg=np.float32(2.5), stg=1, stg_blocks=np.array([1, 2]), skip_step=np.int64(1))
    assert repr(given) == repr(GuiderParams(cfg=2.5, stg=1.0, stg_blocks=(1, 2), skip_step=1))


def test_missing_negative_and_unknown_blocks_are_refused():
    with pytest.raises(ValueError, match="negative prompt"):
        GuidedDenoiser(FakeModel(), POSITIVE, video=GuiderParams(cfg=2.0))
    with pytest.raises(ValueError, match="video STG names block 7, but this model's blocks are 0 to 2"):
        GuidedDenoiser(FakeModel(), POSITIVE, video=GuiderParams(stg=1.0, stg_blocks=(1, 7)), num_layers=3)


def test_passes_are_one_batch_in_the_official_order():
    model = FakeModel()
    denoise = GuidedDenoiser(model, POSITIVE, NEGATIVE, video=VIDEO, audio=AUDIO, num_layers=3)
    denoise(*streams(batch=2), 0.7, 0)
    (call,) = model.calls
    assert call.rows == 8
    assert call.video.context[:, 0, 0].tolist() == [1, 1, -1, -1, 1, 1, 1, 1]
    keep = call.perturbation
    assert torch.all(keep[:, :, :4] == 1)
    perturbed, isolated = keep[:, :, 4], keep[:, :, 6]
    assert torch.equal(keep[:, :, 4], keep[:, :, 5]) and torch.equal(keep[:, :, 6], keep[:, :, 7])
    assert perturbed[VIDEO_SELF].tolist() == [1, 0, 1] and perturbed[AUDIO_SELF].tolist() == [0, 1, 0]
    assert torch.all(perturbed[[AUDIO_TO_VIDEO, VIDEO_TO_AUDIO]] == 1)
    assert torch.all(isolated[[AUDIO_TO_VIDEO, VIDEO_TO_AUDIO]] == 0)
    assert torch.all(isolated[[VIDEO_SELF, AUDIO_SELF]] == 1)


def test_the_high_quality_preset_is_the_published_one():
    assert HQ_DEFAULTS.steps == 15
    assert HQ_DEFAULTS.video == GuiderParams(cfg=3.0, rescale=0.45, modality=3.0)
    assert HQ_DEFAULTS.audio == GuiderParams(cfg=7.0, rescale=1.0, modality=3.0)


def test_a_stream_without_stg_is_not_perturbed_by_its_block_list():
    """Official: both share one pass, but only blocks of the streams that ask for it count."""
    model, silent = FakeModel(), GuiderParams(stg=0.0, stg_blocks=(0,))
    GuidedDenoiser(model, POSITIVE, video=GuiderParams(stg=1.0, stg_blocks=(1,)), audio=silent, num_layers=3)(
        *streams(), 0.7, 0
    )
    keep = model.calls[0].perturbation[:, :, 1]
    assert keep[VIDEO_SELF].tolist() == [1, 0, 1] and keep[AUDIO_SELF].tolist() == [1, 1, 1]


def test_guidance_follows_the_noise_level():
    """From a level downwards: the smallest level at or above the step's holds, above all of them the base."""
    early, late = GuiderParams(cfg=4.0), GuiderParams(cfg=2.0)
    sets = read_guiders([(0.5, late), (0.9, early)])
    assert [level for level, _ in sets] == [0.9, 0.5]
    expected = {1.0: NEUTRAL, 0.91: NEUTRAL, 0.9: early, 0.51: early, 0.5: late, 0.01: late}
    assert {sigma: guider_at(sigma, NEUTRAL, sets) for sigma in expected} == expected
    model = FakeModel()
    denoise = GuidedDenoiser(model, POSITIVE, NEGATIVE, video_by_sigma=sets, num_layers=3)
    for step, sigma in enumerate((1.0, 0.9, 0.3)):
        made, _ = denoise(*streams(), sigma, step)
        plain = GuidedDenoiser(FakeModel(), POSITIVE, NEGATIVE, video=guider_at(sigma, NEUTRAL, sets), num_layers=3)(
            *streams(), sigma, step
        )
        assert torch.equal(made, plain[0])
    assert [call.rows for call in model.calls] == [1, 2, 2]


@pytest.mark.parametrize("levels", [(0.0,), (1.5,), (0.5, 0.5), (float("nan"),)])
def test_bad_levels_of_guidance_are_refused(levels):
    with pytest.raises(ValueError, match="Guidance changes"):
        read_guiders([(level, NEUTRAL) for level in levels])


def test_every_set_of_guidance_is_checked():
    with pytest.raises(ValueError, match="needs a negative prompt"):
        GuidedDenoiser(FakeModel(), POSITIVE, audio_by_sigma=((0.5, GuiderParams(cfg=2.0)),), num_layers=3)


def test_rescaling_does_not_depend_on_the_number_of_threads():
    cond, uncond = torch.randn(1, 4096, 64), torch.randn(1, 4096, 64)
    before, made = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            made.append(combine(GuiderParams(cfg=3.0, rescale=0.7), cond, uncond))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*made)


def test_one_attention_mask_for_all_is_not_repeated_for_the_passes():
    video, audio = streams()
    video = replace(video, attention_mask=torch.ones(1, 12, 12))
    model = FakeModel()
    GuidedDenoiser(model, POSITIVE, NEGATIVE, video=VIDEO, audio=AUDIO, num_layers=3)(video, audio, 0.7, 0)
    assert model.calls[0].video.attention_mask.shape == (1, 12, 12) and model.calls[0].rows == 4


@pytest.mark.parametrize("max_batch_size", [1, 2, 3])
def test_passes_one_after_the_other_give_the_same(max_batch_size):
    video, audio = streams()
    whole = GuidedDenoiser(FakeModel(), POSITIVE, NEGATIVE, video=VIDEO, audio=AUDIO, num_layers=3)
    model = FakeModel()
    split = GuidedDenoiser(
        model, POSITIVE, NEGATIVE, video=VIDEO, audio=AUDIO, num_layers=3, max_batch_size=max_batch_size
    )
    for expected, actual in zip(whole(video, audio, 0.7, 0), split(video, audio, 0.7, 0), strict=True):
        assert torch.equal(expected, actual)
    assert max(call.rows for call in model.calls) <= max_batch_size and sum(c.rows for c in model.calls) == 4


def test_prompts_of_other_lengths_run_one_after_the_other():
    longer = SimpleNamespace(video=NEGATIVE.video.repeat(1, 2, 1), audio=NEGATIVE.audio.repeat(1, 2, 1), mask=None)
    video, audio = streams()
    model = FakeModel()
    results = GuidedDenoiser(model, POSITIVE, longer, video=GuiderParams(cfg=2.0))(video, audio, 0.7, 0)
    same = GuidedDenoiser(FakeModel(), POSITIVE, NEGATIVE, video=GuiderParams(cfg=2.0))(video, audio, 0.7, 0)
    assert [call.rows for call in model.calls] == [1, 1]
    assert torch.equal(results[0], same[0])


def test_without_guidance_there_is_one_pass_and_x0_is_latent_minus_timestep_times_velocity():
    video, audio = streams()
    model = FakeModel()
    video_x0, audio_x0 = GuidedDenoiser(model, POSITIVE)(video, audio, 0.5, 0)
    (call,) = model.calls
    assert call.rows == 1 and call.perturbation is None
    velocities = model.predict(call.video, call.audio)
    assert torch.equal(video_x0, video.latent - 0.5 * velocities[0])
    assert torch.equal(audio_x0, audio.latent - 0.5 * velocities[1])


def test_b09_one_stream_alone_needs_no_isolated_pass():
    video, audio = streams()
    for pair in ((video, None), (None, audio)):
        model = FakeModel()
        denoise = GuidedDenoiser(model, POSITIVE, NEGATIVE, video=VIDEO, audio=AUDIO, num_layers=3)
        result = denoise(*pair, 0.7, 0)
        assert model.calls[0].rows == 3
        assert [x0 is None for x0 in result] == [stream is None for stream in pair]


def test_frozen_audio_is_listened_to_at_noise_level_0():
    video, _ = streams()
    audio = audio_state(torch.randn(1, 2, 9, 4), frozen=True)
    model = FakeModel()
    _, audio_x0 = GuidedDenoiser(model, POSITIVE)(video, audio, 0.7, 0)
    (call,) = model.calls
    assert audio_x0 is None
    assert torch.all(call.audio.timesteps == 0) and torch.all(call.audio.sigma == 0)
    assert torch.all(call.video.sigma == 0.7)


def test_skip_step_reuses_the_last_prediction_of_each_stream():
    video, audio = streams()
    model = FakeModel()
    every, second = GuiderParams(cfg=2.0), GuiderParams(cfg=2.0, skip_step=1)
    denoise = GuidedDenoiser(model, POSITIVE, NEGATIVE, video=every, audio=second)
    first = denoise(video, audio, 0.9, 0)
    later = denoise(video, audio, 0.5, 1)
    assert later[1] is first[1] and not torch.equal(later[0], first[0])
    both = GuidedDenoiser(model, POSITIVE, NEGATIVE, video=second, audio=second)
    before = len(model.calls)
    results = [both(video, audio, sigma, step) for step, sigma in enumerate((0.9, 0.7, 0.5))]
    assert len(model.calls) == before + 2 and results[1] == results[0]


def test_b37_a_clip_of_a_batch_equals_the_clip_alone():
    def denoiser():
        return GuidedDenoiser(FakeModel(), POSITIVE, NEGATIVE, video=VIDEO, audio=AUDIO, num_layers=3)

    together = denoiser()(*streams(batch=3, seed=7), 0.7, 0)
    for item in range(3):
        alone = denoiser()(*streams(batch=1, seed=7 + item), 0.7, 0)
        for whole, single in zip(together, alone, strict=True):
            assert torch.equal(whole[item : item + 1], single)


def test_b37_prompts_are_repeated_in_groups():
    prompts = SimpleNamespace(
        video=torch.tensor([1.0, 2.0])[:, None, None].expand(2, 3, 2),
        audio=torch.tensor([1.0, 2.0])[:, None, None].expand(2, 3, 2),
        mask=None,
    )
    model = FakeModel()
    GuidedDenoiser(model, prompts)(*streams(batch=4), 0.7, 0)
    assert model.calls[0].video.context[:, 0, 0].tolist() == [1, 1, 2, 2]
    with pytest.raises(ValueError, match="3 clips cannot share 2 prompts"):
        GuidedDenoiser(model, prompts)(*streams(batch=3), 0.7, 0)


def test_a_text_mask_reaches_the_model_for_every_pass():
    masked = SimpleNamespace(video=POSITIVE.video, audio=POSITIVE.audio, mask=torch.tensor([[0.0, 1.0, 1.0]]))
    model = FakeModel()
    GuidedDenoiser(model, masked, NEGATIVE, video=GuiderParams(cfg=2.0))(*streams(), 0.7, 0)
    GuidedDenoiser(model, POSITIVE, NEGATIVE, video=GuiderParams(cfg=2.0))(*streams(), 0.7, 0)
    assert model.calls[0].video.context_mask.tolist() == [[0, 1, 1], [1, 1, 1]]
    assert torch.equal(model.calls[0].audio.context_mask, model.calls[0].video.context_mask)
    assert model.calls[1].video.context_mask is None
