"""Writes video autoencoders with a diffusion decoder in the layout of LTX-2.5's file, at tiny sizes."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import LTX2VideoDiffusionDecoderModel
from safetensors.torch import save_file
from torch import Tensor

from tests.weights_files import TINY_23, read_all

# 8 frames and 32x32 pixels a latent cell, as published
DECODER = {
    "_class_name": "NADiffusionDecoder",
    "in_channels": 16,
    "out_channels": 3,
    "patch_size": 4,
    "head_dim": 8,
    "stage_channels": [32, 16, 8, 8, 8],
    "stage_depths": [1, 1, 1, 1, 2],
    "stage_kernels": [[3, 3, 3], [3, 3, 5], [3, 3, 3], [3, 3, 3], [5, 5, 5]],
    "upsamples": [[[1, 2, 2], 2], [[2, 1, 1], 2], [[2, 2, 2], 1], [[2, 2, 2], 1]],
    "spatial_padding_mode": "zeros",
    "resampler_kind": "linear",
    "stage5_kernel": [5, 3, 3],
    "t_emb_dim": 16,
    "timestep_scale_multiplier": 1000.0,
    "default_num_inference_steps": 1,
}
# 8 frames and 4x4 pixels a cell: small enough for attention over all pairs of tokens
SMALL_DECODER = {**DECODER, "upsamples": [[[1, 1, 1], 2], [[2, 1, 1], 2], [[2, 1, 1], 1], [[2, 1, 1], 1]]}

_TO_FILE = {
    "t_embedder.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "t_embedder.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "attn.to_out.0": "attn.proj",
    "attn.norm_q": "attn.q_norm",
    "attn.norm_k": "attn.k_norm",
}
_GATED = {"attn.to_out.0": "gate_msa", "mlp.w_down": "gate_mlp", "context_proj": "gate_ctx"}


def reference_decoder(decoder: dict[str, Any] = DECODER, output: str = "x0") -> LTX2VideoDiffusionDecoderModel:
    """Makes `diffusers`' model of a decoder config with seeded random weights, in float32."""
    strides, reductions = zip(*decoder["upsamples"], strict=True)
    model = LTX2VideoDiffusionDecoderModel(
        latent_channels=decoder["in_channels"],
        patch_size=decoder["patch_size"],
        decoder_head_dim=decoder["head_dim"],
        decoder_stage_channels=decoder["stage_channels"],
        decoder_stage_depths=decoder["stage_depths"],
        decoder_stage_kernels=decoder["stage_kernels"][:4],
        decoder_upsample_strides=strides,
        decoder_upsample_channel_reductions=reductions,
        decoder_stage5_kernel=decoder["stage5_kernel"],
        decoder_t_emb_dim=decoder["t_emb_dim"],
        decoder_timestep_scale_multiplier=decoder["timestep_scale_multiplier"],
        decoder_model_output_type=output,
        decoder_num_inference_steps=decoder["default_num_inference_steps"],
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def write_diffusion_vae(
    path: Path,
    decoder: dict[str, Any] = DECODER,
    *,
    output: str = "x0",
    gated: bool = False,
    prefix: str = "vae.",
    whole: Path | None = None,
    drop: str = "",
    extra: dict[str, Tensor] | None = None,
) -> LTX2VideoDiffusionDecoderModel:
    """Writes a file with the tiny 2.3 encoder and a random diffusion decoder; returns `diffusers`' twin of the latter.

    `gated` writes static gates and divides them out of the layers they scale. `whole` is a checkpoint that gives all
    other parts, so that the file is one too. `drop` leaves one tensor out and `extra` adds some, by the file's names.
    """
    model = reference_decoder(decoder, output)
    source, metadata = read_all(TINY_23)
    config = json.loads(metadata["config"])
    tensors = {name: t for name, t in source.items() if name.startswith(("vae.encoder.", "vae.per_channel_"))}
    tensors |= {f"vae.decoder.{name}": tensor for name, tensor in to_file(model.decoder.state_dict(), gated).items()}
    tensors["vae.decoder.type_emb"] = torch.ones(decoder["in_channels"])
    tensors["vae.decoder.coarse_head.weight"] = torch.ones(3, 8)
    tensors = {prefix + name.removeprefix("vae."): tensor for name, tensor in tensors.items()}
    rest: dict[str, Any] = {"transformer": None}
    if whole:
        others, facts = read_all(whole)
        tensors |= {name: tensor for name, tensor in others.items() if not name.startswith("vae.")}
        rest = json.loads(facts["config"])
    tensors.pop(drop, None)
    tensors |= extra or {}
    config["vae"] = {
        "_class_name": "CausalDiffusionVAE",
        "dims": 3,
        "model_output_type": output,
        "spatial_padding_mode": "zeros",
        "encoder": {
            "_class_name": "Encoder",
            "dims": 3,
            "in_channels": 3,
            "out_channels": 16,
            "base_channels": 16,
            "blocks": config["vae"]["encoder_blocks"],
            "patch_size": 4,
            "latent_log_var": "constant",
            "latent_log_var_value": -7.824046010856292,
            "norm_layer": "pixel_norm",
            "spatial_padding_mode": "zeros",
        },
        "decoder": decoder,
    }
    config = {**rest, "vae": config["vae"]}
    save_file(tensors, path, metadata={**metadata, "config": json.dumps(config), "model_version": "2.5.0"})
    statistics = {"mean": "mean-of-means", "std": "std-of-means"}
    for name, key in statistics.items():
        getattr(model, f"latents_{name}").copy_(source[f"vae.per_channel_statistics.{key}"])
    return model


def to_file(state: dict[str, Tensor], gated: bool) -> dict[str, Tensor]:
    """Turns the module's tensors into a file's: q, k and v fused, other names, gates where asked for."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".")
        if module.endswith((".to_k", ".to_v")):
            continue
        if module.endswith(".to_q"):
            attention = module.removesuffix("to_q")
            found[f"{attention}qkv.{leaf}"] = torch.cat([state[f"{attention}to_{part}.{leaf}"] for part in "qkv"])
            continue
        layer = next((layer for layer in _GATED if module.endswith(layer)), None)
        if gated and layer is not None and name.startswith("diff_blocks"):
            gate = torch.linspace(0.5, 2.0, tensor.shape[0])
            found[f"{module.removesuffix(layer)}{_GATED[layer]}"] = gate
            tensor = tensor / (gate[:, None] if tensor.dim() == 2 else gate)
        for inside, outside in _TO_FILE.items():
            name = name.replace(inside, outside)
        found[name] = tensor.clone()
    return found
