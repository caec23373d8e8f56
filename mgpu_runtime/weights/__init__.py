"""Checkpoint files, their names and configs, mapped state dicts. Imports neither diffusers nor transformers."""

from .checkpoint import CheckpointFile
from .facts import ModelFacts, TextEncoderFacts, describe, describe_text_encoder
from .registry import ModelRegistry, StateDictRegistry

__all__ = [
    "CheckpointFile",
    "ModelFacts",
    "ModelRegistry",
    "StateDictRegistry",
    "TextEncoderFacts",
    "describe",
    "describe_text_encoder",
]
