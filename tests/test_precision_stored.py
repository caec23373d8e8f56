"""Weights kept as the file holds them: the same numbers, shared pages, replaceable without a trace."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from mgpu_runtime.fleet import RankInfo
from mgpu_runtime.models.loading import fill
from mgpu_runtime.models.stored import (
    MIN_SHARED_NUMEL,
    StoredLinear,
    StoredWeight,
    compute_dtype,
    original,
    replace_weight,
)
from mgpu_runtime.models.transformer import LTXTransformer
from mgpu_runtime.models.transformer_builder import TransformerBuilder, build_transformer
from mgpu_runtime.parallel.sequence_parallel import SequenceParallelBuilder
from mgpu_runtime.pipeline.models import LTXModels
from mgpu_runtime.pipeline.settings import LTXSettings
from mgpu_runtime.weights.facts import describe
from mgpu_runtime.weights.quantized import Quantization
from mgpu_runtime.weights.quantized_numbers import quantize_fp8
from mgpu_runtime.weights.registry import StateDictRegistry
from tests.goldens import golden
from tests.quantized_files import E4M3, pack_nvfp4, transformer_tensors, write, write_fp8
from tests.weights_files import TOY_23

CPU = torch.device("cpu")
CAST = (".to_q", ".to_k", ".to_v", ".to_out.0", "ff.net.0.proj", "ff.net.2")  # by the official fp8-cast


def predict(model: LTXTransformer) -> tuple[Tensor, Tensor]:
    case = golden("fp8_23")
    with torch.no_grad():
        return model.predict(case.stream("video"), case.stream("audio"))


@pytest.fixture(scope="module")
def bf16_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors, metadata = transformer_tensors()
    path = tmp_path_factory.mktemp("bf16") / "bf16.safetensors"
    return write(path, {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, metadata)


def build(path: Path, dtype: torch.dtype = torch.float32) -> LTXTransformer:
    return build_transformer(path, registry=StateDictRegistry(), device="cpu", dtype=dtype)


def test_b81_a_bf16_file_computed_in_float32_is_not_copied(tmp_path: Path, bf16_file: Path) -> None:
    """Its large weights stay the file's; the velocities are bit for bit those of weights converted beforehand."""
    registry = StateDictRegistry()
    model = build_transformer(bf16_file, registry=registry, device="cpu", dtype=torch.float32)
    mapped = registry.get(bf16_file, "transformer")
    large = [name for name, layer in model.named_modules() if type(layer) is StoredLinear]
    assert len(large) >= 10 and model.dtype == torch.float32
    assert all(model.get_submodule(name).stored.data_ptr() == mapped[f"{name}.weight"].data_ptr() for name in large)
    copied = {name for name, tensor in model.named_parameters() if tensor.numel() >= MIN_SHARED_NUMEL}
    assert not copied
    tensors, metadata = transformer_tensors()
    wide = {name: tensor.to(torch.bfloat16).float() for name, tensor in tensors.items()}
    converted = build(write(tmp_path / "wide.safetensors", wide, metadata))
    assert not any(isinstance(layer, StoredWeight) for layer in converted.modules())
    assert all(torch.equal(one, other) for one, other in zip(predict(model), predict(converted), strict=True))


def test_convolutions_are_stored_too() -> None:
    layers = [
        (nn.Conv1d(64, 64, 5), torch.randn(1, 64, 9)),
        (nn.Conv2d(64, 64, 3), torch.randn(1, 64, 5, 5)),
        (nn.Conv3d(32, 32, 3), torch.randn(1, 32, 4, 5, 6)),
        (nn.ConvTranspose1d(64, 64, 4, stride=2), torch.randn(1, 64, 9)),
        (nn.Linear(128, 160), torch.randn(3, 128)),
    ]
    for layer, x in layers:
        half = {name: tensor.detach().to(torch.bfloat16) for name, tensor in layer.state_dict().items()}
        layer.load_state_dict({name: tensor.float() for name, tensor in half.items()})
        expected = layer(x)
        fill(layer, half, device=CPU, dtype=torch.float32, what="x")
        assert isinstance(layer, StoredWeight) and layer.stored is half["weight"]
        assert torch.equal(layer(x), expected)
        assert [name for name, _ in layer.named_parameters()] == ["bias"] and compute_dtype(layer) == torch.float32


def test_alike_layers_share_one_compiled_graph() -> None:
    """torch.compile must not compile a stored layer anew for each block, nor break its graph."""
    layers, way = [nn.Linear(16, 16) for _ in range(3)], Quantization("fp8 scaled", (16, 16), "weight_scale")
    for layer in layers:
        weight, scale = quantize_fp8(layer.weight.detach(), E4M3)
        state = {"weight": weight, "weight_scale": scale, "bias": layer.bias.detach()}
        fill(layer, state, device=CPU, dtype=torch.bfloat16, what="x", quantized={"weight": way})
    counter = CompileCounter()
    torch._dynamo.reset()
    run = torch.compile(lambda layer, x: layer(x), backend=counter, fullgraph=True)
    x = torch.randn(2, 16).to(torch.bfloat16)
    with torch.no_grad():
        for layer in layers:
            assert torch.equal(run(layer, x), layer(x))
    assert counter.frame_count == 1


def test_a_replaced_fp8_weight_is_fp8_again_with_a_new_scale(tmp_path: Path) -> None:
    layer = build(write_fp8(tmp_path / "x.safetensors")).get_submodule("transformer_blocks.0.ff.net.0.proj")
    pristine, held = layer.weight.clone(), layer.stored.data_ptr()
    fused = pristine + torch.randn_like(pristine)
    replace_weight(layer, fused)
    assert layer.stored.dtype == E4M3 and layer.stored_scale.item() == pytest.approx(fused.abs().max().item() / 448)
    step = fused.abs().max() / 448 * 16  # half the distance between the largest fp8 numbers
    assert (layer.weight - fused).abs().max() <= step
    once = layer.weight.clone()
    for _ in range(3):
        replace_weight(layer, fused * 2)
        replace_weight(layer, fused)
    assert torch.equal(layer.weight, once)
    assert torch.equal(original(layer).weight(), pristine)
    replace_weight(layer, None)
    assert torch.equal(layer.weight, pristine) and layer.stored.data_ptr() == held


def test_a_transposed_fp8_weight_is_replaced_as_the_model_sees_it() -> None:
    with torch.device("meta"):
        layer = nn.Linear(32, 48, bias=False)
    weight, scale = quantize_fp8(torch.randn(48, 32), E4M3)
    state = {"weight": weight.t().contiguous(), "weight_scale": scale.reshape(())}
    way = Quantization("fp8 scaled", (32, 48), "weight_scale")
    fill(layer, state, device=CPU, dtype=torch.float32, what="x", quantized={"weight": way})
    pristine = weight.float() * scale
    assert torch.equal(layer.weight, pristine) and layer.weight.is_contiguous()
    replace_weight(layer, pristine)
    assert torch.equal(layer.weight, pristine)
    replace_weight(layer, None)
    assert torch.equal(layer.weight, pristine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replaced_nvfp4_weight_is_bfloat16(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        layer = nn.Linear(32, 48, bias=False)
    packed, scales, second = pack_nvfp4(torch.randn(48, 32))
    state = {"weight": packed, "weight_scale": scales, "weight_scale_2": second}
    way = Quantization("nvfp4", (48, 32), "weight_scale", "weight_scale_2", scales.numel())
    fill(layer, state, device=CPU, dtype=dtype, what="x", quantized={"weight": way})
    pristine, fused = layer.weight.clone(), torch.randn(48, 32)
    replace_weight(layer, fused)
    assert torch.equal(layer.weight, fused.to(torch.bfloat16).to(dtype)) and compute_dtype(layer) == dtype
    replace_weight(layer, None)
    assert torch.equal(layer.weight, pristine) and layer.stored is packed


def test_a_replaced_float_weight_is_as_precise_as_the_file(bf16_file: Path) -> None:
    """A float32 model of a bf16 file: small and large layers alike get a weight of 8 bits of mantissa."""
    model = build(bf16_file)
    for name in ("transformer_blocks.0.attn1.to_q", "transformer_blocks.0.ff.net.0.proj"):
        layer = model.get_submodule(name)
        pristine, fused = layer.weight.clone(), torch.randn(layer.weight.shape)
        replace_weight(layer, fused)
        assert layer.weight.dtype == torch.float32 and torch.equal(layer.weight, fused.to(torch.bfloat16).float())
        replace_weight(layer, None)
        assert torch.equal(layer.weight, pristine)
    free = nn.Linear(4, 6)  # no builder filled it
    pristine = free.weight.detach().clone()
    replace_weight(free, torch.ones(6, 4))
    assert torch.equal(free.weight, torch.ones(6, 4))
    replace_weight(free, None)
    assert torch.equal(free.weight, pristine)


def test_precision_fp8_rounds_what_the_official_fp8_cast_rounds(bf16_file: Path) -> None:
    """Weights and biases of the blocks' projections and feed-forwards, without a scale; nothing else."""
    settings = LTXSettings(str(bf16_file), devices="cpu:1", precision="fp8")
    facts = describe(settings.checkpoint_files())
    models = LTXModels(settings, facts, RankInfo(0, 1, CPU, None))
    model, plain = models.transformer, build(bf16_file)
    assert model.dtype == torch.float32
    names = dict(plain.named_parameters()) | {
        f"{name}.weight": layer.weight for name, layer in plain.named_modules() if isinstance(layer, StoredWeight)
    }
    changed = 0
    for name, tensor in names.items():
        owner, _, leaf = name.rpartition(".")
        is_cast = name.startswith("transformer_blocks.") and owner.endswith(CAST)
        expected = tensor.to(E4M3).float() if is_cast else tensor
        assert torch.equal(getattr(model.get_submodule(owner), leaf), expected), name
        changed += is_cast
    assert changed == 2 * 56
    inner = TransformerBuilder(bf16_file, registry=StateDictRegistry(), round_to_fp8=True)
    spread = SequenceParallelBuilder(inner, models.sequence_parallel().attn_mgr, StateDictRegistry())
    layer = spread.build(CPU, torch.float32).model.get_submodule("transformer_blocks.1.attn2.to_k")
    assert torch.equal(layer.weight, model.get_submodule("transformer_blocks.1.attn2.to_k").weight)


def test_a_rounded_weight_is_held_in_8_bit_or_rounded_at_use_alike() -> None:
    """On the CPU the file's own tensor is rounded at use, elsewhere it is held rounded; what replaces it, too."""
    wide = (torch.randn(16, 16) * 3).to(torch.bfloat16)
    layer = nn.Linear(16, 16, bias=False)
    fill(layer, {"weight": wide}, device=CPU, dtype=torch.float32, what="x", is_rounded=lambda name: True)
    assert layer.stored is wide and torch.equal(layer.weight, wide.to(E4M3).float())
    assert torch.equal(layer.encoding.decode(wide.to(E4M3), None, None), layer.weight)
    assert torch.equal(original(layer).weight(), layer.weight)
    replace_weight(layer, layer.weight + 0.3)
    assert torch.equal(layer.weight, layer.weight.to(E4M3).float())
    replace_weight(layer, None)
    assert layer.stored is wide


def test_the_toy_is_shared_in_float32() -> None:
    """All but a small share of the toy transformer's bytes are the file's own, whatever it is computed in."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = build(TOY_23, dtype)
        copied = sum(tensor.nbytes for tensor in model.parameters() if tensor.dtype != torch.bfloat16)
        held = sum(tensor.nbytes for tensor in model.buffers())
        assert dtype == torch.bfloat16 or copied < 0.3 * held, (dtype, copied, held)


def test_save_file_can_write_what_is_stored(tmp_path: Path, bf16_file: Path) -> None:
    """The module's own state dict holds the stored tensors, under a name of their own."""
    state = build(bf16_file).state_dict()
    assert state["transformer_blocks.0.ff.net.0.proj.stored"].dtype == torch.bfloat16
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "out.safetensors")
