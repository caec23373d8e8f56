"""Text encoders for tests: tiny random Gemmas as Hugging Face folders, and single files made out of folders."""

import json
import os
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.weights_files import GEMMA, read_all, write_raw

GEMMA_4: dict[str, Any] = {
    "model_type": "gemma4_unified_text",
    "vocab_size": 804,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,  # the last one attends to everything, with keys for values
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "sliding_window": 16,
}
VISION = {"model_type": "gemma4_unified_vision", "patch_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 8}
AUDIO = {"model_type": "gemma4_unified_audio", "audio_embed_dim": 8}
VERSION = "gemma4-tiny-v1"


def write_gemma_4(folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Makes a folder of a tiny random Gemma 4 with embedders for pictures and sound, and the toy's tokenizer."""
    fields = {"text_config": GEMMA_4, "vision_config": VISION, "audio_config": AUDIO, "gemma_version": VERSION}
    torch.manual_seed(4)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model("gemma4_unified", **fields), dtype=dtype)
    state = model.state_dict()
    with torch.no_grad():
        for tensor in state.values():
            tensor.copy_(1 + 0.2 * torch.randn(tensor.shape) if tensor.ndim == 1 else 0.2 * torch.randn(tensor.shape))
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    kept = {name: tensor.contiguous() for name, tensor in state.items() if name != "lm_head.weight"}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        os.symlink(GEMMA / name, folder / name)
    return folder


def pack(
    folder: Path, target: Path, *, prefix: str = "model.", tokenizer: bytes | None = None, config: bool = True
) -> Path:
    """Makes a single file of a folder's text tower: flat names under `prefix`, the config and the tokenizer inside.

    With `tokenizer` that SentencePiece model takes the tokenizer's place; what else such files hold is in it too.
    """
    tensors, _ = read_all(folder / "model.safetensors")
    tower = {prefix + _flat(name): tensor for name, tensor in tensors.items() if "language_model." in name}
    extra = {
        "multi_modal_projector.mm_soft_emb_norm.weight": torch.ones(4),
        "vision_model.encoder.layers.0.self_attn.q_proj.weight": torch.ones(4, 4),
        "text_embedding_projection.video_aggregate_embed.weight": torch.ones(4, 4),
    }
    assets = {"spiece_model": _bytes(tokenizer)} if tokenizer is not None else packed_tokenizer(folder)
    metadata = {"format": "pt"}
    if config:
        metadata["gemma_config"] = (folder / "config.json").read_text(encoding="utf-8")
    save_file({**tower, **extra, **assets}, target, metadata=metadata)
    return target


def packed_tokenizer(folder: Path) -> dict[str, Tensor]:
    """Returns a folder's tokenizer as the byte tensors of a single file."""
    return {
        "tokenizer_json": _bytes((folder / "tokenizer.json").read_bytes()),
        "hf_asset__tokenizer_config.json": _bytes((folder / "tokenizer_config.json").read_bytes()),
        "hf_asset__chat_template.jinja": _bytes(b"{{ messages }}"),
    }


def write_shapes(path: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """Writes a single file's header with these bf16 tensors and a tokenizer's names; it takes no space on the disk."""
    header: dict[str, Any] = {}
    position = 0
    assets = {name: tuple(tensor.shape) for name, tensor in packed_tokenizer(GEMMA).items()}
    for dtype, size, named in (("BF16", 2, shapes), ("U8", 1, assets)):
        for name, shape in named.items():
            end = position + size * prod(shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
            position = end
    return write_raw(path, json.dumps(header).encode("utf-8"), position)


def text_config(path: Path) -> dict[str, Any]:
    """Reads a folder's text config."""
    return json.loads((path / "config.json").read_text(encoding="utf-8"))["text_config"]


def _flat(name: str) -> str:
    rest = name.split("language_model.", 1)[1]
    return rest.removeprefix("model.")


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
