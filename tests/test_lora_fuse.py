"""Fusing LoRAs into a module: the values, several at once, swaps without a trace, every precision of the base."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mgpu_runtime.models import lora as fusing
from mgpu_runtime.models.builder import ComponentBuilder
from mgpu_runtime.models.connectors import ConnectorsBuilder
from mgpu_runtime.models.lora import LoRADelta, LoRAFuser, Rule, fused_weight, read_deltas
from mgpu_runtime.models.stored import compute_dtype, original
from mgpu_runtime.models.transformer import LTXTransformer
from mgpu_runtime.models.transformer_builder import TransformerBuilder
from mgpu_runtime.weights.lora import LoRAFile
from mgpu_runtime.weights.lora_targets import match_lora
from mgpu_runtime.weights.quantized_numbers import quantize_fp8
from mgpu_runtime.weights.registry import StateDictRegistry
from tests import tiny
from tests.goldens import golden, relative_error
from tests.lora_files import LORA_23, OFFICIAL, random_pair, targets, toy_lora, write_lora
from tests.quantized_files import pack_nvfp4, stored_transposed, transformer_tensors, unscaled, write, write_fp8
from tests.weights_files import TINY_23

TO_Q, FF = "transformer_blocks.0.attn1.to_q", "transformer_blocks.0.ff.net.2"
Pairs = dict[str, tuple[Tensor, Tensor]]


def deltas_of(*given: tuple[Pairs, float]) -> dict[str, list[LoRADelta]]:
    """Builds the changes of some LoRAs, each with its strength, without files."""
    deltas: dict[str, list[LoRADelta]] = {}
    for pairs, strength in given:
        for module, (down, up) in pairs.items():
            deltas.setdefault(module, []).append(LoRADelta(down, up, strength))
    return deltas


def build(path: Path, dtype: torch.dtype = torch.float32, builder: type[ComponentBuilder] = TransformerBuilder):
    """Builds a component of a file on the CPU."""
    return builder(path, registry=StateDictRegistry()).build("cpu", dtype)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Reads every linear layer's weight as the layer computes with it."""
    return {name: layer.weight.clone() for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}


def all_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@torch.no_grad()
@pytest.mark.parametrize(("rule", "prefix"), [("float32", "out"), ("bf16", "bf16rule")])
def test_the_golden_lora_gives_the_official_velocities(rule: Rule, prefix: str) -> None:
    case = golden("lora_23")
    model = tiny.transformer("23")
    match = match_lora(LoRAFile(LORA_23), targets())
    LoRAFuser(model, rule=rule).fuse(read_deltas([(match, case.facts["strength"])], "transformer"))
    for stream, made in zip(("video", "audio"), model.predict(case.stream("video"), case.stream("audio")), strict=True):
        assert relative_error(made, case[f"{prefix}.{stream}_velocity"]) < 1e-4
        assert relative_error(made, case[f"base.{stream}_velocity"]) > 1e-2


# Values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_several_loras_add_up_in_float32(dtype: torch.dtype) -> None:
    weight = torch.randn(9, 6, generator=torch.Generator().manual_seed(9))
    before = weight.clone()
    pairs = [tuple(half.to(dtype) for half in random_pair(9, 6, rank=rank, seed=rank)) for rank in (1, 2, 7)]
    strengths = (0.7, -1.5, 3.0)
    made = fused_weight(weight, [LoRADelta(*pair, s) for pair, s in zip(pairs, strengths, strict=True)], "float32")
    expected = weight.double()
    for (down, up), strength in zip(pairs, strengths, strict=True):
        expected = expected + strength * (up.double() @ down.double())
    assert made.dtype == torch.float32 and torch.equal(weight, before)
    assert torch.allclose(made.double(), expected, rtol=0, atol=2e-6)


def test_b61_a_change_is_linear_in_its_strength() -> None:
    down, up = random_pair(8, 8, rank=4)
    changes = {s: fused_weight(torch.zeros(8, 8), [LoRADelta(down, up, s)], "float32") for s in (0.5, 1.0, -1.0, 0.0)}
    assert torch.equal(changes[0.5] * 2, changes[1.0]) and torch.equal(-changes[1.0], changes[-1.0])
    assert not changes[0.0].any() and torch.allclose(changes[1.0], up @ down, atol=1e-6)


def test_the_official_rule_rounds_matrices_products_and_sums_to_bfloat16() -> None:
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    pairs = [random_pair(8, 6, rank=1, seed=seed) for seed in (2, 3)]
    products = []
    for (down, up), strength in zip(pairs, (0.7, -0.3), strict=True):
        scaled = (up.bfloat16().float() * strength).bfloat16().float()
        products.append((scaled * down.bfloat16().float()).bfloat16().float())  # rank 1: a product has one term
    change = (products[0] + products[1]).bfloat16().float()
    deltas = [LoRADelta(*pair, strength) for pair, strength in zip(pairs, (0.7, -0.3), strict=True)]
    for base in (weight, weight.bfloat16()):
        assert torch.equal(fused_weight(base, deltas, "bf16"), (base.float() + change).bfloat16().float())
        assert torch.equal(fused_weight(base, deltas, "bf16 delta"), base.float() + change)


def test_a_bfloat16_model_follows_the_official_rule() -> None:
    model, plain = build(TINY_23, torch.bfloat16), build(TINY_23, torch.bfloat16)
    pairs = {TO_Q: random_pair(64, 64), FF: random_pair(64, 256)}
    LoRAFuser(model).fuse(deltas_of((pairs, 0.7)))
    for name, pair in pairs.items():
        own = original(plain.get_submodule(name)).weight(torch.float32)
        expected = fused_weight(own, [LoRADelta(*pair, 0.7)], "bf16").bfloat16()
        assert torch.equal(model.get_submodule(name).weight, expected)
    assert compute_dtype(model) == torch.bfloat16


# Swaps


def test_b65_after_any_swaps_the_weights_are_those_of_a_fresh_load_with_the_last_set() -> None:
    first = {TO_Q: random_pair(64, 64, seed=1), FF: random_pair(64, 256, seed=2)}
    second = {TO_Q: random_pair(64, 64, seed=3), "proj_out": random_pair(16, 64, seed=4)}
    fresh = tiny.transformer("23")
    LoRAFuser(fresh).fuse(deltas_of((second, 0.7)))
    model = tiny.transformer("23")
    fuser = LoRAFuser(model)
    for _ in range(5):
        fuser.fuse(deltas_of((first, 0.7), (second, 0.7)))
        fuser.fuse(deltas_of((second, -2.0)))
        fuser.fuse(deltas_of((first, 0.7)))
    fuser.fuse(deltas_of((second, 0.7)))
    assert all_equal(weights(model), weights(fresh)) and fuser.touched == second.keys()


def test_b65_without_loras_a_layer_is_again_the_mapped_file() -> None:
    registry = StateDictRegistry()
    model = TransformerBuilder(TINY_23, registry=registry).build("cpu", torch.float32)
    state = registry.get(TINY_23, "transformer")
    held = {name: tensor.data_ptr() for name, tensor in state.items()}
    fuser = LoRAFuser(model)
    fuser.fuse(deltas_of(({TO_Q: random_pair(64, 64)}, 1.0)))
    private = {name for name, parameter in model.named_parameters() if parameter.data_ptr() != held[name]}
    assert private == {f"{TO_Q}.weight"}  # only what a LoRA touches is copied
    fuser.fuse({})
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == held
    assert not fuser.touched and all(torch.equal(p, state[name]) for name, p in model.named_parameters())


def test_b68_a_change_that_was_interrupted_is_put_right_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {TO_Q: random_pair(64, 64, seed=1), FF: random_pair(64, 256, seed=2)}
    second = {FF: random_pair(64, 256, seed=3), TO_Q: random_pair(64, 64, seed=4), "proj_out": random_pair(16, 64)}
    plain, fresh, model = tiny.transformer("23"), tiny.transformer("23"), tiny.transformer("23")
    LoRAFuser(fresh).fuse(deltas_of((second, 1.0)))
    for then, expected in ((first, None), (second, fresh), ({}, plain)):
        fuser = LoRAFuser(model)
        fuser.fuse(deltas_of((first, 1.0)))
        before = weights(model)
        calls = iter(range(100))

        def interrupted(*given: object, calls=calls, whole=fused_weight) -> Tensor:
            if next(calls) == 1:
                raise KeyboardInterrupt
            return whole(*given)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(fusing, "fused_weight", interrupted)
            fuser.fuse(deltas_of((second, 1.0)))
        assert not all_equal(weights(model), before)  # it stopped half way
        fuser.fuse(deltas_of((then, 1.0)) if then else {})
        assert all_equal(weights(model), before if expected is None else weights(expected))
        fuser.fuse({})


def test_a_layer_that_does_not_fit_is_refused_before_any_is_changed() -> None:
    model = tiny.transformer("23")
    fuser, before = LoRAFuser(model), weights(model)
    for name, words in ((FF, r"\[64, 64\] matrix, but the model has \[64, 256\]"), ("norm", "no linear layer")):
        with pytest.raises(ValueError, match=words):
            fuser.fuse(deltas_of(({TO_Q: random_pair(64, 64), name: random_pair(64, 64)}, 1.0)))
    assert all_equal(weights(model), before) and not fuser.touched


# Other precisions of the base


@pytest.mark.parametrize("dialect", [stored_transposed, unscaled], ids=lambda d: d.__name__)
def test_b64_an_fp8_base_is_undone_changed_and_quantised_anew(tmp_path: Path, dialect) -> None:
    """The feed-forward is not square, and stored (in, out) in one of the files; the LoRA's change is (out, in)."""
    path = write_fp8(tmp_path / "fp8.safetensors", dialect)
    pairs = {TO_Q: random_pair(64, 64, scale=1.0), FF: random_pair(64, 256, scale=1.0)}
    match = match_lora(LoRAFile(write_lora(tmp_path / "a.safetensors", pairs)), targets(path))
    model, plain = build(path), build(path)
    fuser = LoRAFuser(model)
    fuser.fuse(read_deltas([(match, 0.7)], "transformer"))
    for name, (down, up) in pairs.items():
        layer = model.get_submodule(name)
        wanted = plain.get_submodule(name).weight + 0.7 * (up @ down)
        stored, scale = quantize_fp8(wanted, torch.float8_e4m3fn, scaled=dialect is not unscaled)
        assert layer.stored.dtype == torch.float8_e4m3fn
        expected = stored.float() * (1.0 if scale is None else scale)
        assert relative_error(layer.weight, expected) < 1e-6 and relative_error(layer.weight, wanted) < 0.04
        if scale is not None:
            assert layer.stored_scale.numel() == 1 and torch.allclose(layer.stored_scale, scale, rtol=1e-6)
    fuser.fuse({})
    assert all_equal(weights(model), weights(plain))
    for name in pairs:
        assert model.get_submodule(name).stored.data_ptr() == original(model.get_submodule(name)).stored.data_ptr()


def test_b64_a_change_that_fits_an_fp8_weight_in_neither_way_names_both_shapes(tmp_path: Path) -> None:
    path = write_fp8(tmp_path / "fp8.safetensors", stored_transposed)
    lora = write_lora(tmp_path / "a.safetensors", {FF: random_pair(64, 128)})
    with pytest.raises(ValueError, match=r"\[64, 128\] matrix, but .* has \[256, 64\]"):
        match_lora(LoRAFile(lora), targets(path))


def test_an_nvfp4_layer_becomes_bfloat16_and_is_packed_again(tmp_path: Path) -> None:
    tensors, metadata = transformer_tensors()
    name = f"model.diffusion_model.{FF}"
    packed, scales, second = pack_nvfp4(tensors.pop(f"{name}.weight"))
    tensors |= {f"{name}.weight": packed, f"{name}.weight_scale": scales, f"{name}.weight_scale_2": second}
    path = write(tmp_path / "fp4.safetensors", tensors, metadata)
    model, plain = build(path), build(path)
    down, up = random_pair(64, 256)
    lora = write_lora(tmp_path / "a.safetensors", {FF: (down, up)})
    fuser = LoRAFuser(model)
    fuser.fuse(read_deltas([(match_lora(LoRAFile(lora), targets(path)), 1.0)], "transformer"))
    wanted = plain.get_submodule(FF).weight + up @ down
    assert torch.equal(model.get_submodule(FF).weight, wanted.bfloat16().float())
    fuser.fuse({})
    assert torch.equal(model.get_submodule(FF).weight, plain.get_submodule(FF).weight)
    assert model.get_submodule(FF).stored.dtype == torch.uint8


def test_a_bfloat16_file_that_computes_in_float32_is_changed_and_restored(tmp_path: Path) -> None:
    tensors, metadata = transformer_tensors()
    narrow = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    path = write(tmp_path / "bf16.safetensors", narrow, metadata)
    model, plain = build(path), build(path)
    pairs = {TO_Q: random_pair(64, 64), FF: random_pair(64, 256)}
    fuser = LoRAFuser(model)
    fuser.fuse(deltas_of((pairs, 1.0)))
    for name, (down, up) in pairs.items():
        wanted = plain.get_submodule(name).weight + up @ down
        assert relative_error(model.get_submodule(name).weight, wanted) < 2**-8
    fuser.fuse({})
    assert all_equal(weights(model), weights(plain))


def test_weights_rounded_to_fp8_are_rounded_again_after_the_change() -> None:
    builder = TransformerBuilder(TINY_23, registry=StateDictRegistry(), round_to_fp8=True)
    model, plain = builder.build("cpu", torch.float32), builder.build("cpu", torch.float32)
    down, up = random_pair(64, 64, scale=1.0)
    fuser = LoRAFuser(model)
    fuser.fuse(deltas_of(({TO_Q: (down, up)}, 1.0)))
    wanted = (plain.get_submodule(TO_Q).weight + up @ down).to(torch.float8_e4m3fn).float()
    assert torch.equal(model.get_submodule(TO_Q).weight, wanted)
    fuser.fuse({})
    assert all_equal(weights(model), weights(plain))


def test_a_lora_of_the_text_connectors_reaches_them_alone(tmp_path: Path) -> None:
    module = "text_embedding_projection.video_aggregate_embed"
    shape = targets().find(module).shape
    pairs = {module: random_pair(*shape), TO_Q: random_pair(64, 64)}
    tensors = write_lora(tmp_path / "a.safetensors", pairs, OFFICIAL)
    match = match_lora(LoRAFile(tensors), targets())
    assert (match.report.matched, match.report.connectors) == (2, 1)
    connectors = build(TINY_23, builder=ConnectorsBuilder)
    before = weights(connectors)
    LoRAFuser(connectors).fuse(read_deltas([(match, 1.0)], "connectors"))
    changed = {name for name, weight in weights(connectors).items() if not torch.equal(weight, before[name])}
    assert changed == {"video_text_proj_in"}
    assert read_deltas([(match, 1.0)], "transformer").keys() == {TO_Q}


def test_a_lora_can_be_made_for_any_checkpoint_and_fuses(tmp_path: Path) -> None:
    model: LTXTransformer = tiny.transformer("23")
    match = match_lora(LoRAFile(toy_lora(tmp_path / "a.safetensors", TINY_23)), targets())
    fuser = LoRAFuser(model)
    fuser.fuse(read_deltas([(match, 1.0)], "transformer"))
    assert len(fuser.touched) == match.report.matched == 12
