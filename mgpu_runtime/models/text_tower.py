"""Gemma's text tower as transformers has it, made without weights.

transformers reads the config itself, rotary settings of old and new files included; supported is 5.0 and later 5.x,
from the release on that knows the model.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from huggingface_hub.errors import StrictDataclassError
from packaging.version import Version
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModel, PretrainedConfig, PreTrainedModel

# Kind of model -> the first release of transformers that can build it as this program needs it.
NEEDED_TRANSFORMERS = {
    "gemma3": "5.0.0",
    "gemma3_text": "5.0.0",
    "gemma4": "5.5.0",
    "gemma4_text": "5.5.0",
    "gemma4_unified": "5.10.1",
    "gemma4_unified_text": "5.10.1",
}


class StoredEmbedding(nn.Module):
    """An embedding whose table stays as the file holds it; the rows that are looked up are turned into `dtype`."""

    def __init__(self, table_VD: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", table_VD, persistent=False)
        self.register_buffer("embed_scale", scale, persistent=False)
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the scaled rows of token ids, as Gemma's own embedding does."""
        return F.embedding(ids, self.weight).to(self.dtype) * self.embed_scale.to(self.dtype)


def tower_config(
    config: Mapping[str, Any], path: str, *, installed: str = transformers.__version__
) -> PretrainedConfig:
    """Returns the text tower's config; raises ValueError in one sentence where transformers cannot build it.

    `installed` is the version of transformers that is asked.
    """
    kind = config["model_type"]
    needed = NEEDED_TRANSFORMERS[kind]
    if Version(installed) < Version(needed) or kind not in CONFIG_MAPPING:
        raise ValueError(
            f"The text encoder {path} ({kind}) needs transformers {needed} or newer, this is {installed}: "
            f"pip install -U 'transformers>={needed},<6'"
        )
    try:
        return CONFIG_MAPPING[kind].from_dict(copy.deepcopy(dict(config))).get_text_config()
    except (StrictDataclassError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = str(error).strip().replace("\n", " ")
        raise ValueError(
            f"transformers {installed} cannot read the config of the text encoder {path}: {reason}. "
            f"It takes transformers {needed} to 5.x and Gemma's own config."
        ) from error


def empty_tower(config: PretrainedConfig) -> PreTrainedModel:
    """Makes the tower with weights on the meta device; what is computed from the config alone is real, on the CPU."""
    with torch.device("meta"):
        tower = AutoModel.from_config(config, dtype=torch.float32)
    for name, buffer in _computed_buffers(config).items():
        owner, _, leaf = name.rpartition(".")
        setattr(tower.get_submodule(owner), leaf, buffer)
    return tower


def _computed_buffers(config: PretrainedConfig) -> dict[str, Tensor]:
    """Returns what no file holds (rotary frequencies, the embedding's scale) by building the tower without layers."""
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size = 0, 1
    return dict(AutoModel.from_config(small, dtype=torch.float32).named_buffers())
