"""A checkpoint with 6 heads, so that 1, 2 and 3 workers can all run it; written in the true file layout."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mgpu_runtime.models.transformer import LTXTransformer
from mgpu_runtime.weights.bundle import read_checkpoint
from mgpu_runtime.weights.configs import transformer_kwargs
from mgpu_runtime.weights.keymaps import map_key
from tests.goldens import GOLDEN

NUM_HEADS = 6
BASE = GOLDEN / "checkpoints" / "tiny_ltx23.safetensors"


def write_six_heads(path: Path) -> Path:
    """Writes random transformer weights of 6 heads beside the tiny 2.3 video autoencoder; returns the path."""
    with safe_open(BASE, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys() if name.startswith("vae.")}
        names = [name for name in file.keys() if map_key(name)[0] == "transformer"]
    metadata["config"] = json.dumps(_with_six_heads(json.loads(metadata["config"])))
    save_file(tensors | {name: torch.zeros(1) for name in names}, path, metadata=metadata)
    with torch.device("meta"):
        shapes = LTXTransformer(**transformer_kwargs(read_checkpoint(path))).state_dict()
    generator = torch.Generator().manual_seed(6)
    for name in names:
        tensors[name] = torch.randn(shapes[map_key(name)[1]].shape, generator=generator) * 0.2
    save_file(tensors, path, metadata=metadata)
    return path


def _with_six_heads(config: dict) -> dict:
    width, audio_width = NUM_HEADS * 16, NUM_HEADS * 8
    config["transformer"] |= {
        "num_attention_heads": NUM_HEADS,
        "audio_num_attention_heads": NUM_HEADS,
        "cross_attention_dim": width,
        "audio_cross_attention_dim": audio_width,
        "connector_num_attention_heads": NUM_HEADS,
        "audio_connector_num_attention_heads": NUM_HEADS,
    }
    return config
