"""Autoencoders, vocoder and upsampler against the official numbers and the toy model's reference clips."""

import pytest
import torch
from torch import Tensor

from mgpu_runtime.models.audio_vae import build_audio_vae, decode_mel, encode_mel
from mgpu_runtime.models.upsampler import build_upsampler, upsample
from mgpu_runtime.models.video_vae import build_video_vae, decode, encode, normalize, un_normalize
from mgpu_runtime.models.vocoder import build_vocoder, sample_rate, synthesize
from mgpu_runtime.sampling.patchify import audio_latent, video_latent
from mgpu_runtime.weights.registry import StateDictRegistry
from tests.goldens import TOY, Case, golden, read_case, relative_error
from tests.weights_files import TINY_20, TINY_23, TINY_UPSAMPLER, TOY_23, TOY_UPSAMPLER

TOLERANCE = 1e-4  # the official numbers were made with another CPU and torch
FLOAT32 = {"device": "cpu", "dtype": torch.float32}


@pytest.fixture(scope="module")
def registry() -> StateDictRegistry:
    return StateDictRegistry()


@pytest.fixture(scope="module", params=["clip0", "clip1"])
def clip(request: pytest.FixtureRequest) -> Case:
    return read_case(TOY / "reference" / f"{request.param}.safetensors")


def test_video_decode_is_the_official_one(registry: StateDictRegistry) -> None:
    case = golden("vae_20_decode")
    vae = build_video_vae(TINY_20, registry=registry, **FLOAT32)
    assert relative_error(decode(vae, case["latent"]), case["out.pixels"]) < TOLERANCE


def test_statistics_are_the_official_ones(registry: StateDictRegistry) -> None:
    case = golden("vae_20_statistics")
    vae = build_video_vae(TINY_20, registry=registry, **FLOAT32)
    assert torch.equal(vae.latents_mean, case["mean"]) and torch.equal(vae.latents_std, case["std"])
    assert relative_error(normalize(case["x"], vae), case["out.normalize"]) < 1e-6
    assert relative_error(un_normalize(case["x"], vae), case["out.un_normalize"]) < 1e-6


def test_sound_is_the_official_one(registry: StateDictRegistry) -> None:
    case = golden("audio_20_decode")
    vae = build_audio_vae(TINY_20, registry=registry, **FLOAT32)
    vocoder = build_vocoder(TINY_20, registry=registry, device="cpu")
    mel = decode_mel(vae, case["latent"])
    assert relative_error(mel, case["out.mel"]) < TOLERANCE
    assert relative_error(synthesize(vocoder, mel)[0], case["out.waveform"]) < TOLERANCE
    assert sample_rate(vocoder) == case.facts["sampling_rate"]


def test_upsampler_is_the_official_one(registry: StateDictRegistry) -> None:
    case = golden("upsampler_x2")
    upsampler = build_upsampler(TINY_UPSAMPLER, registry=registry, **FLOAT32)
    vae = build_video_vae(TINY_23, registry=registry, **FLOAT32)
    with torch.no_grad():
        assert relative_error(upsampler(case["latent"]), case["out.raw"]) < TOLERANCE
    assert relative_error(upsample(upsampler, vae, case["latent"]), case["out.wrapped"]) < TOLERANCE


def test_toy_upscale_is_the_reference(registry: StateDictRegistry, clip: Case) -> None:
    vae = build_video_vae(TOY_23, registry=registry, **FLOAT32)
    upsampler = build_upsampler(TOY_UPSAMPLER, registry=registry, **FLOAT32)
    small = video_latent(clip["stage1.video_latent"], _grid(clip, 64))
    large = video_latent(clip["stage2.initial_video_latent"], _grid(clip, 32))
    assert relative_error(upsample(upsampler, vae, small), large) < TOLERANCE


@pytest.mark.parametrize(("stage", "cell", "frames"), [("stage1", 64, [0, 16]), ("stage2", 32, [16])])
def test_toy_frames_are_the_reference(
    registry: StateDictRegistry, clip: Case, stage: str, cell: int, frames: list[int]
) -> None:
    vae = build_video_vae(TOY_23, registry=registry, **FLOAT32)
    pixels = decode(vae, video_latent(clip[f"{stage}.video_latent"], _grid(clip, cell)))
    assert pixels.shape[2] == clip.facts["frames"]
    difference = _to_bytes(pixels)[frames].int() - clip[f"{stage}.frames"].int()
    assert difference.abs().max() <= 1  # a value on a rounding edge may fall either way
    assert (difference != 0).float().mean() < 1e-3


def test_toy_sound_is_the_reference(registry: StateDictRegistry, clip: Case) -> None:
    vae = build_audio_vae(TOY_23, registry=registry, **FLOAT32)
    vocoder = build_vocoder(TOY_23, registry=registry, device="cpu")
    mel = decode_mel(vae, audio_latent(clip["stage2.audio_latent"], 2))
    assert mel.shape[2] == 4 * clip["stage2.audio_latent"].shape[1] - 3
    assert relative_error(mel, clip["stage2.mel"]) < TOLERANCE
    waveform = synthesize(vocoder, mel)
    assert waveform.shape == (1, 2, mel.shape[2] * 480) and sample_rate(vocoder) == 48000
    assert relative_error(waveform[..., :4800], clip["stage2.waveform_first_4800"]) < TOLERANCE


def test_toy_encoding_returns_to_its_latent(registry: StateDictRegistry, clip: Case) -> None:
    vae = build_video_vae(TOY_23, registry=registry, **FLOAT32)
    latent = video_latent(clip["stage1.video_latent"], _grid(clip, 64))
    again = encode(vae, decode(vae, latent))
    assert again.shape == latent.shape
    assert torch.corrcoef(torch.stack([again.flatten(), latent.flatten()]))[0, 1] > 0.8


def test_audio_latents_survive_a_round_trip_of_shapes(registry: StateDictRegistry) -> None:
    vae = build_audio_vae(TINY_20, registry=registry, **FLOAT32)
    latent = golden("audio_20_decode")["latent"]
    assert encode_mel(vae, decode_mel(vae, latent)).shape == latent.shape


@pytest.mark.parametrize("shape", [(1, 3, 10, 64, 64), (1, 3, 9, 60, 64), (1, 3, 9, 64, 65)])
def test_clips_the_encoder_cannot_take(registry: StateDictRegistry, shape: tuple[int, ...]) -> None:
    vae = build_video_vae(TINY_20, registry=registry, **FLOAT32)
    with pytest.raises(ValueError, match=r"8k\+1 frames and sides that are multiples of 32"):
        encode(vae, torch.zeros(shape))


def test_vocoder_takes_half_precision_spectrograms(registry: StateDictRegistry) -> None:
    vocoder = build_vocoder(TINY_20, registry=registry, device="cpu")
    mel = golden("audio_20_decode")["out.mel"].bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        waveform = synthesize(vocoder, mel)
    assert waveform.dtype == torch.float32
    assert torch.equal(waveform, synthesize(vocoder, mel.float()))


def _grid(clip: Case, cell: int) -> tuple[int, int, int]:
    """Returns the latent grid (F, H, W) of a clip whose latent cells are `cell` pixels of the finished clip wide."""
    facts = clip.facts
    return (facts["frames"] - 1) // 8 + 1, facts["height"] // cell, facts["width"] // cell


def _to_bytes(pixels: Tensor) -> Tensor:
    """Converts pixels (1, 3, F, H, W) to (F, H, W, 3) uint8 as the reference did."""
    return (255 * (pixels[0] / 2 + 0.5).clamp(0, 1)).round().to(torch.uint8).permute(1, 2, 3, 0)
