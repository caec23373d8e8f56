"""Autoencoders, vocoder and upsampler against the official numbers and the toy model's reference clips."""

import re
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLLTX2Video
from safetensors.torch import save_file
from torch import Tensor

from mgpu_runtime.models.audio_vae import build_audio_vae, decode_mel, encode_mel
from mgpu_runtime.models.upsampler import build_upsampler, upsample
from mgpu_runtime.models.video_vae import build_video_vae
from mgpu_runtime.models.vocoder import build_vocoder, sample_rate, synthesize
from mgpu_runtime.sampling.patchify import audio_latent, video_latent
from mgpu_runtime.tiling import TilePlace
from mgpu_runtime.weights.registry import StateDictRegistry
from mgpu_runtime.weights.vae_configs import video_vae_kwargs
from tests.goldens import TOY, Case, golden, read_case, relative_error
from tests.weights_files import TINY_20, TINY_23, TINY_UPSAMPLER, TOY_23, TOY_UPSAMPLER, changed_copy, read_all

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
    assert relative_error(vae.decode(case["latent"]), case["out.pixels"]) < TOLERANCE


def test_statistics_are_the_official_ones(registry: StateDictRegistry) -> None:
    case = golden("vae_20_statistics")
    vae = build_video_vae(TINY_20, registry=registry, **FLOAT32)
    assert torch.equal(vae.latents_mean, case["mean"]) and torch.equal(vae.latents_std, case["std"])
    assert relative_error(vae.normalize(case["x"]), case["out.normalize"]) < 1e-6
    assert relative_error(vae.un_normalize(case["x"]), case["out.un_normalize"]) < 1e-6


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
    pixels = vae.decode(video_latent(clip[f"{stage}.video_latent"], _grid(clip, cell)))
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
    again = vae.encode(vae.decode(latent))
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
        vae.encode(torch.zeros(shape))


def test_vocoder_takes_half_precision_spectrograms(registry: StateDictRegistry) -> None:
    vocoder = build_vocoder(TINY_20, registry=registry, device="cpu")
    mel = golden("audio_20_decode")["out.mel"].bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        waveform = synthesize(vocoder, mel)
    assert waveform.dtype == torch.float32
    assert torch.equal(waveform, synthesize(vocoder, mel.float()))


@pytest.mark.parametrize(("kind", "extra"), [("constant", 1), ("per_channel", 16), ("none", 0)])
def test_only_the_means_of_a_latent_are_taken(
    registry: StateDictRegistry, tmp_path: Path, kind: str, extra: int
) -> None:
    """The encoders differ in what else they put out, by `latent_log_var`; the means come first in all of them."""
    uniform = build_video_vae(TINY_20, registry=registry, **FLOAT32)
    path = changed_copy(TINY_20, tmp_path / "x.safetensors", vae={"latent_log_var": kind})
    tensors, metadata = read_all(path)
    for leaf in ("weight", "bias"):
        name = f"vae.encoder.conv_out.conv.{leaf}"
        means = tensors[name][:16]
        tensors[name] = torch.cat([means, torch.ones(extra, *means.shape[1:])])
    save_file(tensors, path, metadata=metadata)
    pixels = torch.rand(1, 3, 9, 32, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    expected = uniform.encode(pixels)
    # convolutions of another width may add in another order
    torch.testing.assert_close(build_video_vae(path, registry=registry, **FLOAT32).encode(pixels), expected)
    other = changed_copy(TINY_20, tmp_path / "y.safetensors", vae={"latent_log_var": "half"})
    with pytest.raises(ValueError, match="latent_log_var is 'half', but only uniform, constant, per_channel, none"):
        build_video_vae(other, registry=registry, **FLOAT32)


def test_decoders_that_know_the_timestep(registry: StateDictRegistry, tmp_path: Path) -> None:
    """Some LTX decoders remove a little noise, added before at timestep 0.05; the twin is `diffusers`' own."""
    source, metadata = read_all(TINY_20)
    path = changed_copy(TINY_20, tmp_path / "x.safetensors", vae={"timestep_conditioning": True})
    twin = AutoencoderKLLTX2Video(**video_vae_kwargs(registry.checkpoint(path))).eval()
    assert twin.config.timestep_conditioning
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in twin.decoder.named_parameters():
            if name != "timestep_scale_multiplier":
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    tensors = {name: tensor for name, tensor in source.items() if not name.startswith("vae.decoder.")}
    tensors |= {f"vae.decoder.{_to_file(name)}": t.clone() for name, t in twin.decoder.state_dict().items()}
    save_file(tensors, path, metadata=read_all(path)[1])
    vae = build_video_vae(path, registry=StateDictRegistry(), **FLOAT32)
    latent = torch.randn(1, 16, 2, 3, 4, generator=generator)
    noise = torch.stack(
        [torch.randn(16, 3, 4, generator=generator.manual_seed(5)), torch.randn(16, 3, 4, generator=generator)]
    )
    noisy = vae.un_normalize(0.975 * latent + 0.025 * noise.transpose(0, 1)[None])
    with torch.no_grad():
        expected = twin.decode(noisy, torch.tensor([0.05]), return_dict=False)[0]
    torch.testing.assert_close(vae.decode(latent, seed=5), expected)
    place = TilePlace(0, (0, 1, 2), (2, 3, 4))
    tile = vae.decode(latent[:, :, :, 1:, 2:], place=place, seed=5)
    with torch.no_grad():
        expected = twin.decode(noisy[:, :, :, 1:, 2:], torch.tensor([0.05]), return_dict=False)[0]
    torch.testing.assert_close(tile, expected)  # a tile gets the noise of its part of the clip


def _to_file(name: str) -> str:
    """Names a decoder's tensor as the file does: blocks and resamplers in one list, latent end first."""
    name = re.sub(r"^mid_block\.", "up_blocks.0.", re.sub(r"^up_blocks\.(\d+)\.(upsamplers\.0\.)?", _position, name))
    name = re.sub(r"^(time_embedder|scale_shift_table)", r"last_\1", name)
    return name.replace(".resnets.", ".res_blocks.")


def _position(match: re.Match[str]) -> str:
    return f"up_blocks.{2 * int(match[1]) + (1 if match[2] else 2)}."


def _grid(clip: Case, cell: int) -> tuple[int, int, int]:
    """Returns the latent grid (F, H, W) of a clip whose latent cells are `cell` pixels of the finished clip wide."""
    facts = clip.facts
    return (facts["frames"] - 1) // 8 + 1, facts["height"] // cell, facts["width"] // cell


def _to_bytes(pixels: Tensor) -> Tensor:
    """Converts pixels (1, 3, F, H, W) to (F, H, W, 3) uint8 as the reference did."""
    return (255 * (pixels[0] / 2 + 0.5).clamp(0, 1)).round().to(torch.uint8).permute(1, 2, 3, 0)
