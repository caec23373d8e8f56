"""The registry: files are mapped once per process and their pages are shared."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mgpu_runtime.models.transformer_builder import build_transformer
from mgpu_runtime.weights.registry import ModelRegistry, StateDictRegistry
from tests.weights_files import TINY_20, TOY_23, TOY_UPSAMPLER, read_all

MEGABYTES = 64


def test_each_file_is_read_once() -> None:
    registry = StateDictRegistry()
    registry.checkpoint(TOY_23)
    assert registry.files_read == 0  # a header is not a read
    for component in ("transformer", "connectors", "video_vae", "transformer"):
        registry.get(TOY_23, component)
    assert registry.files_read == 1
    registry.get(os.path.relpath(TOY_23), "vocoder")
    assert registry.files_read == 1
    registry.get(TOY_UPSAMPLER, "upsampler")
    assert registry.files_read == 2
    assert ModelRegistry is StateDictRegistry


def test_b75_components_are_whole_and_the_source_unchanged() -> None:
    registry = StateDictRegistry()
    tensors, _ = read_all(TINY_20)
    names = registry.checkpoint(TINY_20).components
    assert {name: len(registry.get(TINY_20, name)) for name in names} == {name: len(names[name]) for name in names}
    registry.get(TINY_20, "transformer").clear()  # a caller's dict is its own
    again = registry.get(TINY_20, "transformer")
    source = names["transformer"]
    assert all(torch.equal(again[target], tensors[source[target]]) for target in source)
    not_needed = 3  # statistics of the video autoencoder
    assert sum(len(names[name]) for name in names) + not_needed == len(tensors)


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "up.safetensors"
    save_file({"final_conv.bias": torch.zeros(3)}, path, metadata={"config": "{}"})
    registry = StateDictRegistry()
    assert registry.get(path, "upsampler")["final_conv.bias"].tolist() == [0, 0, 0]
    other = tmp_path / "other.safetensors"
    save_file({"final_conv.bias": torch.ones(4)}, other, metadata={"config": "{}"})
    os.replace(other, path)
    assert registry.get(path, "upsampler")["final_conv.bias"].tolist() == [1, 1, 1, 1]
    assert registry.files_read == 2
    registry.forget(path)
    registry.get(path, "upsampler")
    assert registry.files_read == 3


def test_b81_weights_stay_views_of_the_file() -> None:
    registry = StateDictRegistry()
    model = build_transformer(TOY_23, registry=registry, device="cpu", dtype=torch.bfloat16)
    mapped = registry.get(TOY_23, "transformer")
    low, high = _mapping(TOY_23)
    for name, parameter in model.named_parameters():
        if mapped[name].dtype == torch.bfloat16:
            assert parameter.data_ptr() == mapped[name].data_ptr()
            assert low <= parameter.data_ptr() < high


def test_b81_two_processes_share_the_pages(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    save_file({"final_conv.weight": torch.ones(MEGABYTES << 18)}, path, metadata={"config": "{}"})
    os.sync()  # pages not yet on disk count as dirty
    code = (
        "import sys; from mgpu_runtime.weights.registry import StateDictRegistry as R; "
        f"t = R().get({str(path)!r}, 'upsampler')['final_conv.weight']; print(t.sum().item(), flush=True); "
        "sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[1], **pipes) as peer:
        try:
            assert float(peer.stdout.readline()) == MEGABYTES << 18
            tensor = StateDictRegistry().get(path, "upsampler")["final_conv.weight"]
            assert tensor.sum().item() == MEGABYTES << 18
            resident, proportional, anonymous = _memory(path)
        finally:
            peer.stdin.close()
            peer.wait(timeout=30)
    assert resident >= MEGABYTES * 1000  # all of it was touched
    assert proportional <= 0.55 * resident
    assert anonymous == 0  # no private copy


def test_a_file_that_lacks_the_component_is_not_mapped() -> None:
    registry = StateDictRegistry()
    with pytest.raises(ValueError, match="is a latent upsampler, not an LTX-2 checkpoint"):
        registry.get(TOY_UPSAMPLER, "video_vae")
    assert registry.files_read == 0


def _mapping(path: Path) -> tuple[int, int]:
    """Returns the address range at which this process has mapped a file."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    ranges = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
    return min(int(low, 16) for low, _ in ranges), max(int(high, 16) for _, high in ranges)


def _memory(path: Path) -> tuple[int, int, int]:
    """Returns resident, proportional and anonymous kilobytes of this process's mapping of a file."""
    text = Path("/proc/self/smaps").read_text(encoding="utf-8")
    part = text[text.index(str(path)) :]
    return tuple(int(re.search(rf"\n{key}:\s+(\d+)", part)[1]) for key in ("Rss", "Pss", "Anonymous"))
