"""Text encoder: prompts become the hidden states of every layer of Gemma 3 or Gemma 4.

Both come from a Hugging Face folder or from a single file; only the text tower is read, of vision and sound nothing.

Letters: B batch, S tokens, D hidden size, L hidden states per token (layers + 1: the embedding comes first).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..weights.bundle import Checkpoint
from ..weights.mapping import read_tensors
from ..weights.quantized import Quantization
from ..weights.registry import StateDictRegistry
from ..weights.text_pairing import check_text_encoder
from ..weights.text_source import TextSource, open_text_encoder
from .loading import check_shapes, fill
from .text_tokenizer import PromptTokenizer, load_tokenizer
from .text_tower import StoredEmbedding, empty_tower, tower_config

Device = torch.device | str
T = TypeVar("T")

EMBEDDING = "embed_tokens.weight"


class DamagedStatesError(ValueError):
    """Hidden states that are not finite or all zero: the encoder, or the way between its devices, went wrong."""


@dataclass(frozen=True)
class TextStates:
    """Hidden states (B, S, D, L) in the encoder's dtype and mask (B, S) int64, 1 on real tokens; left-padded."""

    hidden: Tensor
    mask: Tensor


@dataclass(frozen=True)
class GemmaEncoder:
    """A tokenizer and a text tower, whose layers may be on several devices; states are collected on `device`."""

    tokenizer: PromptTokenizer
    model: PreTrainedModel
    device: torch.device

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], *, max_length: int) -> TextStates:
        """Encodes prompts (an empty one is legal) into the states of every layer.

        Raises DamagedStatesError when a layer gave values that are not finite, as Gemma does in float16, or only zeros.
        """
        ids, mask = self.tokenizer.tokenize(prompts, max_length=max_length)
        device = self._input_device()
        output = self.model(
            input_ids=ids.to(device), attention_mask=mask.to(device), output_hidden_states=True, use_cache=False
        )
        hidden = torch.stack([state.to(self.device) for state in output.hidden_states], dim=-1)
        states = TextStates(hidden, mask.to(self.device))
        _check_states(states)
        return states

    def _input_device(self) -> torch.device:
        device = self.model.get_input_embeddings().weight.device
        return self.device if device.type == "meta" else device  # offloaded: its weight comes when it is used


class GemmaBuilder:
    """Builds the text encoder of a folder or file; cheap to make, reads nothing before it is asked."""

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        checkpoint: Checkpoint | None = None,
        registry: StateDictRegistry | None = None,
    ) -> None:
        self.path = path
        self.checkpoint = checkpoint
        self.registry = registry

    def check(self) -> PreTrainedModel:
        """Returns the empty tower after comparing it with the checkpoint's text projection and the files' headers.

        Raises ValueError with one sentence where they do not fit; reads no weight.
        """
        source = self._source()
        tower = empty_tower(tower_config(source.config, source.facts.path))
        check_shapes(tower, source.shapes(), _what(source), source.quantized)
        return tower

    def quantized_names(self) -> tuple[str, ...]:
        """Names the tower's tensors that stay quantised in memory."""
        return tuple(self._source().quantized)

    def build(self, device: Device, dtype: torch.dtype) -> GemmaEncoder:
        """Returns the encoder on one device, in `dtype`, frozen; raises ValueError with one sentence."""
        return self.build_on({"": device}, dtype, device=device)

    def build_on(self, places: Mapping[str, Device], dtype: torch.dtype, *, device: Device) -> GemmaEncoder:
        """Returns the encoder with each module of `places` (name -> device, "" for all) filled where it belongs.

        Nothing moves data between the devices yet. `device` is where the states will be collected.
        """
        source = self._source()
        tower = self.check()
        tokenizer = load_tokenizer(source)
        state = _read(source)
        if self.registry is not None:
            self.registry.files_read += 1
        for name, place in places.items():
            _fill(tower, name, state, source, torch.device(place), dtype)
        return GemmaEncoder(tokenizer, tower.requires_grad_(False).eval(), torch.device(device))

    def _source(self) -> TextSource:
        source = open_text_encoder(self.path)
        if self.checkpoint is not None:
            check_text_encoder(source.facts, self.checkpoint)
        return source


def _check_states(states: TextStates) -> None:
    """Looks at every layer's states of the real tokens, (N, D, L)."""
    real = states.hidden[states.mask.bool()]
    if not torch.isfinite(real).all():
        remedy = (
            "Choose precision bf16 or fp32."
            if real.dtype == torch.float16
            else "Its weights are damaged: download or copy them again."
        )
        raise DamagedStatesError(
            f"The text encoder gave values that are not finite in {str(real.dtype).removeprefix('torch.')}. {remedy}"
        )
    empty = (~real.any(dim=1).any(dim=0)).nonzero().flatten().tolist()
    if empty:
        raise DamagedStatesError(
            f"The text encoder gave only zeros in {len(empty)} of {real.shape[-1]} hidden states, the first is state "
            f"{empty[0]}. Its weights are damaged, or data is lost on the way between devices: choose mode first."
        )


def _read(source: TextSource) -> dict[str, Tensor]:
    """Returns the tower's tensors as views of the mapped files."""
    state: dict[str, Tensor] = {}
    for path in dict.fromkeys(tensor.path for tensor in source.tensors.values()):
        names = {name: tensor.name for name, tensor in source.tensors.items() if tensor.path == path}
        stored = read_tensors(path, names.values())
        state |= {name: stored[own] for name, own in names.items()}
    return state


def _fill(
    tower: PreTrainedModel,
    name: str,
    state: Mapping[str, Tensor],
    source: TextSource,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Fills a module of the tower, "" for all of it; on the CPU what the file holds wider or narrower stays shared."""
    if name in ("", "embed_tokens") and device.type == "cpu" and EMBEDDING not in source.quantized:
        table, own = state[EMBEDDING], tower.embed_tokens
        if table.dtype != dtype:
            tower.embed_tokens = StoredEmbedding(table, own.embed_scale, dtype)
            state = {key: tensor for key, tensor in state.items() if key != EMBEDDING}
    fill(
        tower.get_submodule(name),
        _below(name, state),
        device=device,
        dtype=dtype,
        what=_what(source),
        quantized={key: _quantization_below(name, way) for key, way in _below(name, source.quantized).items()},
    )


def _below(name: str, table: Mapping[str, T]) -> dict[str, T]:
    """Returns what belongs to a module by the names in it."""
    prefix = f"{name}." if name else ""
    return {key.removeprefix(prefix): value for key, value in table.items() if key.startswith(prefix)}


def _quantization_below(name: str, way: Quantization) -> Quantization:
    """Returns how a module's tensor is held, its scales by the names in the module."""
    prefix = f"{name}." if name else ""
    scales = [scale and scale.removeprefix(prefix) for scale in (way.scale, way.second_scale)]
    return replace(way, scale=scales[0], second_scale=scales[1])


def _what(source: TextSource) -> str:
    return f"text encoder in {source.facts.path}"
