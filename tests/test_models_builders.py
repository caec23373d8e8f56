"""Builders: strict, without a second copy, nothing left empty."""

from operator import attrgetter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mgpu_runtime.models.audio_vae import AudioVAEBuilder
from mgpu_runtime.models.builder import ComponentBuilder
from mgpu_runtime.models.connectors import ConnectorsBuilder, build_connectors
from mgpu_runtime.models.stored import StoredWeight
from mgpu_runtime.models.transformer import LTXTransformer
from mgpu_runtime.models.transformer_builder import TransformerBuilder, build_transformer
from mgpu_runtime.models.upsampler import UpsamplerBuilder
from mgpu_runtime.models.video_vae import VideoVAEBuilder, build_video_vae
from mgpu_runtime.models.vocoder import VocoderBuilder, build_vocoder
from mgpu_runtime.parallel.attention_manager import AttentionManager
from mgpu_runtime.parallel.distributed_decoder import DistributedDecoderBuilder
from mgpu_runtime.parallel.sequence_parallel import SequenceParallelBuilder
from mgpu_runtime.parallel.tiled_data_parallel import TiledDataParallelBuilder
from mgpu_runtime.tiling import TileCountConfig
from mgpu_runtime.weights.registry import StateDictRegistry
from tests.weights_files import TINY_20, TINY_23, TINY_UPSAMPLER, TOY_23, TOY_UPSAMPLER, changed_copy, read_all

BUILDERS = (TransformerBuilder, ConnectorsBuilder, VideoVAEBuilder, AudioVAEBuilder)
CASES = [
    *((path, builder) for path in (TINY_20, TOY_23) for builder in BUILDERS),
    *((path, UpsamplerBuilder) for path in (TINY_UPSAMPLER, TOY_UPSAMPLER)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("path", "builder"), CASES)
def test_built_modules_hold_the_files_numbers(path: Path, builder: type[ComponentBuilder], dtype: torch.dtype) -> None:
    registry = StateDictRegistry()
    module = builder(path, registry=registry).build("cpu", dtype)
    source = registry.get(path, builder.component)
    assert {name.replace(".stored", ".weight") for name in module.state_dict()} == source.keys()
    for name in source:
        tensor = attrgetter(name)(module)
        kept = torch.float32 if name in ("latents_mean", "latents_std") else dtype
        assert tensor.dtype == kept, name
        assert torch.equal(tensor, source[name].to(kept)), name
    assert not module.training and not any(parameter.requires_grad for parameter in module.parameters())
    assert not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    assert registry.files_read == 1


@pytest.mark.parametrize("path", [TINY_20, TOY_23])
def test_vocoder_is_float32_with_every_filter(path: Path) -> None:
    vocoder = build_vocoder(path, registry=StateDictRegistry(), device="cpu")
    tensors = [*vocoder.parameters(), *vocoder.buffers()]
    weights = [layer.weight for layer in vocoder.modules() if isinstance(layer, StoredWeight)]  # bf16 in the file
    used = [*vocoder.parameters(), *weights, *(filter for name, filter in vocoder.named_buffers() if "filter" in name)]
    assert {tensor.dtype for tensor in used} == {torch.float32}
    assert not any(tensor.is_meta for tensor in tensors)
    if path == TOY_23:
        taps = vocoder.resampler.filter  # in no file; a low-pass filter that keeps the level
        assert taps.sum().item() == pytest.approx(1, abs=1e-3) and taps.argmax().item() == taps.shape[-1] // 2


def test_tracker_is_told_of_the_filled_module() -> None:
    seen: list[tuple[nn.Module, str, str]] = []

    class Tracker:
        def track(self, module: nn.Module, component: str, path: str) -> None:
            assert not any(parameter.is_meta for parameter in module.parameters())
            seen.append((module, component, path))

    builder = TransformerBuilder(TINY_20, registry=StateDictRegistry(), tracker=Tracker())
    assert seen == []
    assert seen == [] and builder.build("cpu", torch.float32) is seen[0][0]
    assert seen[0][1:] == ("transformer", str(TINY_20)) and len(seen) == 1


def test_one_error_names_all_that_does_not_fit(tmp_path: Path) -> None:
    tensors, metadata = read_all(TINY_23)
    prefix = "model.diffusion_model."
    del tensors[f"{prefix}prompt_adaln_single.linear.bias"]
    tensors[f"{prefix}mystery.weight"] = torch.zeros(1)
    tensors[f"{prefix}proj_out.bias"] = torch.zeros(7)
    save_file(tensors, tmp_path / "x.safetensors", metadata=metadata)
    with pytest.raises(ValueError) as error:
        build_transformer(tmp_path / "x.safetensors", registry=StateDictRegistry(), device="cpu", dtype=torch.bfloat16)
    for part in (
        "1 missing (prompt_adaln.linear.bias)",
        "1 unexpected (mystery.weight)",
        "1 of another shape (proj_out.bias: file [7], model [16])",
        str(tmp_path / "x.safetensors"),
    ):
        assert part in str(error.value)


def test_b76_a_config_of_another_generation_gives_one_short_sentence(tmp_path: Path) -> None:
    older = {"cross_attention_adaln": False, "apply_gated_attention": False}
    path = changed_copy(TINY_23, tmp_path / "x.safetensors", transformer=older)
    registry = StateDictRegistry()
    with pytest.raises(ValueError) as error:
        build_transformer(path, registry=registry, device="cpu", dtype=torch.float32)
    text = str(error.value)
    assert "audio_time_embed.linear.bias: file [288], model [192]" in text and "unexpected" in text
    assert "\n" not in text and len(text) < 1200
    assert registry.files_read == 0  # told from the header


def test_levels_without_blocks_have_no_tensors() -> None:
    """The toy encoder's first two and last levels have no residual block, so the file has no block 0, 2 or 8."""
    registry = StateDictRegistry()
    vae = build_video_vae(TOY_23, registry=registry, device="cpu", dtype=torch.float32)
    assert [len(block.resnets) for block in vae.encoder.down_blocks] == [0, 0, 1, 1]
    assert len(vae.encoder.mid_block.resnets) == 0
    assert vae.scale_factors == (8, 32, 32) and vae.min_cells == 1


def test_bias_free_connectors_equal_zero_biases(tmp_path: Path) -> None:
    tensors, _ = read_all(TINY_23)
    bias_free = changed_copy(TINY_23, tmp_path / "full.safetensors", transformer={"connector_ff_bias": False})
    names = [name for name in tensors if "connector" in name and ".ff." in name and name.endswith(".bias")]
    assert names
    _, metadata = read_all(bias_free)
    kept = {name: tensor for name, tensor in tensors.items() if name not in names}
    save_file(kept, tmp_path / "free.safetensors", metadata=metadata)
    zeroed = {name: torch.zeros_like(tensor) if name in names else tensor for name, tensor in tensors.items()}
    save_file(zeroed, tmp_path / "zero.safetensors", metadata=read_all(TINY_23)[1])
    states, mask = torch.randn(1, 128, 32, 3), torch.ones(1, 128, dtype=torch.int64)
    contexts = [
        build_connectors(path, registry=StateDictRegistry(), device="cpu", dtype=torch.float32)(states, mask)
        for path in (tmp_path / "free.safetensors", tmp_path / "zero.safetensors")
    ]
    assert torch.equal(contexts[0][0], contexts[1][0]) and torch.equal(contexts[0][1], contexts[1][1])


def test_component_that_is_not_in_the_file() -> None:
    registry = StateDictRegistry()
    with pytest.raises(ValueError, match="holds no vocoder"):
        VocoderBuilder(TINY_23, registry=registry).build("cpu")


def test_the_parallel_builders_read_through_the_sources_they_are_given() -> None:
    """All three wrappers build the real model, count the read in their registry and show it to their tracker."""
    seen: list[str] = []

    class Tracker:
        def track(self, module: torch.nn.Module, component: str, path: str) -> None:
            seen.append(component)

    own, given = StateDictRegistry(), StateDictRegistry()
    cpu, tiles = torch.device("cpu"), TileCountConfig.spatial(1, 2, 1)
    inner = TransformerBuilder(TINY_23, registry=own)
    manager = AttentionManager(64, 4, 16, torch.float32, None)
    spread = SequenceParallelBuilder(inner, manager, given, Tracker()).build(cpu, torch.float32)
    tiled = TiledDataParallelBuilder(inner, None, tiles, given, Tracker()).build(cpu, torch.float32)
    frames = DistributedDecoderBuilder(VideoVAEBuilder(TINY_23, registry=own), None, None, tiles, registry=given)
    frames.build(cpu, torch.float32)
    assert seen == ["transformer", "transformer"] and (own.files_read, given.files_read) == (0, 1)
    assert isinstance(spread.model, LTXTransformer) and isinstance(tiled.model, LTXTransformer)
