"""What a file may not hold: other formats, numbers that are none, integers. One sentence each, and the fleet lives."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mgpu_runtime.fleet import SymmetricRunnerError, current, stop
from mgpu_runtime.models.transformer_builder import TransformerBuilder, build_transformer
from mgpu_runtime.models.video_vae import VideoVAEBuilder
from mgpu_runtime.pipeline.client import LTXClient
from mgpu_runtime.pipeline.jobs import Decode, PromptContext, SPStage
from mgpu_runtime.pipeline.settings import LTXSettings
from mgpu_runtime.weights.quantized_numbers import is_finite
from mgpu_runtime.weights.registry import StateDictRegistry
from tests.quantized_files import E4M3, PREFIX, Tensors, fp8_tensors, lightricks, transformer_tensors, write
from tests.weights_files import TINY_23, read_all

LAYER = f"{PREFIX}transformer_blocks.0.attn1.to_q"


def refuse(tmp_path: Path, tensors: Tensors, metadata: dict[str, str]) -> str:
    """Returns the one sentence that a builder says from the header alone."""
    path, registry = write(tmp_path / "x.safetensors", tensors, metadata), StateDictRegistry()
    with pytest.raises(ValueError) as error:
        TransformerBuilder(path, registry=registry).check()
    assert registry.files_read == 0
    text = str(error.value)
    assert "\n" not in text and len(text) < 700 and str(path) in text
    return text


def marker(**content: object) -> Tensor:
    return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)


FORMATS: dict[str, Tensors] = {
    "int8": {"weight": torch.zeros(64, 64, dtype=torch.int8), "weight_scale": torch.ones(64, 1)},
    "int8_tensorwise with convrot": {
        "weight": torch.zeros(64, 64, dtype=torch.int8),
        "weight_scale": torch.ones(64, 1),
        "comfy_quant": marker(format="int8_tensorwise", convrot=True, convrot_groupsize=256),
    },
    "mxfp8": {"weight": torch.zeros(64, 64).to(E4M3), "weight_scale": torch.zeros(128, 4, dtype=torch.uint8)},
    "blockwise fp8": {"weight": torch.zeros(64, 64).to(E4M3), "weight_scale": torch.ones(2, 2)},
    "bitsandbytes 4 bit": {"weight": torch.zeros(2048, 1, dtype=torch.uint8), "weight.absmax": torch.ones(64)},
    "SVDQuant 4 bit": {"qweight": torch.zeros(64, 32, dtype=torch.int8), "wscales": torch.ones(1, 64)},
    "GPTQ or AWQ": {"qweight": torch.zeros(64, 8, dtype=torch.int32)},
    "w4a8": {"weight": torch.zeros(64, 32, dtype=torch.int8), "weight_codebook": torch.zeros(16)},
}


@pytest.mark.parametrize("title", FORMATS)
def test_a_format_that_is_not_run_is_named(tmp_path: Path, title: str) -> None:
    tensors, metadata = transformer_tensors()
    del tensors[f"{LAYER}.weight"]
    text = refuse(tmp_path, tensors | {f"{LAYER}.{name}": tensor for name, tensor in FORMATS[title].items()}, metadata)
    assert f"is quantised as {title}" in text and LAYER in text


def test_a_format_that_only_the_metadata_names(tmp_path: Path) -> None:
    """Newer ComfyUI files may declare their layers' formats there; a damaged table is said to be one."""
    tensors, metadata = fp8_tensors(lightricks)
    table = {"layers": {"transformer_blocks.0.attn1.to_q": {"format": "float8_e4m3fn"}}}
    path = write(tmp_path / "ok.safetensors", tensors, {**metadata, "_quantization_metadata": json.dumps(table)})
    build_transformer(path, registry=StateDictRegistry(), device="cpu", dtype=torch.float32)
    table["layers"]["transformer_blocks.0.attn1.to_q"] = {"format": "future4"}
    text = refuse(tmp_path, tensors, {**metadata, "_quantization_metadata": json.dumps(table)})
    assert "is quantised as future4" in text
    assert "cannot be read" in refuse(tmp_path, tensors, {**metadata, "_quantization_metadata": "[]"})


def test_a_damaged_marker_is_named(tmp_path: Path) -> None:
    tensors, metadata = fp8_tensors(lightricks)
    tensors[f"{LAYER}.comfy_quant"] = torch.tensor([1, 255, 7], dtype=torch.uint8)
    assert f"marker '{LAYER}.comfy_quant' in" in refuse(tmp_path, tensors, metadata)


def test_two_scales_for_one_weight(tmp_path: Path) -> None:
    tensors, metadata = fp8_tensors(lightricks)
    tensors[f"{LAYER}.scale_weight"] = torch.ones(1)
    assert "has two scales for one weight" in refuse(tmp_path, tensors, metadata)


def test_nvfp4_without_its_second_scale_or_with_scales_of_another_size(tmp_path: Path) -> None:
    tensors, metadata = transformer_tensors()
    tensors[f"{LAYER}.weight"] = torch.zeros(64, 32, dtype=torch.uint8)
    tensors[f"{LAYER}.weight_scale"] = torch.ones(128, 4).to(E4M3)
    assert "has no 'weight_scale_2' for the nvfp4 weight" in refuse(tmp_path, tensors, metadata)
    tensors[f"{LAYER}.weight_scale_2"] = torch.ones(())
    tensors[f"{LAYER}.weight_scale"] = torch.ones(64, 4).to(E4M3)
    assert "which do not fit each other" in refuse(tmp_path, tensors, metadata)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool])
def test_weights_that_are_integers_are_named(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors, metadata = transformer_tensors()
    tensors[f"{LAYER}.weight"] = torch.zeros(64, 64, dtype=dtype)
    text = refuse(tmp_path, tensors, metadata)
    assert f"holds '{LAYER}.weight' as " in text and "floating-point numbers are needed" in text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_values_that_are_not_finite_are_found(dtype: torch.dtype, value: float) -> None:
    largest = torch.finfo(dtype).max
    tensor = torch.linspace(-1, 1, 1001).mul(largest).to(dtype).view(7, 143)
    assert is_finite(tensor) and is_finite(tensor.t()) and is_finite(torch.empty(0, 4).to(dtype))
    if dtype == torch.float8_e4m3fn and value == value:  # the format has no infinity
        assert is_finite(tensor)
        return
    raw = {torch.float8_e4m3fn: (0x7F, 0xFF), torch.float8_e5m2: {float("inf"): (0x7C,), float("-inf"): (0xFC,)}.get(
        value, (0x7D, 0x7F, 0xFF))}.get(dtype)  # fmt: skip
    for code in raw or (None,):
        broken = tensor.clone()
        if code is None:
            broken[3, 5] = value
        else:
            broken.view(torch.uint8)[3, 5] = code
        assert not is_finite(broken)


@pytest.mark.parametrize("name", ["weight", "weight_scale", "bias"])
def test_nan_weights_are_named_with_their_file(tmp_path: Path, name: str) -> None:
    tensors, metadata = fp8_tensors(lightricks)
    broken = tensors[f"{LAYER}.{name}"].clone()
    if name == "weight":
        broken.view(torch.uint8)[0, 0] = 0x7F
    else:
        broken.view(-1)[0] = float("nan")
    path = write(tmp_path / "x.safetensors", tensors | {f"{LAYER}.{name}": broken}, metadata)
    with pytest.raises(ValueError) as error:
        build_transformer(path, registry=StateDictRegistry(), device="cpu", dtype=torch.bfloat16)
    tensor = "bias" if name == "bias" else "weight"
    assert str(path) in str(error.value)
    assert f"'transformer_blocks.0.attn1.to_q.{tensor}' holds numbers that are not finite" in str(error.value)


def test_a_quantised_autoencoder_runs(tmp_path: Path) -> None:
    """Convolutions in 8 bit: unscaled, as tools cast whole files."""
    tensors, metadata = read_all(TINY_23)
    cast = {name: tensor.to(E4M3) if name.startswith("vae.") and tensor.dim() > 1 else tensor
            for name, tensor in tensors.items()}  # fmt: skip
    save_file(cast, tmp_path / "x.safetensors", metadata=metadata)
    vae = VideoVAEBuilder(tmp_path / "x.safetensors", registry=StateDictRegistry()).build("cpu", torch.float32)
    assert vae.dtype == torch.float32
    name = next(name for name, _ in vae.named_modules() if name.endswith("conv_in.conv"))
    layer = vae.get_submodule(name)
    assert layer.stored.dtype == E4M3 and torch.equal(layer.weight, layer.stored.float())


def test_nan_weights_leave_the_fleet_warm(tmp_path: Path) -> None:
    """An fp8 transformer samples on two workers; the autoencoder beside it is damaged, which only a decode meets."""
    tensors, metadata = read_all(TINY_23)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
    tensors |= fp8_tensors(lightricks)[0]
    broken = "vae.decoder.conv_in.conv.weight"
    tensors[broken] = torch.full_like(tensors[broken], float("nan"))
    client = LTXClient(LTXSettings(str(write(tmp_path / "x.safetensors", tensors, metadata)), devices="cpu:2"))
    assert client.check().precision == "fp8 scaled"
    latent = torch.zeros(1, 16, 2, 2, 2)
    prompt = PromptContext(torch.ones(1, 128, 64), torch.ones(1, 128, 32))
    try:
        first = client.sp_stage(SPStage(0, 24.0, schedule="distilled"), prompt, None, latent)
        pids = current(client._key(), lambda: pytest.fail("the fleet was lost")).worker_pids
        with pytest.raises(SymmetricRunnerError, match=r"video autoencoder .* 'decoder.conv_in.conv.weight' holds num"):
            client.decode(Decode("1x1"), first.video)
        again = client.sp_stage(SPStage(0, 24.0, schedule="distilled"), prompt, None, latent)
        assert torch.equal(again.video, first.video) and torch.equal(again.audio, first.audio)
        assert current(client._key(), lambda: pytest.fail("the fleet was lost")).worker_pids == pids
    finally:
        stop()
