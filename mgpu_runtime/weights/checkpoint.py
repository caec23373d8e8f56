"""A checkpoint file as its header shows it: metadata, config and tensor names. Reads no tensor."""

import logging
import os
import re
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

from .header import ContentKey, TensorEntry, content_key, first_names, metadata_object, read_header
from .keymaps import COMPONENTS, SLOTS, TRANSFORMER_PREFIX, Naming, map_key, part_title, read_naming

log = logging.getLogger("mgpu")

_ADAPTER = re.compile(r"\.(lora_|lora\.|hada_|lokr_|b?oft_)|\.dora_scale$")


class CheckpointFile:
    """One safetensors file in Lightricks' layout: the whole model, some of its components, or a latent upsampler.

    Raises ValueError with one sentence when the file is missing, cut off, damaged or no safetensors file.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.content_key: ContentKey = content_key(path)
        self.path = self.content_key[0]
        entries, metadata = read_header(path)
        self.keys: Mapping[str, TensorEntry] = MappingProxyType(entries)
        self.metadata: Mapping[str, str] = MappingProxyType(metadata)
        self._warnings: set[str] = set()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The architecture from the metadata key `config`; raises ValueError when it is absent or not JSON."""
        if "config" not in self.metadata:
            if "upsampler" not in self.components:
                self.refuse_foreign()
            raise ValueError(
                f'{self.path} has no "config" entry in its metadata, so its architecture is unknown. Files split out '
                "of a checkpoint by other tools often lose it: choose Lightricks' original file."
            )
        return metadata_object(self.metadata, "config", self.path)

    @property
    def model_version(self) -> str | None:
        """The metadata key `model_version`, such as "2.3.0"; None when absent."""
        return self.metadata.get("model_version")

    @cached_property
    def naming(self) -> Naming:
        """How this file names its tensors."""
        return read_naming({name: entry.shape for name, entry in self.keys.items()})

    @cached_property
    def components(self) -> Mapping[str, Mapping[str, str]]:
        """Component name -> {model's tensor name: the file's tensor name}, for the components the file holds.

        Raises ValueError when two tensors of the file stand for one tensor of the model.
        """
        found: dict[str, dict[str, str]] = {}
        for name in () if self.is_lora else self.keys:
            component, target = map_key(name, self.naming)
            if target is None:
                continue
            names = found.setdefault(component, {})
            if target in names:
                raise ValueError(
                    f"{self.path} has one tensor twice: {names[target]!r} and {name!r} both stand for {target!r}. "
                    "Export the file again with one of them."
                )
            names[target] = name
        return MappingProxyType(found)

    @cached_property
    def unclaimed(self) -> tuple[str, ...]:
        """Tensors that belong to no component this program reads."""
        return tuple(name for name in self.keys if map_key(name, self.naming)[0] is None)

    def component(self, name: str) -> Mapping[str, str]:
        """Returns {model's tensor name: the file's tensor name}; raises ValueError when the file lacks it."""
        assert name in COMPONENTS, f"unknown component {name!r}"
        names = self.components.get(name)
        if names is None or name == "transformer":  # an older model's is named alike
            self.refuse_foreign()
        if names is None:
            raise ValueError(f"{self.path} holds no {COMPONENTS[name]}. {self._what_it_has(name)}")
        return names

    def warn(self, message: str) -> None:
        """Logs a warning about this file, each only once however often the file is looked at."""
        if message not in self._warnings:
            self._warnings.add(message)
            log.warning("%s: %s", self.path, message)

    @cached_property
    def is_lora(self) -> bool:
        """Tells a LoRA or another adapter, whose tensors are named like those they change."""
        return any(_ADAPTER.search(name) for name in self.keys)

    @cached_property
    def is_text_encoder(self) -> bool:
        """Tells a language model's file, which may hold the text projection beside it; a whole model may hold one."""
        if "transformer" in self.components or any(name.startswith(TRANSFORMER_PREFIX) for name in self.unclaimed):
            return False  # the latter is another whole model
        return any(".self_attn.q_proj." in name for name in self.keys)

    @property
    def contents(self) -> str:
        """Names the components in the file, for sentences."""
        found = self.components
        titles = [part_title(name, found[name]) for name in COMPONENTS if name in found]
        return ", ".join(titles) or self.kind or "nothing of LTX-2"

    @cached_property
    def kind(self) -> str | None:
        """Says what the file is where it is something else than a part of LTX-2; None for LTX-2 and an empty file."""
        roots = {name.removeprefix(TRANSFORMER_PREFIX).split(".")[0] for name in self.keys}
        transformer = self.components.get("transformer", {})
        if self.is_lora:
            return "a LoRA"
        if set(self.components) == {"upsampler"}:
            return "a latent upsampler"
        if self.is_text_encoder:
            return "a language model (a text encoder)"
        if {"proj_in", "transformer_blocks"} <= roots:
            return "a transformer in diffusers' naming"
        if "proj_in.weight" in transformer and "audio_proj_in.weight" not in transformer:
            return "an older LTX-Video checkpoint without sound"
        if self.components or not self.keys:
            return None
        return f"another model's file (its first tensor is {next(iter(self.keys))!r})"

    def refuse_foreign(self) -> None:
        """Raises ValueError when the file is recognisably something else than an LTX-2 checkpoint."""
        if self.kind is not None:
            raise ValueError(f"{self.path} is {self.kind}, not an LTX-2 checkpoint. Choose Lightricks' LTX-2 file.")

    def _what_it_has(self, missing: str) -> str:
        """Says which components are in the file, and where to choose one with the missing one."""
        if not self.components:
            return f"It is no LTX-2 checkpoint: its first tensors are {first_names(self.keys)}."
        return f"It has: {self.contents}. Choose a file with it as {SLOTS[missing]} in Load LTX MGPU."
