"""Files that cannot be used, given to the client: one sentence before anything starts, and a running fleet lives on."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mgpu_runtime.fleet import MGPUController, current, stop
from mgpu_runtime.pipeline.client import LTXClient
from mgpu_runtime.pipeline.jobs import Decode, SPStage
from mgpu_runtime.pipeline.settings import LTXSettings
from mgpu_runtime.sampling.patchify import audio_tokens, video_tokens
from tests.goldens import TOY, read_case, relative_error
from tests.weights_files import (
    GEMMA,
    TINY_23,
    TINY_UPSAMPLER,
    TOY_23,
    TOY_UPSAMPLER,
    only,
    published_layout,
    read_all,
    split,
    write_gemma,
    write_header,
    write_raw,
)

SETTINGS = LTXSettings(str(TOY_23), str(GEMMA), str(TOY_UPSAMPLER), devices="cpu:1")
PREFIX = "model.diffusion_model."


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in read_all(path)[0].items()}


def _cut_off(folder: Path) -> dict[str, str]:
    path = folder / "cut.safetensors"
    path.write_bytes(TOY_23.read_bytes()[:-1000])
    return {"checkpoint": str(path)}


def _long_header(folder: Path) -> dict[str, str]:
    path = folder / "long.safetensors"
    path.write_bytes(struct.pack("<Q", 90_000_000) + TOY_23.read_bytes()[8:])
    return {"checkpoint": str(path)}


def _config_that_is_no_json(folder: Path) -> dict[str, str]:
    return {"checkpoint": str(write_header(folder / "x.safetensors", _shapes(TOY_23), {"config": "{transformer:"}))}


def _integers(folder: Path) -> dict[str, str]:
    _, metadata = read_all(TOY_23)
    return {"checkpoint": str(write_header(folder / "x.safetensors", _shapes(TOY_23), metadata, dtype="I32"))}


def _lora(folder: Path) -> dict[str, str]:
    module = "diffusion_model.transformer_blocks.0.attn1.to_q"
    shapes = {f"{module}.lora_A.weight": (4, 192), f"{module}.lora_B.weight": (192, 4)}
    return {"checkpoint": str(write_header(folder / "x.safetensors", shapes))}


def _older_model(folder: Path) -> dict[str, str]:
    shapes = {name: shape for name, shape in published_layout("20")[0].items() if "audio" not in name}
    return {"checkpoint": str(write_header(folder / "x.safetensors", shapes, {"config": json.dumps({"vae": {}})}))}


def _tensor_under_two_names(folder: Path) -> dict[str, str]:
    shapes = {name: (2, 2) for name in (f"{PREFIX}patchify_proj.weight", "patchify_proj.weight")}
    return {"checkpoint": str(write_header(folder / "x.safetensors", shapes))}


def _key_twice(folder: Path) -> dict[str, str]:
    entry = '"vae.x":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    return {
        "checkpoint": str(write_raw(folder / "x.safetensors", f"{{{entry % (0, 4)},{entry % (4, 8)}}}".encode(), 8))
    }


def _autoencoder_as_checkpoint(folder: Path) -> dict[str, str]:
    return {"checkpoint": str(only(TINY_23, folder / "vae.safetensors", "vae."))}


def _broken_part(folder: Path) -> dict[str, str]:
    path = folder / "vae.safetensors"
    path.write_bytes(b"PK\x03\x04" + b"\0" * 40)
    return {"video_vae": str(path)}


def _lora_as_part(folder: Path) -> dict[str, str]:
    return {"audio_vae": _lora(folder)["checkpoint"]}


def _gemma_of_another_size(folder: Path) -> dict[str, str]:
    return {"text_encoder": str(write_gemma(folder / "gemma", hidden_size=2560, num_hidden_layers=34))}


def _upsampler_of_another_model(folder: Path) -> dict[str, str]:
    return {"upsampler": str(TINY_UPSAMPLER)}


BROKEN: dict[Callable[[Path], dict[str, str]], str] = {
    _cut_off: "is cut off: its tensors need",
    _long_header: "is cut off inside its header: the header needs 90000000 bytes",
    _config_that_is_no_json: 'its metadata "config" is not valid JSON',
    _integers: "as I32, but floating-point numbers are needed",
    _lora: "is a LoRA, not an LTX-2 checkpoint",
    _older_model: "is an older LTX-Video checkpoint without sound",
    _tensor_under_two_names: "has one tensor twice",
    _key_twice: "its header has the key 'vae.x' twice",
    _autoencoder_as_checkpoint: "holds no transformer. It has: video autoencoder",
    _broken_part: "looks like a PyTorch pickle or zip",
    _lora_as_part: "was chosen beside .*, but nothing of it is used: it is or has a LoRA",
    _gemma_of_another_size: "has hidden size 2560 and 35 hidden states",
    _upsampler_of_another_model: "works on 16 latent channels, the checkpoint has 128",
}


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__.strip("_"))
def test_a_file_that_cannot_be_used_is_one_sentence_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], dict[str, str]]
) -> None:
    monkeypatch.setattr(MGPUController, "start", lambda *args, **kwargs: pytest.fail("a fleet was started"))
    client = LTXClient(replace(SETTINGS, **make(tmp_path)))
    for call in (client.check, lambda: client.encode("a ball", "", 128)):
        with pytest.raises(ValueError, match=BROKEN[make]) as error:
            call()
        assert "\n" not in str(error.value) and len(str(error.value)) < 800


def test_split_files_give_the_reference_clip_and_broken_ones_cost_the_fleet_nothing(tmp_path: Path) -> None:
    parts = {name: str(path) for name, path in split(TOY_23, tmp_path).items()}
    checkpoint = parts.pop("transformer")
    client = LTXClient(replace(SETTINGS, checkpoint=checkpoint, **parts))
    case = read_case(TOY / "reference" / "clip0.safetensors")
    sigmas = tuple(case.facts["stage1_sigmas"])
    stage = SPStage(case.facts["seed"], case.facts["fps"], "distilled", sigmas=sigmas, preview=False)
    noise = (case["stage1.video_noise"], case["stage1.audio_noise"])
    try:
        positive, _ = client.encode(case.facts["prompt"], "", case.facts["text_length"])
        fleet = current(client._key(), lambda: pytest.fail("the fleet is gone"))
        for number, make in enumerate(BROKEN):
            folder = tmp_path / str(number)
            folder.mkdir()
            with pytest.raises(ValueError, match=BROKEN[make]):
                LTXClient(replace(SETTINGS, **make(folder))).encode("a ball", "", 128)
        assert fleet.is_alive
        assert current(client._key(), lambda: pytest.fail("the fleet is gone")) is fleet
        clip = client.sp_stage(stage, positive, None, torch.zeros(1, 128, 3, 4, 4), noise=noise)
        assert relative_error(video_tokens(clip.video), case["stage1.video_latent"]) < 1e-5
        assert relative_error(audio_tokens(clip.audio), case["stage1.audio_latent"]) < 1e-5
        sound = client.decode(Decode("1x1"), clip.video[:, :, :1, :1, :1], audio_latent=clip.audio)
        assert sound.frames.shape == (1, 32, 32, 3) and sound.sample_rate == 48000
    finally:
        stop()
