"""Checkpoint file to transformer."""

import os

import torch

from ..weights.checkpoint import CheckpointFile
from ..weights.configs import transformer_kwargs
from ..weights.registry import StateDictRegistry
from .builder import ComponentBuilder
from .loading import WeightTracker
from .transformer import LTXTransformer


class TransformerBuilder(ComponentBuilder):
    """Builds an LTXTransformer."""

    component = "transformer"

    def construct(self, file: CheckpointFile) -> LTXTransformer:
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
