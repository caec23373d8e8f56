"""LTX-2.5's diffusion video decoder: its config as constructor arguments, its tensors as the module takes them.

The config's `vae` section holds `encoder` (a convolutional one, see vae_configs) and `decoder`. The decoder's tensors
are not one to one with the module's: query, key and value are fused in the file, and older files carry static gates.
"""

import re
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from .bundle import Checkpoint
from .configs import require, warn_unknown
from .sections import Section, filled

CONV_VAE = "CausalVideoAutoencoder"

# Key of the config -> value when absent, see sections.filled. The published 2.5 file differs in most of them.
_DEFAULTS = {
    "in_channels": 128,
    "out_channels": 3,
    "patch_size": 4,
    "stage_channels": [1024, 512, 256, 256, 128],
    "stage_depths": [4, 6, 4, 2, 8],
    "stage_kernels": [(3, 7, 7), (3, 7, 7), (3, 5, 5), (3, 5, 5), (3, 3, 3)],
    "upsamples": [((1, 2, 2), 2), ((2, 1, 1), 2), ((2, 2, 2), 1), ((2, 2, 2), 2)],
    "stage5_kernel": (3, 7, 7),
    "t_emb_dim": 384,
    "timestep_scale_multiplier": 1.0,
    "default_num_inference_steps": 2,
}
_KNOWN = {*_DEFAULTS, "head_dim", "na_head_dim", "stage5_channels", "spatial_padding_mode", "resampler_kind"}

# Part of a tensor's name in the file -> in the module.
_RENAMED = {
    "t_embedder.mlp.0.": "t_embedder.timestep_embedder.linear_1.",
    "t_embedder.mlp.2.": "t_embedder.timestep_embedder.linear_2.",
    ".attn.proj.": ".attn.to_out.0.",
    ".attn.q_norm.": ".attn.norm_q.",
    ".attn.k_norm.": ".attn.norm_k.",
}
# Gate of a block -> the linear layer whose output it scales; the module has no gates, so the layer takes them over.
_GATES = {"gate_msa": "attn.to_out.0", "gate_mlp": "mlp.w_down", "gate_ctx": "context_proj"}
# Not needed to decode: heads for quick previews, and the mark of keyframe pictures given beside the latent.
_DROPPED = re.compile(r"decoder\.(coarse_.*|.*\.coarse_.*|type_emb)")


def has_diffusion_decoder(file: Checkpoint) -> bool:
    """Tells by the config whether the video autoencoder decodes by diffusion."""
    return vae_section(file).get("_class_name", CONV_VAE) != CONV_VAE


def vae_section(file: Checkpoint) -> Section:
    """Returns the config's `vae` section, empty where there is none."""
    section = file.config.get("vae")
    return section if isinstance(section, dict) else {}


def diffusion_decoder_kwargs(file: Checkpoint) -> dict[str, Any]:
    """Returns the constructor arguments of LTX2VideoDiffusionDecoderModel.

    Raises ValueError for a layout it cannot express.
    """
    section = file.config_section("vae")
    decoder = section.get("decoder")
    if not isinstance(decoder, dict):
        raise ValueError(
            f"{file.path}: the video autoencoder is a {section.get('_class_name')!r} (a diffusion "
            "decoder), but its config has no vae.decoder section. Choose the original file."
        )
    warn_unknown(file, "vae.decoder", decoder, _KNOWN)
    where = f"{file.path}: vae.decoder"
    require(decoder, {"resampler_kind": "linear"}, where)
    values = filled(file, "vae.decoder", decoder, _DEFAULTS)
    older_head_dim = filled(file, "vae.decoder", decoder, {"na_head_dim": 64})["na_head_dim"]
    kwargs = {
        "out_channels": values["out_channels"],
        "latent_channels": values["in_channels"],
        "patch_size": values["patch_size"],
        "decoder_head_dim": filled(file, "vae.decoder", decoder, {"head_dim": older_head_dim})["head_dim"],
        "decoder_stage_channels": tuple(values["stage_channels"]),
        "decoder_stage_depths": tuple(values["stage_depths"]),
        # one kernel more than stages that use it: the last stage has a key of its own
        "decoder_stage_kernels": tuple(map(tuple, values["stage_kernels"][: len(values["upsamples"])])),
        "decoder_upsample_strides": tuple(tuple(stride) for stride, _ in values["upsamples"]),
        "decoder_upsample_channel_reductions": tuple(reduction for _, reduction in values["upsamples"]),
        "decoder_stage5_kernel": tuple(values["stage5_kernel"]),
        "decoder_t_emb_dim": values["t_emb_dim"],
        "decoder_timestep_scale_multiplier": values["timestep_scale_multiplier"],
        "decoder_model_output_type": section.get("model_output_type", "v"),
        "decoder_num_inference_steps": values["default_num_inference_steps"],
    }
    _check(kwargs, decoder.get("stage5_channels"), where)
    frames, side, _ = diffusion_scale_factors(kwargs)
    return {**kwargs, "spatial_compression_ratio": side, "temporal_compression_ratio": frames}


def diffusion_scale_factors(kwargs: Mapping[str, Any]) -> tuple[int, int, int]:
    """Returns how many (frames, rows, columns) one latent cell stands for."""
    strides = kwargs["decoder_upsample_strides"]
    frames, rows, columns = (prod(stride[axis] for stride in strides) for axis in range(3))
    return frames, rows * kwargs["patch_size"], columns * kwargs["patch_size"]


def diffusion_min_grid(kwargs: Mapping[str, Any]) -> tuple[int, int, int]:
    """Returns the smallest latent (frames, rows, columns) on which every stage's grid holds its attention window.

    A published latent must have (3, 7, 7) cells; smaller ones are padded before decoding.
    """
    kernels = [*kwargs["decoder_stage_kernels"], kwargs["decoder_stage5_kernel"]]
    smallest, cells = [1, 1, 1], [1, 1, 1]
    for kernel, stride in zip(kernels, [*kwargs["decoder_upsample_strides"], (1, 1, 1)], strict=True):
        smallest = [max(least, -(-side // scale)) for least, side, scale in zip(smallest, kernel, cells, strict=True)]
        cells = [scale * factor for scale, factor in zip(cells, stride, strict=True)]
    return smallest[0], smallest[1], smallest[2]


def diffusion_decoder_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Turns a file's tensors (named decoder.*, others pass through) into those of the module.

    Splits the fused query, key and value (views, no copy), multiplies gates into the layers they scale (in float32,
    rounded to the layer's dtype) and leaves out what decoding does not need. Names that fit nothing are kept, so that
    the module's own check finds them. Works on meta tensors too, for shapes.
    """
    kept = {_rename(name): tensor for name, tensor in state.items() if not _DROPPED.fullmatch(name)}
    for name in [name for name in kept if name.startswith("decoder.") and name.rsplit(".", 1)[-1] in _GATES]:
        block, gate = name.rsplit(".", 1)
        if f"{block}.{_GATES[gate]}.weight" in kept:
            scale = kept.pop(name)
            for layer in (f"{block}.{_GATES[gate]}.weight", f"{block}.{_GATES[gate]}.bias"):
                if layer in kept:
                    kept[layer] = _scaled(kept[layer], scale)
    found: dict[str, Tensor] = {}
    for name, tensor in kept.items():
        fused = re.fullmatch(r"(decoder\..*\.attn)\.qkv\.(weight|bias)", name)
        if fused and tensor.shape[0] % 3 == 0:
            parts = tensor.chunk(3)
            found.update({f"{fused[1]}.to_{part}.{fused[2]}": t for part, t in zip("qkv", parts, strict=True)})
        else:
            found[name] = tensor
    return found


def _rename(name: str) -> str:
    if name.startswith("decoder."):
        for part, target in _RENAMED.items():
            name = name.replace(part, target)
    return name


def _scaled(tensor: Tensor, gate: Tensor) -> Tensor:
    """Multiplies each row of a weight (out, in), or each entry of a bias (out,), by the gate (out,)."""
    rows = gate.to(torch.float32).view(-1, *(1,) * (tensor.dim() - 1))
    return (rows * tensor.to(torch.float32)).to(tensor.dtype)


def _check(kwargs: Section, stage5_channels: int | None, where: str) -> None:
    """Raises ValueError where the numbers contradict each other or name another architecture."""
    channels, reductions = kwargs["decoder_stage_channels"], kwargs["decoder_upsample_channel_reductions"]
    counts = {len(channels), len(kwargs["decoder_stage_depths"]), len(kwargs["decoder_stage_kernels"]) + 1}
    if counts != {len(reductions) + 1}:
        raise ValueError(
            f"{where}: {len(channels)} stage_channels, {len(kwargs['decoder_stage_depths'])} stage_depths and "
            f"{len(reductions)} upsamples do not fit each other. Choose the original file."
        )
    for before, after, reduction in zip(channels[:-1], channels[1:], reductions, strict=True):
        if after * reduction != before:
            raise ValueError(f"{where}: {before} channels reduced by {reduction} do not make a stage of {after}.")
    if stage5_channels not in (None, channels[-1]):
        raise ValueError(f"{where}.stage5_channels is {stage5_channels}, but only {channels[-1]} is supported.")
    head_dim = kwargs["decoder_head_dim"]
    if head_dim % 8 or any(width % head_dim for width in channels):
        raise ValueError(f"{where}: heads of {head_dim} channels do not fit stages of {list(channels)} channels.")
    if kwargs["decoder_model_output_type"] not in ("v", "x0"):
        kind = kwargs["decoder_model_output_type"]
        raise ValueError(f"{where}: model_output_type is {kind!r}, but only 'v' and 'x0' are supported.")
