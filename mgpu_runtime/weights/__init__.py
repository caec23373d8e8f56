"""Checkpoint files, their names and configs, mapped state dicts. Imports neither diffusers nor transformers."""

from .bundle import Checkpoint, read_checkpoint
from .checkpoint import CheckpointFile
from .facts import ModelFacts, describe
from .registry import ModelRegistry, StateDictRegistry
from .report import FileReport, inspect
from .text_source import TextEncoderFacts, describe_text_encoder

__all__ = [
    "Checkpoint",
    "CheckpointFile",
    "FileReport",
    "ModelFacts",
    "ModelRegistry",
    "StateDictRegistry",
    "TextEncoderFacts",
    "describe",
    "describe_text_encoder",
    "inspect",
    "read_checkpoint",
]
