"""Sound in and out: resampling, spectrograms, latents, and how many samples come back."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mgpu_runtime.models.audio_vae import build_audio_vae, decode_mel, encode_mel
from mgpu_runtime.models.mel import FLOOR, log_mel, to_stereo
from mgpu_runtime.models.resample import resample
from mgpu_runtime.models.vocoder import build_vocoder, sample_rate, synthesize
from mgpu_runtime.pipeline.jobs import EncodeAudio
from mgpu_runtime.pipeline.latents import check_waveform, fit_sound, fit_sound_to_clip
from mgpu_runtime.sampling.sizes import audio_latent_frames
from mgpu_runtime.weights.audio_configs import MelLayout, mel_layout
from mgpu_runtime.weights.bundle import Checkpoint
from mgpu_runtime.weights.checkpoint import CheckpointFile
from mgpu_runtime.weights.registry import StateDictRegistry
from tests.goldens import golden, read_case, relative_error
from tests.weights_files import TINY_20, TOY_23, changed_copy

LAYOUT = MelLayout(rate=16000, window=1024, hop=160, bins=64)
RATES = [8000, 11025, 16000, 22050, 24000, 44100, 48000, 96000, 192000]


@pytest.fixture(scope="module")
def registry() -> StateDictRegistry:
    return StateDictRegistry()


def noise(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_spectrograms_are_the_official_ones() -> None:
    """An excerpt of the official case: frames whose windows lie within the first samples."""
    case = read_case(Path(__file__).with_name("audio_mel_excerpt.safetensors"))
    for name, rate in (("", 16000), ("_44100", 44100)):
        expected = case["out.mel" + name.replace("_", "_from_")]
        actual = log_mel(case[f"waveform{name}"], rate, LAYOUT)[:, : expected.shape[1], : expected.shape[2]]
        assert relative_error(actual, expected) < 1e-4


def test_latents_are_the_official_ones(registry: StateDictRegistry) -> None:
    case = golden("audio_20_encode")
    vae = build_audio_vae(TINY_20, registry=registry, device="cpu", dtype=torch.float32)
    assert relative_error(encode_mel(vae, case["mel"]), case["out.latent"]) < 1e-4


def polyphase(waveform: Tensor, rate: int, new_rate: int) -> Tensor:
    """Resamples by one filter per phase, as it is usually written; impractical where the rates share no factor."""
    common = math.gcd(rate, new_rate)
    old, new = rate // common, new_rate // common
    base = min(old, new) * 0.99
    width = math.ceil(6 * old / base)
    offsets = torch.arange(-width, width + old, dtype=torch.float64) / old
    times = (offsets - torch.arange(new, dtype=torch.float64)[:, None] / new) * base
    window = torch.cos(times.clamp(-6, 6) * math.pi / 12) ** 2
    kernels = torch.sinc(times) * window * base / old
    padded = torch.nn.functional.pad(waveform.double(), (width, width + old))
    phases = torch.nn.functional.conv1d(padded.flatten(0, -2)[:, None], kernels[:, None], stride=old)
    length = math.ceil(waveform.shape[-1] * new / old)
    return phases.transpose(1, 2).flatten(1)[:, :length].unflatten(0, waveform.shape[:-1]).float()


@pytest.mark.parametrize("rate", [r for r in RATES if r != 16000])
@pytest.mark.parametrize("length", [1, 7, 1009])
def test_resampling_is_the_polyphase_filter(rate: int, length: int) -> None:
    sound = noise(1, 2, length)
    actual = resample(sound, rate, 16000)
    assert actual.shape[-1] == -(-length * 16000 // rate)
    torch.testing.assert_close(actual, polyphase(sound, rate, 16000), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rate", [7, 44099, 1_000_003])
def test_b34_any_rate_keeps_a_tone(rate: int) -> None:
    """Rates without a common factor, for which a table of filters would take gigabytes."""
    pitch = min(1000.0, rate / 4)
    seconds = 0.25 if rate > 100 else 20.0
    tone = torch.sin(2 * math.pi * pitch * torch.arange(round(seconds * rate), dtype=torch.float64) / rate)
    actual = resample(tone.float(), rate, 16000)
    expected = torch.sin(2 * math.pi * pitch * torch.arange(actual.shape[-1], dtype=torch.float64) / 16000)
    edge = round(8 / min(rate, 16000) * 16000) + 16
    assert (actual[edge:-edge] - expected[edge:-edge]).abs().max() < 0.02


def test_b34_one_channel_is_doubled_and_many_are_mixed() -> None:
    mono, many = noise(2, 1, 50), noise(2, 6, 50)
    assert torch.equal(to_stereo(mono), mono.expand(2, 2, 50))
    assert torch.equal(to_stereo(many)[:, 0], many.mean(1)) and torch.equal(to_stereo(many)[:, 1], many.mean(1))
    stereo = noise(1, 2, 50)
    assert to_stereo(stereo) is stereo
    for channels in (1, 2, 3, 6):
        assert log_mel(noise(1, channels, 3200), 16000, LAYOUT).shape == (1, 2, 21, 64)


@pytest.mark.parametrize("num_samples", [1, 2, 511, 513])
def test_b34_silence_and_a_single_sample(registry: StateDictRegistry, num_samples: int) -> None:
    vae = build_audio_vae(TINY_20, registry=registry, device="cpu", dtype=torch.float32)
    silence = log_mel(torch.zeros(1, 1, num_samples), 44100, LAYOUT)
    assert torch.equal(silence, torch.full_like(silence, math.log(FLOOR)))
    latent = encode_mel(vae, log_mel(torch.ones(1, 1, num_samples), 44100, LAYOUT))
    assert latent.shape[:2] == (1, 2) and bool(torch.isfinite(latent).all())


def test_b34_sound_longer_than_the_clip_is_cut_and_shorter_is_followed_by_silence(caplog) -> None:
    sound = noise(1, 1, 44100)
    cut, num_latents = fit_sound_to_clip(sound, 44100, 17, 24.0)
    assert torch.equal(cut, sound[..., : math.ceil(17 / 24 * 44100)]) and num_latents == 18
    assert "sound of 1.00 s is cut to the clip's 0.71 s" in caplog.text
    longer, num_latents = fit_sound_to_clip(sound, 44100, 49, 24.0)
    assert torch.equal(longer[..., :44100], sound) and not longer[..., 44100:].any() and num_latents == 51
    assert "silence follows" in caplog.text
    caplog.clear()
    fit_sound_to_clip(sound, 44100, 24, 24.0)
    fit_sound_to_clip(sound[..., :-1000], 44100, 24, 24.0)  # less than one audio latent
    assert not caplog.text


@pytest.mark.parametrize(
    ("sound", "words"),
    [
        (torch.zeros(1, 2, 0), "empty"),
        (torch.zeros(1, 0, 5), "empty"),
        (torch.zeros(2, 5), r"clips, channels, samples.*got \(2, 5\)"),
        (torch.zeros(1, 2, 5, dtype=torch.int16), "clips, channels, samples"),
        (None, "got NoneType"),
        (torch.full((1, 1, 5), math.nan), "not finite"),
    ],
)
def test_b34_what_is_no_sound_is_refused(sound: Tensor | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_waveform(sound)


@pytest.mark.parametrize(
    "fields", [{"rate": 0}, {"rate": 44100.5}, {"rate": "16000"}, {"rate": 16000, "num_latents": -1}]
)
def test_jobs_that_make_no_sense_are_refused(fields: dict) -> None:
    with pytest.raises(ValueError, match="rate|num_latents"):
        EncodeAudio(**fields)


@settings(deadline=None)
@given(
    num_frames=st.integers(1, 300),
    fps=st.sampled_from([8.0, 23.976, 24.0, 25.0, 29.97, 50.0, 60.0, 240.0]),
    rate=st.sampled_from(RATES),
)
def test_a_fitted_sound_has_all_latents_of_its_clip(num_frames: int, fps: float, rate: int) -> None:
    """Four spectrogram frames make a latent, and the encoder rounds up (see the test below)."""
    fitted, num_latents = fit_sound_to_clip(torch.zeros(1, 1, 1), rate, num_frames, fps)
    spectrogram = 1 + -(-fitted.shape[-1] * 16000 // rate) // 160
    assert num_latents == audio_latent_frames(num_frames, fps) <= math.ceil(spectrogram / 4)


@pytest.mark.parametrize("num_frames", [1, 4, 5, 8, 9])
def test_the_encoder_rounds_spectrogram_frames_up_to_latents(registry: StateDictRegistry, num_frames: int) -> None:
    vae = build_audio_vae(TINY_20, registry=registry, device="cpu", dtype=torch.float32)
    assert encode_mel(vae, noise(1, 2, num_frames, 64)).shape == (1, 2, math.ceil(num_frames / 4), 16)


@pytest.mark.parametrize(
    ("path", "rate", "hop", "lengths"), [(TINY_20, 24000, 240, (1, 2, 7)), (TOY_23, 48000, 480, (1,))]
)
def test_b33_decoded_sound_has_the_official_number_of_samples(
    registry: StateDictRegistry, path: Path, rate: int, hop: int, lengths: tuple[int, ...]
) -> None:
    """A latent frame stands for four spectrogram frames of 10 ms, the first for one, in both generations."""
    vae = build_audio_vae(path, registry=registry, device="cpu", dtype=torch.float32)
    vocoder = build_vocoder(path, registry=registry, device="cpu")
    assert sample_rate(vocoder) == rate
    for num_latents in lengths:
        sound = synthesize(vocoder, decode_mel(vae, noise(1, 2, num_latents, 16)))
        assert sound.shape == (1, 2, (4 * num_latents - 3) * hop)


@settings(deadline=None)
@given(
    num_frames=st.integers(0, 60).map(lambda k: 8 * k + 1),
    fps=st.sampled_from([8.0, 23.976, 24.0, 25.0, 29.97, 50.0, 60.0]),
    rate=st.sampled_from([24000, 48000]),
)
def test_b33_sound_fitted_to_the_picture_has_its_length_to_the_sample(num_frames: int, fps: float, rate: int) -> None:
    """What the decoder gives is at most 50 ms short: half a latent of rounding, and 30 ms that no latent covers."""
    decoded = (4 * audio_latent_frames(num_frames, fps) - 3) * rate // 100
    wanted = round(num_frames / fps * rate)
    assert wanted - decoded <= 0.05 * rate + 1 and (num_frames == 1 or decoded - wanted <= 0)
    fitted = fit_sound(torch.ones(1, 2, decoded), wanted)
    assert fitted.shape[-1] == wanted and abs(wanted / rate - num_frames / fps) < 1 / rate
    assert bool((fitted[..., :decoded] == 1).all()) and not fitted[..., decoded:].any()


def test_the_spectrograms_layout_comes_from_the_file(tmp_path: Path) -> None:
    assert mel_layout(Checkpoint([CheckpointFile(TINY_20)])) == LAYOUT
    changes = {"preprocessing": {"stft": {"filter_length": 512, "hop_length": 80}}}
    path = changed_copy(TINY_20, tmp_path / "x.safetensors", audio_vae=changes)
    assert mel_layout(Checkpoint([CheckpointFile(path)])) == LAYOUT._replace(window=512, hop=80)
