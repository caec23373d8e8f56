"""A checkpoint file as its header shows it: metadata, config and tensor names. Reads no tensor."""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

from .header import ContentKey, TensorEntry, content_key, read_header
from .keymaps import COMPONENTS, count_encoder_levels, map_key

log = logging.getLogger("mgpu")

SCALE_SUFFIXES = (".weight_scale", ".weight_scale_2", ".input_scale", ".bias_scale")


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
        text = self.metadata.get("config")
        if text is None:
            if "upsampler" not in self.components:
                self._refuse_foreign_file()
            raise ValueError(
                f'{self.path} has no "config" entry in its metadata, so its architecture is unknown. Files split out '
                "of a checkpoint by other tools often lose it: choose Lightricks' original file."
            )
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f'{self.path} is damaged: its metadata "config" is not valid JSON ({error}).') from error
        if not isinstance(config, dict):
            raise ValueError(f'{self.path} is damaged: its metadata "config" is not a JSON object.')
        return config

    @property
    def model_version(self) -> str | None:
        """The metadata key `model_version`, such as "2.3.0"; None when absent."""
        return self.metadata.get("model_version")

    def section(self, prefix: str) -> dict[str, TensorEntry]:
        """Returns the tensors whose name starts with `prefix`, named without it."""
        return {name.removeprefix(prefix): entry for name, entry in self.keys.items() if name.startswith(prefix)}

    def config_section(self, name: str) -> dict[str, Any]:
        """Returns one section of the config; raises ValueError when the file has none."""
        section = self.config.get(name)
        if not isinstance(section, dict):
            raise ValueError(f"{self.path} has no {name!r} section in its config. {self._what_it_has()}")
        return section

    @cached_property
    def components(self) -> Mapping[str, Mapping[str, str]]:
        """Component name -> {model's tensor name: the file's tensor name}, for the components the file holds.

        Raises ValueError when two tensors of the file stand for one tensor of the model.
        """
        found: dict[str, dict[str, str]] = {}
        levels = count_encoder_levels(self.keys)
        for name in self.keys:
            component, target = map_key(name, encoder_levels=levels)
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
        return tuple(name for name in self.keys if map_key(name)[0] is None)

    def component(self, name: str) -> Mapping[str, str]:
        """Returns {model's tensor name: the file's tensor name}; raises ValueError when the file lacks it."""
        assert name in COMPONENTS, f"unknown component {name!r}"
        names = self.components.get(name)
        if names is None:
            self._refuse_foreign_file()
            raise ValueError(f"{self.path} holds no {COMPONENTS[name]}. {self._what_it_has()}")
        self._refuse_quantized(names.values(), COMPONENTS[name])
        return names

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor of a component, by the model's tensor names."""
        return {target: self.keys[source].shape for target, source in self.component(name).items()}

    def warn(self, message: str) -> None:
        """Logs a warning about this file, each only once however often the file is looked at."""
        if message not in self._warnings:
            self._warnings.add(message)
            log.warning("%s: %s", self.path, message)

    def _refuse_quantized(self, names: Iterable[str], title: str) -> None:
        """Raises ValueError when a component's tensors are scaled fp8 or packed nvfp4."""
        quantized = [n for n in names if n.endswith(SCALE_SUFFIXES) or self.keys[n].dtype.startswith("F8")]
        if quantized:
            raise ValueError(
                f"The {title} in {self.path} is quantised ({len(quantized)} tensors such as {quantized[0]!r}), which "
                "is not supported. Choose the bf16 file."
            )

    def _refuse_foreign_file(self) -> None:
        """Raises ValueError when the file is recognisably something else than an LTX-2 checkpoint."""
        kind = _kind(tuple(self.keys))
        if kind is not None:
            raise ValueError(f"{self.path} is {kind}, not an LTX-2 checkpoint. Choose Lightricks' LTX-2 file.")

    def _what_it_has(self) -> str:
        """Says which components are in the file."""
        titles = [COMPONENTS[name] for name in COMPONENTS if name in self.components]
        if not titles:
            return f"It is no LTX-2 checkpoint: its first tensors are {', '.join(list(self.keys)[:3]) or 'none'}."
        return f"It has: {', '.join(titles)}. Choose the file that holds the missing part."


def _kind(names: tuple[str, ...]) -> str | None:
    """Recognises other models' files by their tensor names; None for LTX-2 and for the unknown."""
    roots = {name.removeprefix("model.diffusion_model.").split(".")[0] for name in names}
    if any(".lora_" in name for name in names):
        return "a LoRA"
    if "post_upsample_res_blocks" in roots:
        return "a latent upsampler"
    if any(".self_attn.q_proj." in name for name in names):
        return "a language model (a text encoder)"
    if "patchify_proj" in roots and "audio_patchify_proj" not in roots:
        return "an older LTX-Video checkpoint without sound"
    if "audio_patchify_proj" in roots or {"vae", "audio_vae", "vocoder"} & roots or not names:
        return None
    return f"another model's file (its first tensor is {names[0]!r})"
