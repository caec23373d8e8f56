"""What workers cost the machine: they share a file's pages, keep no second copy of it and need none while loading."""

import gc
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mgpu_runtime.models.transformer import LTXTransformer
from mgpu_runtime.models.transformer_builder import build_transformer
from mgpu_runtime.pipeline.memory import give_back_freed
from mgpu_runtime.weights.configs import transformer_kwargs
from mgpu_runtime.weights.registry import StateDictRegistry
from tests.goldens import golden
from tests.quantized_files import E4M3, is_quantized, write
from tests.spawn import run
from tests.weights_files import TINY_23, read_all

MEBIBYTE = 1 << 20
LARGE = {  # the tiny model with heads 16 times as wide
    "attention_head_dim": 256,
    "cross_attention_dim": 1024,
    "audio_attention_head_dim": 128,
    "audio_cross_attention_dim": 512,
    "connector_attention_head_dim": 256,
    "audio_connector_attention_head_dim": 128,
}
LARGEST = 9 * 1024 * 1024 * 4  # bytes of its largest weight in float32, that of the time embedding


def write_large(path: Path, convert: Callable[[str, Tensor], dict[str, Tensor]]) -> Path:
    """Writes the tiny 2.3-style transformer with streams 16 times as wide, random; `convert` chooses how it is held."""
    _, metadata = read_all(TINY_23)
    config = json.loads(metadata["config"])
    config["transformer"] |= LARGE
    metadata |= {"config": json.dumps(config)}
    names = StateDictRegistry().checkpoint(TINY_23).component("transformer")
    header = write(path, {"model.diffusion_model.patchify_proj.bias": torch.zeros(1)}, metadata)
    with torch.device("meta"):
        empty = LTXTransformer(**transformer_kwargs(StateDictRegistry().checkpoint(header))).state_dict()
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for target, source in names.items():
        drawn = torch.empty(empty[target].shape, dtype=torch.bfloat16).uniform_(-0.02, 0.02, generator=generator)
        tensors |= convert(source, drawn)
    write(path, tensors, metadata)
    os.sync()  # pages not yet on disk count as dirty
    return path


def as_bf16(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return {name: tensor}


def as_fp8(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if not is_quantized(name):
        return {name: tensor}
    return {name: (tensor * 1000).to(E4M3), name.removesuffix("weight") + "weight_scale": torch.tensor(0.001)}


@pytest.fixture(scope="module")
def bf16_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_large(tmp_path_factory.mktemp("large") / "bf16.safetensors", as_bf16)


@pytest.fixture(scope="module")
def fp8_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_large(tmp_path_factory.mktemp("large") / "fp8.safetensors", as_fp8)


@pytest.mark.parametrize(("held_as", "num_workers"), [("bf16", 2), ("bf16", 3), ("fp8", 3)])
def test_b81_workers_share_one_copy_of_the_file(request: pytest.FixtureRequest, held_as: str, num_workers: int) -> None:
    """Together they grow by less than 1.2 times the file, and none needs a second copy while it loads and runs.

    Each holds less than one layer in float32 for itself, and no more than its largest tensor at the peak of loading.
    """
    large_file = request.getfixturevalue(f"{held_as}_file")
    growths = run(_load_and_step, num_workers, str(large_file))
    size, together = large_file.stat().st_size, sum(growth["Pss"] for growth in growths)
    assert together > 0.9 * size  # all of it was read
    assert together < 1.2 * size, growths
    for growth in growths:
        assert growth["Anonymous"] < LARGEST, growth
        assert growth["peak"] < size + LARGEST + 8 * MEBIBYTE, growth


def _load_and_step(rank: int, group: dist.ProcessGroup, path: str) -> dict[str, int]:
    """Returns by how many bytes a worker has grown after loading the transformer in float32 and one forward.

    "peak" is the largest growth of its resident memory, shared pages included, while it loaded.
    """
    _step(build_transformer(TINY_23, registry=StateDictRegistry(), device="cpu", dtype=torch.float32))
    before = _memory(group)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak counts from here
    resident = _status("VmRSS")
    model = build_transformer(path, registry=StateDictRegistry(), device="cpu", dtype=torch.float32)
    peak = _status("VmHWM") - resident
    _step(model, LARGE["cross_attention_dim"], LARGE["audio_cross_attention_dim"])
    after = _memory(group)
    return {"peak": peak, **{key: after[key] - before[key] for key in before}}


def _step(model: LTXTransformer, width: int = 64, audio_width: int = 32) -> None:
    """Runs one forward with prompts of the right widths."""
    case = golden("fp8_23")
    video = replace(case.stream("video"), context=torch.zeros(1, 7, width))
    audio = replace(case.stream("audio"), context=torch.zeros(1, 7, audio_width))
    with torch.no_grad():
        assert bool(model.predict(video, audio)[0].isfinite().all())


def _memory(group: dist.ProcessGroup) -> dict[str, int]:
    """Returns this rank's bytes while no rank works: its share of all pages, and its own pages."""
    gc.collect()
    give_back_freed()  # as after each job
    dist.barrier(group)
    text = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    dist.barrier(group)
    return {key: _kilobytes(text, key) for key in ("Pss", "Anonymous")}


def _status(key: str) -> int:
    return _kilobytes(Path("/proc/self/status").read_text(encoding="utf-8"), key)


def _kilobytes(text: str, key: str) -> int:
    return int(re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE)[1]) * 1024
