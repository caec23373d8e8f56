"""Clips and sound to latents and back, through the client: shapes, lengths, refusals, the same for 1 and 2 workers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mgpu_runtime.fleet import stop
from mgpu_runtime.models.video_vae import build_video_vae
from mgpu_runtime.pipeline.checks import check_decode
from mgpu_runtime.pipeline.client import LTXClient
from mgpu_runtime.pipeline.jobs import Decode, EncodeAudio, EncodeVideo, from_record, to_record
from mgpu_runtime.pipeline.latents import prepare_clip
from mgpu_runtime.pipeline.settings import LTXSettings
from mgpu_runtime.sampling.sizes import audio_latent_frames
from mgpu_runtime.weights.registry import StateDictRegistry
from tests.diffusion_files import write_diffusion_vae
from tests.weights_files import TINY_20, TINY_23, only


def client(path: Path, num_workers: int = 2) -> LTXClient:
    return LTXClient(LTXSettings(str(path), devices=f"cpu:{num_workers}"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LTX-2.0's tiny file, which has all parts, with a diffusion decoder."""
    path = tmp_path_factory.mktemp("latents") / "ltx-2.5.safetensors"
    write_diffusion_vae(path, whole=TINY_20)
    return path


@pytest.fixture(scope="module")
def two(path: Path) -> LTXClient:
    yield client(path)
    stop()


@pytest.fixture(scope="module")
def clip(two: LTXClient) -> Tensor:
    rows, columns = torch.linspace(0, 1, 64)[:, None, None], torch.linspace(0, 1, 96)[:, None]
    return torch.stack([(rows * columns * torch.ones(3) + number / 20) % 1 for number in range(9)])


@pytest.mark.slow
def test_a_clip_is_encoded_as_the_autoencoder_does(path: Path, two: LTXClient, clip: Tensor) -> None:
    latent = two.encode_video(clip)
    vae = build_video_vae(path, registry=StateDictRegistry(), device="cpu", dtype=torch.float32)
    expected = vae.encode((clip * 2 - 1).permute(3, 0, 1, 2)[None])
    assert latent.shape == (1, 16, 2, 2, 3) and latent.dtype == torch.float32 and not latent.is_inference()
    torch.testing.assert_close(latent, expected, rtol=0, atol=1e-5)


def test_a_clip_is_resized_and_trimmed(two: LTXClient, clip: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    facts = two.check()
    assert prepare_clip(clip[:7], facts, 32, 64).shape == (1, 3, 1, 32, 64)
    assert "The clip has 7 frames; 1 (8k+1) are encoded." in caplog.text
    pixels = prepare_clip(clip, facts, width=64)
    assert pixels.shape == (1, 3, 9, 64, 64)  # cropped at the centre
    torch.testing.assert_close(pixels[0, :, 4], (clip[4, :, 16:80] * 2 - 1).permute(2, 0, 1))
    assert torch.equal(prepare_clip(clip[..., :1], facts)[0, 0], prepare_clip(clip[..., :1], facts)[0, 2])  # grey


@pytest.mark.parametrize(
    ("images", "sizes", "words"),
    [
        (torch.zeros(9, 60, 64, 3), {}, "height that is a multiple of 32, got 60: give a height of 32 or 64"),
        (torch.zeros(9, 64, 20, 3), {}, "width that is a multiple of 32, got 20: give a width of 32 or 64"),
        (torch.zeros(9, 64, 64, 3), {"height": 33}, "multiple of 32, got 33"),
        (torch.zeros(9, 64, 64, 2), {}, "1, 3 or 4 colours"),
        (torch.zeros(0, 64, 64, 3), {}, r"got \(0, 64, 64, 3\)"),
        (torch.full((1, 32, 32, 3), float("nan")), {}, "not finite"),
    ],
)
def test_what_is_no_clip_is_refused_before_anything_starts(images: Tensor, sizes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        client(TINY_20).encode_video(images, **sizes)


def test_b33_b34_sound_is_fitted_encoded_and_comes_back_as_long_as_the_clip(two: LTXClient) -> None:
    sound = torch.rand(1, 1, 30000, generator=torch.Generator().manual_seed(0)) - 0.5
    whole = two.encode_audio(sound, 44100)
    num_spectra = 1 + -(-30000 * 160 // 441) // 160  # at 16 kHz, one each 160 samples
    assert whole.shape == (1, 2, -(-num_spectra // 4), 16)
    latent = two.encode_audio(sound, 44100, num_frames=9, fps=24.0)
    assert latent.shape[2] == audio_latent_frames(9, 24.0) == 9
    torch.testing.assert_close(latent[:, :, :8], whole[:, :, :8], rtol=0, atol=1e-4)  # what is cut off comes later
    picture = torch.zeros(1, 16, 2, 2, 2)
    made = two.decode(Decode("1x1", fps=24.0), picture, audio_latent=latent)
    assert made.sample_rate == 24000 and made.waveform.shape == (1, 2, round(9 / 24 * 24000))
    natural = two.decode(Decode("1x1"), picture, audio_latent=latent)
    assert natural.waveform.shape == (1, 2, (4 * 9 - 3) * 240)
    length = min(made.waveform.shape[-1], natural.waveform.shape[-1])
    assert torch.equal(made.waveform[..., :length], natural.waveform[..., :length])


def test_sound_alone_and_batches(two: LTXClient) -> None:
    sound = torch.rand(2, 2, 4000, generator=torch.Generator().manual_seed(0)) - 0.5
    latents = two.encode_audio(sound, 16000)
    torch.testing.assert_close(latents[1:], two.encode_audio(sound[1:], 16000), rtol=0, atol=1e-5)
    alone = two.decode(Decode(fps=24.0), None, audio_latent=latents)
    assert alone.waveform.shape == (2, 2, (4 * latents.shape[2] - 3) * 240) and alone.frames.shape[0] == 0
    with pytest.raises(ValueError, match="nothing to decode"):
        two.decode(Decode(), None)


def test_b113_every_worker_count_gives_the_same(path: Path, two: LTXClient, clip: Tensor) -> None:
    """Latents, sound, and the frames of a decoder that draws noise, in three tiles; the seed travels with the job."""
    sound = torch.rand(1, 2, 3000, generator=torch.Generator().manual_seed(0)) - 0.5
    latent, job = latents(1, 16, 1, 3, 5), Decode("1x3", overlap=2, seed=6)
    other = two.decode(replace(job, seed=7), latent).frames
    results = []
    for here in (two, client(path, 1)):
        heard = here.encode_audio(sound, 48000)
        made = here.decode(job, latent, audio_latent=heard)
        results.append((here.encode_video(clip), heard, made.waveform, made.frames))
    assert all(torch.equal(one, same) for one, same in zip(*results, strict=True))
    frames = results[0][3]
    assert frames.shape == (1, 96, 160, 3) and not torch.equal(frames, other)


def test_tiles_that_the_diffusion_decoder_cannot_take(path: Path) -> None:
    facts, settings = client(path).check(), client(path).settings
    with pytest.raises(ValueError, match="at least 3 latent cells a side"):
        check_decode(Decode("1x4", overlap=1), latents(1, 16, 1, 3, 5), facts, settings, with_sound=False)
    for grid in ((1, 1, 1), (2, 2, 7), (1, 40, 3)):  # a clip may be smaller, and "auto" cuts no tile too small
        check_decode(Decode(), latents(1, 16, *grid), facts, settings, with_sound=False)


def latents(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_files_without_an_encoder_or_without_sound_are_refused(tmp_path: Path) -> None:
    decoders = only(TINY_23, tmp_path / "x.safetensors", "model.", "vae.decoder.", "vae.per_channel_statistics.")
    with pytest.raises(ValueError, match="video autoencoder's file holds no encoder"):
        client(decoders).encode_video(torch.zeros(1, 32, 32, 3))
    vae = build_video_vae(decoders, registry=StateDictRegistry(), device="cpu", dtype=torch.float32)
    assert vae.decode(torch.zeros(1, 16, 1, 1, 1)).shape == (1, 3, 1, 32, 32)
    with pytest.raises(ValueError, match="file holds no encoder"):
        vae.encode(torch.zeros(1, 3, 1, 32, 32))
    with pytest.raises(ValueError, match="holds no audio autoencoder"):
        client(TINY_23).encode_audio(torch.zeros(1, 1, 100), 16000)


def test_jobs_travel_as_plain_values() -> None:
    for job in (EncodeVideo(), EncodeAudio(44100, 3), Decode(seed=3, fps=24)):
        name, fields = to_record(job)
        assert from_record(name, fields) == job
    for fields in ({"seed": -1}, {"fps": 0.0}, {"fps": "24"}, {"seed": 1.5}):
        with pytest.raises(ValueError, match="seed|fps"):
            Decode(**fields)
