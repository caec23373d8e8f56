"""Quantised files: every dialect gives the official result, stays in 8 bit, and what is wrong with one is said."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mgpu_runtime.models.loading import fill
from mgpu_runtime.models.stored import StoredWeight, compute_dtype
from mgpu_runtime.models.transformer import LTXTransformer
from mgpu_runtime.models.transformer_builder import build_transformer
from mgpu_runtime.weights.quantized import Quantization, describe_precision
from mgpu_runtime.weights.quantized_numbers import dequantize_fp8, dequantize_nvfp4, quantize_fp8, untile_scales
from mgpu_runtime.weights.registry import StateDictRegistry
from tests.goldens import golden, relative_error
from tests.quantized_files import (
    DIALECTS,
    E4M3,
    PREFIX,
    Dialect,
    fp8_tensors,
    is_quantized,
    lightricks,
    older_comfyui,
    pack_nvfp4,
    tile_scales,
    transformer_tensors,
    unscaled,
    write,
    write_fp8,
)
from tests.weights_files import TINY_23

PROJECTION = "transformer_blocks.0.attn1.to_q"
WIDENING = "transformer_blocks.0.ff.net.0.proj"  # not square


def build(path: Path, dtype: torch.dtype = torch.float32) -> LTXTransformer:
    return build_transformer(path, registry=StateDictRegistry(), device="cpu", dtype=dtype)


def predict(model: LTXTransformer) -> tuple[Tensor, Tensor]:
    case = golden("fp8_23")
    with torch.no_grad():
        return model.predict(case.stream("video"), case.stream("audio"))


def precision(path: Path) -> str:
    return describe_precision(StateDictRegistry().checkpoint(path), "transformer")


@pytest.fixture(scope="module")
def fp8_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fp8(tmp_path_factory.mktemp("fp8") / "fp8.safetensors")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_b64_b69_b71_every_dialect_gives_the_official_velocities(tmp_path: Path, dialect: Dialect) -> None:
    path = write_fp8(tmp_path / "x.safetensors", dialect)
    model, case = build(path), golden("fp8_23")
    for stream, velocity in zip(("video", "audio"), predict(model), strict=True):
        assert relative_error(velocity, case[f"out.{stream}_velocity"]) < 1e-5
    assert precision(path) == "fp8 scaled"


def test_8_bit_weights_stay_so_in_memory_and_are_views_of_the_file(fp8_file: Path) -> None:
    registry = StateDictRegistry()
    model = build_transformer(fp8_file, registry=registry, device="cpu", dtype=torch.bfloat16)
    mapped = registry.get(fp8_file, "transformer")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, StoredWeight)}
    assert len(layers) >= 56
    for name, layer in layers.items():
        assert layer.stored.data_ptr() == mapped[f"{name}.weight"].data_ptr(), name
    held = [layer for layer in layers.values() if layer.stored.dtype == E4M3]
    assert len(held) == 56 and isinstance(held[0], nn.Linear) and held[0].weight.dtype == torch.bfloat16
    assert model.dtype == compute_dtype(model) == torch.bfloat16
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_b75_no_tensor_stays_empty_in_any_precision(fp8_file: Path, dtype: torch.dtype) -> None:
    for path in (fp8_file, TINY_23):
        model = build(path, dtype)
        assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
        video, audio = predict(model)
        assert video.dtype == audio.dtype == dtype and bool(video.isfinite().all() and audio.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scaled_fp8_is_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for stored in (torch.float8_e4m3fn, torch.float8_e5m2):
        weight = (torch.randn(30, 50, generator=generator) * 20).to(stored)
        for scale in (torch.tensor([[0.0013]]), torch.rand(30, 1, generator=generator)):
            expected = (weight.float() * scale).to(dtype)
            assert torch.equal(dequantize_fp8(weight, scale, dtype), expected)
            assert torch.equal(dequantize_fp8(weight.t(), scale, dtype, transposed=True), expected)


def test_b69_the_published_scale_makes_weights_770_times_smaller() -> None:
    generator = torch.Generator().manual_seed(0)
    stored = (torch.randn(256, 256, generator=generator) * 26.9).to(E4M3)
    weight = dequantize_fp8(stored, torch.tensor([[0.0013]]), torch.bfloat16)
    assert stored.float().std().item() == pytest.approx(26.9, rel=0.01)
    assert weight.float().std().item() == pytest.approx(0.035, rel=0.01)


def test_b64_a_square_weight_is_read_as_published(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its shape cannot tell how it is stored, so the published (out, in) holds whatever the others' orientation."""
    _, scale = quantize_fp8(transformer_tensors()[0][f"{PREFIX}{PROJECTION}.weight"], E4M3)
    tensors, metadata = fp8_tensors(lightricks)
    square = tensors[f"{PREFIX}{PROJECTION}.weight"]
    tensors[f"{PREFIX}{WIDENING}.weight"] = tensors[f"{PREFIX}{WIDENING}.weight"].t().contiguous()
    layer = build(write(tmp_path / "x.safetensors", tensors, metadata)).get_submodule(PROJECTION)
    assert square.shape[0] == square.shape[1]
    assert torch.equal(layer.weight, square.float() * scale)
    assert caplog.text.count("1 fp8 weights such as 'transformer_blocks.0.ff.net.0.proj.weight' are stored as (in") == 1


def test_b64_a_weight_that_fits_neither_way_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors, metadata = fp8_tensors(lightricks)
    tensors[f"{PREFIX}{WIDENING}.weight"] = tensors[f"{PREFIX}{WIDENING}.weight"][:, :-1].contiguous()
    with pytest.raises(ValueError, match=rf"1 of another shape \({WIDENING}.weight: file \[256, 63\], model"):
        build(write(tmp_path / "x.safetensors", tensors, metadata))


def test_scales_of_the_wrong_side_are_refused(tmp_path: Path) -> None:
    tensors, metadata = fp8_tensors(lightricks)
    tensors[f"{PREFIX}{WIDENING}.weight_scale"] = torch.ones(64)  # one a column
    with pytest.raises(ValueError, match="scales that are neither one nor one a row"):
        build(write(tmp_path / "x.safetensors", tensors, metadata))


def test_b69_a_file_without_any_scale_is_taken_as_it_is(tmp_path: Path) -> None:
    path = write_fp8(tmp_path / "x.safetensors", unscaled)
    layer = build(path).get_submodule(PROJECTION)
    assert layer.stored.dtype == E4M3 and torch.equal(layer.weight, layer.stored.float())
    assert precision(path) == "fp8"


@pytest.mark.parametrize("dialect", [lightricks, older_comfyui])
def test_b69_a_scale_that_is_missing_is_named(tmp_path: Path, dialect: Dialect) -> None:
    tensors, metadata = fp8_tensors(dialect)
    for suffix in ("weight_scale", "scale_weight"):
        tensors.pop(f"{PREFIX}{WIDENING}.{suffix}", None)
    path = write(tmp_path / "x.safetensors", tensors, metadata)
    with pytest.raises(ValueError, match=rf"1 of its fp8 tensors have no scale, such as '{PREFIX}{WIDENING}.weight'"):
        build(path)


def test_b69_a_marker_of_scaled_weights_without_scales_is_refused(tmp_path: Path) -> None:
    tensors, metadata = fp8_tensors(unscaled)
    tensors["scaled_fp8"] = torch.zeros(2, dtype=E4M3)
    with pytest.raises(ValueError, match="56 of its fp8 tensors have no scale"):
        build(write(tmp_path / "x.safetensors", tensors, metadata))


@pytest.mark.parametrize("suffix", ["weight_scale", "scale_weight", "input_scale", "bias_scale", "comfy_quant"])
def test_b69_a_scale_without_its_weight_is_named(tmp_path: Path, suffix: str) -> None:
    tensors, metadata = fp8_tensors(lightricks)
    marker = torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    tensors[f"{PREFIX}proj_out.{suffix}"] = marker if suffix == "comfy_quant" else torch.ones(())
    with pytest.raises(ValueError, match=rf"has '{PREFIX}proj_out.{suffix}', but no quantised \w+ that it belongs to"):
        build(write(tmp_path / "x.safetensors", tensors, metadata))


def test_scaled_biases(tmp_path: Path) -> None:
    tensors, metadata = fp8_tensors(lightricks)
    bias, scale = quantize_fp8(tensors[f"{PREFIX}{PROJECTION}.bias"], E4M3)
    tensors |= {f"{PREFIX}{PROJECTION}.bias": bias, f"{PREFIX}{PROJECTION}.bias_scale": scale}
    layer = build(write(tmp_path / "x.safetensors", tensors, metadata)).get_submodule(PROJECTION)
    assert layer.bias.dtype == torch.float32 and torch.equal(layer.bias, bias.float() * scale)


@given(rows=st.integers(1, 300), columns=st.integers(1, 20))
@settings(max_examples=15, deadline=None)
def test_scales_come_out_of_their_tiles(rows: int, columns: int) -> None:
    scales = torch.arange(rows * columns, dtype=torch.int64).remainder(0x7F).to(torch.uint8).view(rows, columns)
    tiled = tile_scales(scales.view(E4M3))
    for shape in (tiled.shape, (-1,), (-1, 32, 16)):
        assert torch.equal(untile_scales(tiled.reshape(shape), rows, columns).view(torch.uint8), scales)


def test_every_nvfp4_number_has_its_value() -> None:
    """All 16 codes, the first of a byte in its high half; the block's scale is 1.5, the second 0.25."""
    packed = torch.tensor([[0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]], dtype=torch.uint8)
    scales = tile_scales(torch.tensor([[1.5]]).to(E4M3))
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = torch.tensor([[*values, *(-value for value in values)]]) * 1.5 * 0.25
    for dtype in (torch.float32, torch.bfloat16):
        got = dequantize_nvfp4(packed, scales, torch.tensor([0.25]), dtype, (1, 16))
        assert torch.equal(got, expected.to(dtype))


def test_an_nvfp4_file_runs_and_stays_packed(tmp_path: Path) -> None:
    tensors, metadata = transformer_tensors()
    wide = dict(tensors)
    for name in [name for name in tensors if is_quantized(name) and ".attn1." in name]:
        layer, weight = name.removesuffix(".weight"), tensors[name]
        packed, scales, second = pack_nvfp4(weight)
        tensors |= {name: packed, f"{layer}.weight_scale": scales, f"{layer}.weight_scale_2": second}
        tensors[f"{layer}.input_scale"] = torch.tensor(0.1)
        wide[name] = dequantize_nvfp4(packed, scales, second.reshape(1), torch.float32, tuple(weight.shape))
        assert relative_error(wide[name], weight) < 0.2
    path = write(tmp_path / "fp4.safetensors", tensors, metadata)
    model = build(path)
    layer = model.get_submodule(PROJECTION)
    assert layer.stored.dtype == torch.uint8 and layer.stored.numel() == layer.weight.numel() // 2
    same = build(write(tmp_path / "wide.safetensors", wide, metadata))
    assert all(torch.equal(one, other) for one, other in zip(predict(model), predict(same), strict=True))
    assert precision(path) == "nvfp4"


def test_nvfp4_weights_padded_to_multiples_of_16_are_cut() -> None:
    """As ComfyUI writes them for layers whose sides are no multiple of 16."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(20, 33, bias=False))
    padded = nn.functional.pad(torch.randn(33, 20), (0, 12, 0, 15))
    packed, scales, second = pack_nvfp4(padded)
    state = {"0.weight": packed, "0.weight_scale": scales, "0.weight_scale_2": second}
    way = Quantization("nvfp4", (48, 32), "0.weight_scale", "0.weight_scale_2", scales.numel())
    fill(module, state, device=torch.device("cpu"), dtype=torch.float32, what="x", quantized={"0.weight": way})
    whole = dequantize_nvfp4(packed, scales, second.reshape(1), torch.float32, (48, 32))
    assert torch.equal(module[0].weight, whole[:33, :20])
