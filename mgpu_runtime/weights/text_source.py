"""What a text encoder is, folder or single file, from headers and JSON alone; reads no weight."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from .checkpoint import CheckpointFile
from .header import ContentKey, content_keys
from .quantized import Quantization, count_parameters, declared_formats, is_companion, read_formats, recognise
from .text_file import file_assets, file_config, file_tensors
from .text_folder import folder_config, folder_tensors
from .text_names import StoredTensor

# Kind of model as its config calls it -> how a sentence calls it.
MODEL_TYPES = {
    "gemma3": "Gemma 3",
    "gemma3_text": "Gemma 3",
    "gemma4": "Gemma 4",
    "gemma4_text": "Gemma 4",
    "gemma4_unified": "Gemma 4",
    "gemma4_unified_text": "Gemma 4",
}


@dataclass(frozen=True)
class TextEncoderFacts:
    """A Gemma model of prompts, in a Hugging Face folder or in one file.

    Attributes:
        path: the folder or file, absolute.
        model_type: the kind of model, as its config calls it; one of MODEL_TYPES.
        hidden_size, num_layers: of the text tower.
        modified_ns: time of the file, or of the folder's config.json.
        is_file: whether it is a single file.
        gemma_version: the version that LTX's own text encoders declare ("gemma4-12b-ltx-v1"); None for Google's.
        num_parameters: of the text tower, embedding included.
    """

    path: str
    model_type: str
    hidden_size: int
    num_layers: int
    modified_ns: int
    is_file: bool = False
    gemma_version: str | None = None
    num_parameters: int = 0

    @property
    def num_states(self) -> int:
        """Number of hidden states per token: one per layer and the embedding."""
        return self.num_layers + 1

    @property
    def family(self) -> str:
        """How a sentence calls it: "Gemma 3" or "Gemma 4"."""
        return MODEL_TYPES[self.model_type]


@dataclass(frozen=True)
class TextSource:
    """Where a text encoder's parts are.

    Attributes:
        facts: what it is.
        config: the config as transformers takes it, of the text tower or of a model around it.
        tensors: the text tower's tensors by their names in it; other towers are left out.
        quantized: how the files hold those that take less than 16 bit, by the tower's names.
        assets: of a single file, the tokenizer's files and the byte tensors that hold them; empty for a folder.
    """

    facts: TextEncoderFacts
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    quantized: Mapping[str, Quantization]
    assets: Mapping[str, str] = field(default_factory=dict)

    def num_bytes(self, itemsize: int) -> int:
        """Counts the bytes of the tower in memory, `itemsize` a number where the files do not hold it in less."""
        return sum(
            tensor.entry.numel * (1 if name in self.quantized or is_companion(name) else itemsize)
            for name, tensor in self.tensors.items()
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor, by the tower's names."""
        return {name: tensor.entry.shape for name, tensor in self.tensors.items()}


def describe_text_encoder(path: str | os.PathLike) -> TextEncoderFacts:
    """Reads headers and JSON of a Gemma folder or file; raises ValueError with one sentence where it cannot be used."""
    return open_text_encoder(path).facts


def open_text_encoder(path: str | os.PathLike) -> TextSource:
    """Finds a text encoder's parts, which are the same objects as long as its files do not change.

    Raises ValueError with one sentence where it cannot be used.
    """
    absolute = os.path.abspath(os.fspath(path))
    if not os.path.exists(absolute):
        raise ValueError(f"There is no text encoder folder {absolute}. Check the path, or download Gemma first.")
    return _open(absolute, content_keys(absolute))


@lru_cache(maxsize=4)
def _open(path: str, keys: tuple[ContentKey, ...]) -> TextSource:  # `keys` is for the cache: a change opens anew
    place = Path(path)
    if place.is_dir():
        config = _check_kind(place, folder_config(place))
        tensors, assets = folder_tensors(place), {}
    else:
        tensors = file_tensors(place)
        config, assets = _check_kind(place, file_config(place, tensors)), file_assets(place)
    quantized = _quantization(path, tensors)
    num_parameters = count_parameters({name: tensor.entry.shape for name, tensor in tensors.items()}, quantized)
    return TextSource(_facts(place, config, num_parameters), config, tensors, quantized, assets)


def _quantization(path: str, tensors: Mapping[str, StoredTensor]) -> dict[str, Quantization]:
    formats: dict[str, str] = {}
    for file in (CheckpointFile(name) for name in dict.fromkeys(tensor.path for tensor in tensors.values())):
        stored = [tensor.name for tensor in tensors.values() if tensor.path == file.path]
        formats |= read_formats(file, [name for name in stored if name.endswith(".comfy_quant")])
        formats |= declared_formats(file.metadata, file.path)
    entries = {name: tensor.entry for name, tensor in tensors.items()}
    return recognise(
        entries, {name: tensor.name for name, tensor in tensors.items()}, f"text encoder in {path}", formats
    )


def _check_kind(place: Path, config: dict[str, Any]) -> dict[str, Any]:
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"The text encoder {place} is a {kind!r} model, but LTX-2 needs Gemma 3 or Gemma 4.")
    return config


def _facts(place: Path, config: Mapping[str, Any], num_parameters: int) -> TextEncoderFacts:
    is_file = not place.is_dir()
    text = config.get("text_config") or config
    try:
        hidden_size, num_layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
    except (KeyError, TypeError, ValueError):
        where = f"The config in {place}" if is_file else place / "config.json"
        raise ValueError(f"{where} does not say hidden_size and num_hidden_layers.") from None
    version = config.get("gemma_version")
    return TextEncoderFacts(
        path=str(place),
        model_type=config["model_type"],
        hidden_size=hidden_size,
        num_layers=num_layers,
        modified_ns=(place if is_file else place / "config.json").stat().st_mtime_ns,
        is_file=is_file,
        gemma_version=version if isinstance(version, str) else None,
        num_parameters=num_parameters,
    )
