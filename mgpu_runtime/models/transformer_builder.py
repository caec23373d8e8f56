"""Checkpoint file to transformer."""

import os
import re

import torch

from ..weights.bundle import Checkpoint, Paths
from ..weights.configs import transformer_kwargs
from ..weights.registry import StateDictRegistry
from .builder import ComponentBuilder
from .loading import WeightTracker
from .transformer import LTXTransformer

_FP8_CAST = re.compile(r"transformer_blocks\.\d+\..*(to_[qkv]|to_out\.0|ff\.net\.(0\.proj|2))\.(weight|bias)")


class TransformerBuilder(ComponentBuilder):
    """Builds an LTXTransformer; with `round_to_fp8`, a wider file's big layers are rounded to 8 bit, see is_rounded."""

    component = "transformer"

    def __init__(
        self,
        checkpoint: Paths,
        *,
        registry: StateDictRegistry,
        tracker: WeightTracker | None = None,
        round_to_fp8: bool = False,
    ) -> None:
        super().__init__(checkpoint, registry=registry, tracker=tracker)
        self.round_to_fp8 = round_to_fp8

    def with_sources(
        self, registry: StateDictRegistry | None = None, tracker: WeightTracker | None = None
    ) -> "TransformerBuilder":
        """Returns a builder of the same transformer that reads through other sources, where they are given."""
        registry, tracker = registry or self.registry, tracker or self.tracker
        return type(self)(self.checkpoint, registry=registry, tracker=tracker, round_to_fp8=self.round_to_fp8)

    def is_rounded(self, name: str) -> bool:
        """Tells the weights and biases that the official fp8-cast casts: the blocks' projections and feed-forwards."""
        return self.round_to_fp8 and _FP8_CAST.fullmatch(name) is not None

    def construct(self, file: Checkpoint) -> LTXTransformer:
        """Makes the transformer that the file's config describes."""
        return LTXTransformer(**transformer_kwargs(file))


def build_transformer(
    checkpoint: str | os.PathLike,
    *,
    registry: StateDictRegistry,
    device: torch.device | str,
    dtype: torch.dtype,
    tracker: WeightTracker | None = None,
) -> LTXTransformer:
    """Builds the transformer of a checkpoint; raises ValueError with one sentence when the file does not hold one."""
    return TransformerBuilder(checkpoint, registry=registry, tracker=tracker).build(device, dtype)
