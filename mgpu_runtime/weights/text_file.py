"""A text encoder in one safetensors file, as ComfyUI's text_encoders folder holds it: weights, tokenizer and config.

Lightricks' Gemma 4 carries its config in the metadata (`gemma_config`) and its tokenizer's files as byte tensors
(`tokenizer_json`, `hf_asset__NAME`). Repacked Gemma 3 files carry a SentencePiece model (`spiece_model`) and no config:
the architecture of Gemma 3 12B and of Gemma 4 12B is known here and compared with the shapes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .header import first_names, metadata_object, read_header
from .text_folder import TOKENIZER_FILES
from .text_names import StoredTensor, count_layers, tower_tensors

CONFIG_KEY = "gemma_config"
# The tokenizer's files -> the tensors that hold their bytes. Others, such as the chat template, are not needed.
_ASSETS = {
    "tokenizer.json": "tokenizer_json",
    "tokenizer_config.json": "hf_asset__tokenizer_config.json",
    "tokenizer.model": "spiece_model",
}

_SIZE_12B = {
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 1024,
}
GEMMA_3_12B = {
    "model_type": "gemma3_text",
    **_SIZE_12B,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
GEMMA_4_12B = {
    "model_type": "gemma4_unified_text",
    **_SIZE_12B,
    "max_position_embeddings": 262144,
    "global_head_dim": 512,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def file_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the text tower's tensors; raises ValueError with one sentence for a file that is no text encoder."""
    entries, _ = read_header(path)
    tensors = tower_tensors(StoredTensor(str(path), name, entry) for name, entry in entries.items())
    if "embed_tokens.weight" not in tensors or not count_layers(tensors):
        raise ValueError(
            f"{path} is no text encoder: its first tensors are {first_names(entries)}. Choose Gemma's file or folder."
        )
    return tensors


def file_config(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Returns the config, as the file tells it or as its shapes show it; raises ValueError where neither does."""
    _, metadata = read_header(path)
    return metadata_object(metadata, CONFIG_KEY, path) if CONFIG_KEY in metadata else _known_config(path, tensors)


def file_assets(path: Path) -> dict[str, str]:
    """Returns {tokenizer file: the tensor of its bytes}; raises ValueError with one sentence where there is none."""
    entries, _ = read_header(path)
    found = {file: name for file, name in _ASSETS.items() if name in entries}
    if not any(file in found for file in TOKENIZER_FILES):
        raise ValueError(
            f"{path} holds no tokenizer (a tensor tokenizer_json or spiece_model). Choose a text encoder file with "
            "its tokenizer inside, or Gemma's Hugging Face folder."
        )
    wrong = [name for name in found.values() if entries[name].dtype not in ("U8", "I8")]
    if wrong:
        raise ValueError(f"{path} is damaged: {wrong[0]} is {entries[wrong[0]].dtype}, not bytes.")
    return found


def _known_config(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Returns the architecture of a 12B model; raises ValueError when the shapes are those of another."""
    is_gemma_4 = any(name.endswith(".layer_scalar") for name in tensors)
    vocab_size, hidden_size = tensors["embed_tokens.weight"].entry.shape
    num_layers = count_layers(tensors)
    if (hidden_size, num_layers) != (_SIZE_12B["hidden_size"], _SIZE_12B["num_hidden_layers"]):
        raise ValueError(
            f"{path} has no {CONFIG_KEY!r} in its metadata, and only Gemma 3 12B and Gemma 4 12B (hidden size 3840, "
            f"48 layers) are known without it; this is hidden size {hidden_size} and {num_layers} layers. Choose the "
            "Hugging Face folder of this model, or Gemma 12B."
        )
    return {**(GEMMA_4_12B if is_gemma_4 else GEMMA_3_12B), "vocab_size": vocab_size}
