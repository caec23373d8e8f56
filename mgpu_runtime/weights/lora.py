"""A LoRA file as its header shows it: pairs of small matrices, each for one module of the model."""

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torch import Tensor

from .checkpoint import CheckpointFile
from .header import ContentKey, content_key, metadata_object, read_header
from .lora_names import bare_module, other_kind, split_key
from .mapping import read_tensors

ADAPTER_METADATA = "lora_adapter_metadata"  # where diffusers keeps the configuration of the adapter, as JSON

_NUMBERS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class LoRAPair:
    """One module's change, up (out, rank) times down (rank, in), by the file's tensor names.

    Attributes:
        module: the module as the file calls it, without prefix; its dots may be underscores.
        down, up: names of the two halves.
        alpha: name of the scalar that scales the pair by alpha / rank; None where the file has none.
        rank: width between the halves.
        shape: (out, in), the shape of the weight it changes.
    """

    module: str
    down: str
    up: str
    alpha: str | None
    rank: int
    shape: tuple[int, int]


class LoRAFile:
    """One safetensors file with a LoRA; reads no matrix before it is asked.

    Raises ValueError with one sentence for a file that is missing, broken, no LoRA, or one of another kind, and for a
    module of which only one half is there.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.content_key: ContentKey = content_key(path)
        self.path = self.content_key[0]
        self.keys, self.metadata = read_header(path)
        self._refuse_other_kinds()
        pairs, self.leftover = self._pairs()
        self.pairs: Mapping[str, LoRAPair] = MappingProxyType(pairs)

    @property
    def name(self) -> str:
        """The file's name without folder and ending, for sentences."""
        return os.path.splitext(os.path.basename(self.path))[0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The different ranks of its pairs, ascending."""
        return tuple(sorted({pair.rank for pair in self.pairs.values()}))

    @property
    def reference_downscale(self) -> int:
        """How many times smaller than the clip an in-context LoRA expects its reference; 1 where the file says none."""
        return self._factor_of_metadata("reference_downscale_factor")

    @property
    def reference_time_scale(self) -> int:
        """How many times fewer frames than the clip an in-context LoRA expects in its reference; 1 by default."""
        return self._factor_of_metadata("reference_temporal_scale_factor")

    @cached_property
    def alphas(self) -> Mapping[str, float]:
        """Module -> alpha, for the pairs that have one of their own."""
        named = {module: pair.alpha for module, pair in self.pairs.items() if pair.alpha is not None}
        scalars = self.read(named.values())
        return MappingProxyType({module: self._number(name, scalars[name]) for module, name in named.items()})

    def factor(self, pair: LoRAPair) -> float:
        """Returns what a pair is multiplied with beside its strength: alpha / rank, 1 without an alpha.

        An alpha that diffusers wrote into the metadata counts where the pair has none of its own.
        """
        alpha = self.alphas.get(pair.module)
        if alpha is not None:
            return alpha / pair.rank
        return self._factor_of_adapter(pair)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Returns tensors of the file as mapped views, in the file's dtype on the CPU."""
        return read_tensors(self.path, names)

    def _refuse_other_kinds(self) -> None:
        for key in self.keys:
            kind = other_kind(key)
            if kind is not None:
                raise ValueError(
                    f"{self.path} is {kind} (it has {key!r}), which is not supported: choose a plain LoRA, with "
                    "lora_A and lora_B or lora_down and lora_up for each module."
                )

    def _pairs(self) -> tuple[dict[str, LoRAPair], tuple[str, ...]]:
        """Returns the pairs by module, and the keys that belong to none."""
        found: dict[str, dict[str, str]] = {}
        leftover = []
        for key in self.keys:
            named = split_key(key)
            if named is None:
                leftover.append(key)
                continue
            parts = found.setdefault(named[0], {})
            if named[1] in parts:
                raise ValueError(
                    f"{self.path} has module {named[0]!r} twice: {parts[named[1]]!r} and {key!r}. Export it again "
                    "with one of them."
                )
            parts[named[1]] = key
        if all(parts.keys() == {"alpha"} for parts in found.values()):  # other models have alphas too
            raise ValueError(
                f"{self.path} is not a LoRA: none of its {len(self.keys)} tensors is half of a pair. It is "
                f"{_what_else(self.path)}. Choose a file of models/loras."
            )
        return {module: self._pair(module, parts) for module, parts in found.items()}, tuple(leftover)

    def _pair(self, module: str, parts: Mapping[str, str]) -> LoRAPair:
        missing = [half for half in ("down", "up") if half not in parts]
        if missing:
            words = {"down": "A (down)", "up": "B (up)"}
            raise ValueError(
                f"{self.path} is incomplete: module {module!r} lacks {' and '.join(words[half] for half in missing)}. "
                "Nothing of it was applied; download or export the file again."
            )
        shapes = {half: self.keys[parts[half]].shape for half in ("down", "up")}
        if any(len(shape) != 2 for shape in shapes.values()) or shapes["down"][0] != shapes["up"][1]:
            raise ValueError(
                f"{self.path} is damaged: the halves of module {module!r} are {list(shapes['down'])} and "
                f"{list(shapes['up'])}; they must be (rank, in) and (out, rank)."
            )
        for half in ("down", "up"):
            dtype = self.keys[parts[half]].dtype
            if dtype not in _NUMBERS:
                raise ValueError(f"{self.path}: {parts[half]!r} has dtype {dtype}; a LoRA holds real numbers.")
        (rank, width), (height, _) = shapes["down"], shapes["up"]
        if not rank:
            raise ValueError(f"{self.path} is damaged: module {module!r} has rank 0.")
        return LoRAPair(module, parts["down"], parts["up"], parts.get("alpha"), rank, (height, width))

    def _number(self, name: str, scalar: Tensor) -> float:
        if scalar.numel() != 1 or not math.isfinite(float(scalar)):
            raise ValueError(f"{self.path} is damaged: {name!r} is {scalar.tolist()}; an alpha is one number.")
        return float(scalar)

    def _factor_of_metadata(self, key: str) -> int:
        text = self.metadata.get(key, "1")
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{self.path} is damaged: its metadata {key!r} is {text!r}; it must be 1, 2, 3, ...")
        return int(text)

    def _factor_of_adapter(self, pair: LoRAPair) -> float:
        """Follows PEFT's rule: the first pattern that ends the module's path, else the common alpha."""
        adapter = self._adapter
        alpha = adapter.get("lora_alpha")
        for pattern, own in adapter.get("alpha_pattern", {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", pair.module):
                alpha = own
                break
        if alpha is None:
            return 1.0
        return float(alpha) / (math.sqrt(pair.rank) if adapter.get("use_rslora") else pair.rank)

    @cached_property
    def _adapter(self) -> dict[str, Any]:
        """The transformer's adapter configuration in the metadata, without null entries; empty where there is none."""
        if ADAPTER_METADATA not in self.metadata:
            return {}
        adapter = metadata_object(self.metadata, ADAPTER_METADATA, self.path)
        entries = {bare_module(key): value for key, value in adapter.items() if value is not None}
        try:
            patterns = entries.get("alpha_pattern", {})
            for number in (entries.get("lora_alpha", 1), *patterns.values()):
                float(number)
            for pattern in patterns:
                re.compile(pattern)
        except (ValueError, TypeError, AttributeError, re.error) as error:
            raise ValueError(
                f"{self.path} is damaged: its metadata {ADAPTER_METADATA!r} is unreadable: {error}."
            ) from error
        return entries


def _what_else(path: str) -> str:
    """Says what a file is that is no LoRA."""
    file = CheckpointFile(path)
    if file.kind is not None or not file.components:
        return file.contents
    return f"{'an LTX-2 model' if 'transformer' in file.components else 'a part of LTX-2'}: {file.contents}"
