"""Writes safetensors files for tests: whole, headers without data, and broken ones."""

import json
import lzma
import os
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mgpu_runtime.weights.header import DTYPE_BITS
from tests.goldens import GOLDEN, TOY

TINY_20 = GOLDEN / "checkpoints" / "tiny_ltx20.safetensors"
TINY_23 = GOLDEN / "checkpoints" / "tiny_ltx23.safetensors"
TINY_UPSAMPLER = GOLDEN / "checkpoints" / "tiny_upsampler_x2.safetensors"
TOY_23 = TOY / "ltx-toy-23.safetensors"
TOY_UPSAMPLER = TOY / "ltx-toy-upsampler-x2.safetensors"
GEMMA = TOY / "gemma-toy"


def write_raw(path: Path, header: bytes, num_bytes: int = 0) -> Path:
    """Writes a file with exactly this header text and `num_bytes` of data, which take no disk space."""
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + num_bytes)
    return path


def write_header(
    path: Path, shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str] | None = None, *, dtype: str = "BF16"
) -> Path:
    """Writes a well-formed file of empty tensors with these names and shapes."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for name, shape in shapes.items():
        end = position + prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    return write_raw(path, json.dumps(header).encode("utf-8"), position)


def read_all(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads all tensors and the metadata of a file."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})


def changed_copy(source: Path, target: Path, **sections: Mapping[str, Any]) -> Path:
    """Copies a checkpoint with entries of its config's sections changed; None removes an entry."""
    tensors, metadata = read_all(source)
    config = json.loads(metadata["config"])
    for section, changes in sections.items():
        merged = {**config[section], **changes}
        config[section] = {key: value for key, value in merged.items() if value is not None}
    save_file(tensors, target, metadata={**metadata, "config": json.dumps(config)})
    return target


def only(source: Path, target: Path, *prefixes: str, strip: str = "") -> Path:
    """Copies the tensors that start with a prefix, without the prefix `strip`."""
    tensors, metadata = read_all(source)
    kept = {name.removeprefix(strip): tensor for name, tensor in tensors.items() if name.startswith(prefixes)}
    save_file(kept, target, metadata=metadata)
    return target


def published_layout(version: str) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Returns names with shapes, and the config, of a published layout: "20", "23" or "25" (no autoencoders)."""
    with lzma.open(Path(__file__).with_name("published_keys.json.xz"), "rt", encoding="utf-8") as file:
        tables = json.load(file)
    return {name: tuple(shape) for name, shape in tables[version].items()}, tables[f"{version}_config"]


def published(version: str, folder: Path) -> Path:
    """Writes a header with all names and shapes of a published layout ("20", "23", "25"); its 40 GB take no space."""
    shapes, config = published_layout(version)
    return write_header(folder / f"published-{version}.safetensors", shapes, {"config": json.dumps(config)})


# Part of a split layout -> its names in a whole model, what is stripped of them, and its sections of the config.
PARTS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "transformer": (("model.diffusion_model.",), "", ("transformer", "scheduler")),
    "video_vae": (("vae.",), "vae.", ("vae",)),
    "audio_vae": (("audio_vae.", "vocoder."), "", ("audio_vae", "vocoder")),
    "text_projection": (("text_embedding_projection.",), "", ()),
}


def part_metadata(part: str, metadata: Mapping[str, str], *, has_config: bool) -> dict[str, str]:
    """Returns the metadata of a part's own file: its sections of the config, the others null, or nothing at all."""
    if not has_config:
        return {}
    config = json.loads(metadata["config"])
    own = {name: section if name in PARTS[part][2] else None for name, section in config.items()}
    return {**metadata, "config": json.dumps(own)}


def split(source: Path, folder: Path, *, has_config: bool = True, strip: str = "") -> dict[str, Path]:
    """Splits a whole model into a file per part; `strip` is a prefix that the transformer's names lose."""
    tensors, metadata = read_all(source)
    paths = {}
    for part, (prefixes, stripped, _) in PARTS.items():
        prefix = strip if part == "transformer" else stripped
        kept = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefixes)}
        if kept:
            paths[part] = folder / f"{part}.safetensors"
            save_file(kept, paths[part], metadata=part_metadata(part, metadata, has_config=has_config))
    return paths


def published_split(version: str, folder: Path, *, has_config: bool = True) -> dict[str, Path]:
    """Writes the headers of a published layout split into a file per part."""
    shapes, config = published_layout(version)
    metadata = {"config": json.dumps(config), "model_version": f"{version[0]}.{version[1]}.0"}
    paths = {}
    for part, (prefixes, stripped, _) in PARTS.items():
        kept = {name.removeprefix(stripped): shape for name, shape in shapes.items() if name.startswith(prefixes)}
        if kept:
            path = folder / f"{version}-{part}.safetensors"
            paths[part] = write_header(path, kept, part_metadata(part, metadata, has_config=has_config) or None)
    return paths


def write_gemma(folder: Path, **text_config: int) -> Path:
    """Makes a text encoder folder of another size: config and empty files, no weights."""
    folder.mkdir()
    config = json.loads((GEMMA / "config.json").read_text(encoding="utf-8"))
    config["text_config"].update(text_config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    os.symlink(GEMMA / "tokenizer.json", folder / "tokenizer.json")
    write_header(folder / "model.safetensors", {})
    return folder
