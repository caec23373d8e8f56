"""Turns the `config` of a checkpoint into constructor arguments of the video autoencoder and the upsampler."""

import reprlib
from dataclasses import dataclass
from math import prod
from typing import Any

from .bundle import Checkpoint
from .configs import require, warn_unknown
from .diffusion_vae import (
    diffusion_decoder_kwargs,
    diffusion_min_grid,
    diffusion_scale_factors,
    has_diffusion_decoder,
    vae_section,
)
from .sections import Section, filled, misfit

PUBLISHED_SCALE_FACTORS = (8, 32, 32)

# Kind of a resampling block -> how `diffusers` calls it.
_RESAMPLERS = {"compress_space": "spatial", "compress_time": "temporal", "compress_all": "spatiotemporal"}

_VIDEO_CONSTANTS = {"dims": 3, "norm_layer": "pixel_norm"}
# Key -> value when absent, see sections.filled.
_VIDEO_DEFAULTS = {
    "out_channels": 3,
    "latent_channels": 128,
    "latent_log_var": "uniform",
    "causal_decoder": False,
    "encoder_spatial_padding_mode": "zeros",
    "timestep_conditioning": True,
    "decoder_base_channels": 128,
}
_PIXEL_DEFAULTS = {"in_channels": 3, "patch_size": 4}
_VIDEO_KEYS = {
    *_VIDEO_CONSTANTS,
    *_VIDEO_DEFAULTS,
    *_PIXEL_DEFAULTS,
    "encoder_blocks",
    "decoder_blocks",
    "spatial_padding_mode",
}
_ENCODER_KEYS = {
    *_VIDEO_CONSTANTS,
    *_PIXEL_DEFAULTS,
    "out_channels",
    "base_channels",
    "latent_log_var",
    "latent_log_var_value",  # a variance, and only means are used
    "blocks",
    "encoder_blocks",
    "spatial_padding_mode",
}
_UPSAMPLER_DEFAULTS = {
    "in_channels": 128,
    "mid_channels": 512,
    "num_blocks_per_stage": 4,
    "dims": 3,
    "spatial_upsample": True,
    "temporal_upsample": False,
    "spatial_scale": 2.0,
    "rational_resampler": False,
}


@dataclass(frozen=True)
class _Level:
    """A run of residual blocks and the resampler that follows it (None at the end of the list)."""

    num_layers: int
    inject_noise: bool
    resampler: str | None
    multiplier: int
    residual: bool


def video_vae_kwargs(file: Checkpoint) -> dict[str, Any]:
    """Returns the constructor arguments of AutoencoderKLLTX2Video; raises ValueError for a layout it cannot express.

    For a file with a diffusion decoder only the encoder's are given: the decoder is another class, see diffusion_vae.
    """
    if has_diffusion_decoder(file):
        return _diffusion_encoder_kwargs(file)
    section = file.config_section("vae")
    warn_unknown(file, "vae", section, _VIDEO_KEYS)
    require(section, _VIDEO_CONSTANTS, f"{file.path}: vae")
    values = filled(file, "vae", section, _VIDEO_DEFAULTS)
    decoder = _levels(file, "vae.decoder_blocks", section.get("decoder_blocks"), "", multiplier=1)
    if any(level.inject_noise for level in decoder):
        raise ValueError(f"{file.path}: the video decoder's blocks draw noise (inject_noise), which is not supported.")
    frames, side, _ = scale_factors(file)
    padding = _padding(file, "vae", section)
    return {
        **_encoder_kwargs(file, "vae", section, "encoder_blocks", values["latent_channels"]),
        **_decoder_kwargs(decoder, values["decoder_base_channels"]),
        "out_channels": values["out_channels"],
        "decoder_causal": values["causal_decoder"],
        "timestep_conditioning": values["timestep_conditioning"],
        # A present spatial_padding_mode rules both sides.
        "encoder_spatial_padding_mode": padding or values["encoder_spatial_padding_mode"],
        "decoder_spatial_padding_mode": padding or "reflect",
        "spatial_compression_ratio": side,
        "temporal_compression_ratio": frames,
    }


def encoded_channels(file: Checkpoint) -> int:
    """Returns how many channels the video encoder puts out: the latent's means, and what it says of their variance."""
    where, section, width = "vae", file.config_section("vae"), "latent_channels"
    if has_diffusion_decoder(file):
        where, section, width = "vae.encoder", _encoder_section(file, section), "out_channels"
    values = filled(file, where, section, {width: 128, "latent_log_var": "uniform"})
    latent, kind = values[width], values["latent_log_var"]
    extra = {"uniform": 1, "constant": 1, "per_channel": latent, "none": 0}
    if kind not in extra:
        raise ValueError(f"{file.path}: vae latent_log_var is {kind!r}, but only {', '.join(extra)} are supported.")
    return latent + extra[kind]


def scale_factors(file: Checkpoint) -> tuple[int, int, int]:
    """Returns how many (frames, rows, columns) one latent cell stands for, from the decoder's layout.

    The published (8, 32, 32) for a file that tells no such layout.
    """
    section = vae_section(file)
    if has_diffusion_decoder(file):
        is_told = isinstance(section.get("decoder"), dict)
        return diffusion_scale_factors(diffusion_decoder_kwargs(file)) if is_told else PUBLISHED_SCALE_FACTORS
    if "decoder_blocks" not in section:
        return PUBLISHED_SCALE_FACTORS
    levels = _levels(file, "vae.decoder_blocks", section["decoder_blocks"], "", multiplier=1)
    kinds = [level.resampler for level in levels]
    patch_size = filled(file, "vae", section, _PIXEL_DEFAULTS)["patch_size"]
    space = patch_size * 2 ** (kinds.count("spatial") + kinds.count("spatiotemporal"))
    return 2 ** (kinds.count("temporal") + kinds.count("spatiotemporal")), space, space


def decode_min_cells(file: Checkpoint) -> int:
    """Returns the smallest side, in latent cells, of a tile that the video decoder can take.

    A decoder that pads by reflection needs two cells; a diffusion decoder the width of its attention windows, though
    it pads a whole clip that is smaller. 1 where the file has no video autoencoder.
    """
    section = vae_section(file)
    if "video_vae" not in file.components:
        return 1
    if has_diffusion_decoder(file):
        is_told = isinstance(section.get("decoder"), dict)
        return max(diffusion_min_grid(diffusion_decoder_kwargs(file))[1:]) if is_told else 1
    return 2 if (_padding(file, "vae", section) or "reflect") == "reflect" else 1


def upsampler_kwargs(file: Checkpoint) -> dict[str, Any]:
    """Returns the constructor arguments of LTX2LatentUpsamplerModel; the fields are at the top of the config."""
    warn_unknown(file, "top level", file.config, _UPSAMPLER_DEFAULTS)
    values = filled(file, "upsampler", file.config, _UPSAMPLER_DEFAULTS)
    scale, is_rational = values.pop("spatial_scale"), values.pop("rational_resampler")
    return {**values, "rational_spatial_scale": scale, "use_rational_resampler": is_rational}


def _diffusion_encoder_kwargs(file: Checkpoint) -> dict[str, Any]:
    """Returns the encoder's arguments of a file with a diffusion decoder, and checks the decoder's."""
    section = file.config_section("vae")
    decoder = diffusion_decoder_kwargs(file)
    encoder = _encoder_section(file, section)
    warn_unknown(file, "vae.encoder", encoder, _ENCODER_KEYS)
    require({**section, **encoder}, _VIDEO_CONSTANTS, f"{file.path}: vae.encoder")
    blocks = "blocks" if "blocks" in encoder else "encoder_blocks"
    latent = filled(file, "vae.encoder", encoder, {"out_channels": decoder["latent_channels"]})["out_channels"]
    if latent != decoder["latent_channels"]:
        raise ValueError(
            f"{file.path}: the video encoder makes latents of {latent} channels, the decoder takes "
            f"{decoder['latent_channels']}. The config does not fit itself."
        )
    padding = filled(file, "vae", section, {"encoder_spatial_padding_mode": "zeros"})["encoder_spatial_padding_mode"]
    return {
        **_encoder_kwargs(file, "vae.encoder", encoder, blocks, latent),
        "encoder_spatial_padding_mode": _padding(file, "vae.encoder", encoder) or padding,
        "spatial_compression_ratio": decoder["spatial_compression_ratio"],
        "temporal_compression_ratio": decoder["temporal_compression_ratio"],
    }


def _encoder_section(file: Checkpoint, section: Section) -> Section:
    """Returns the `encoder` part of the vae section of a file with a diffusion decoder."""
    encoder = section.get("encoder")
    if not isinstance(encoder, dict):
        raise ValueError(f"{file.path} has no vae.encoder section in its config. Choose the original file.")
    return encoder


def _padding(file: Checkpoint, where: str, section: Section) -> str | None:
    """Returns the section's spatial_padding_mode; None where it is absent or null."""
    if section.get("spatial_padding_mode") is None:
        return None
    return filled(file, where, section, {"spatial_padding_mode": ""})["spatial_padding_mode"]


def _block(file: Checkpoint, where: str, block: Any) -> tuple[str, dict[str, Any]]:
    """Reads one entry of a block list: a name and its options, or its number of layers alone."""
    match block:
        case [str() as name, dict() as options]:
            return name, options
        case [str() as name, int() as num_layers]:
            return name, {"num_layers": num_layers}
    raise misfit(file, where, f"a block is {reprlib.repr(block)}, where a name with its options is needed")


def _levels(file: Checkpoint, where: str, listed: Any, suffix: str, *, multiplier: int) -> list[_Level]:
    """Reads a block list (res_x, compress_*, res_x, ... res_x) as levels, in the order of the file."""
    if not isinstance(listed, list | None):
        raise misfit(file, where, f"it is {reprlib.repr(listed)}, where a list of blocks is needed")
    blocks = [_block(file, where, block) for block in listed or []]
    names = [name for name, _ in blocks]
    expected = [name in ("res_x", *(kind + suffix for kind in _RESAMPLERS)) for name in names]
    alternates = len(names) % 2 == 1 and all((name == "res_x") == (i % 2 == 0) for i, name in enumerate(names))
    if not alternates or not all(expected):
        raise ValueError(
            f"{file.path}: {where} is {names}, but only res_x and compress_*{suffix} in turn are supported."
        )
    levels = []
    for (_, layers), (name, resample) in zip(blocks[::2], [*blocks[1::2], (None, {})], strict=True):
        warn_unknown(file, where, layers, {"num_layers", "inject_noise"})
        warn_unknown(file, where, resample, {"multiplier", "residual"})
        block = filled(file, where, layers, {"num_layers": 1, "inject_noise": False}, or_zero={"num_layers"})
        sampler = filled(file, where, resample, {"multiplier": multiplier, "residual": False})
        levels.append(
            _Level(
                **block,
                resampler=None if name is None else _RESAMPLERS[name.removesuffix(suffix)],
                multiplier=sampler["multiplier"],
                # Only compress_all honours the key.
                residual=name == "compress_all" and sampler["residual"],
            )
        )
    return levels


def _encoder_kwargs(file: Checkpoint, where: str, section: Section, key: str, latent_channels: int) -> dict[str, Any]:
    """Returns the encoder's arguments, lists pixel end first; its first level is as wide as the latent."""
    levels = _levels(file, f"{where}.{key}", section.get(key), "_res", multiplier=2)
    resamplers = levels[:-1]
    widths = [latent_channels * prod(level.multiplier for level in resamplers[: i + 1]) for i in range(len(resamplers))]
    return {
        **filled(file, where, section, _PIXEL_DEFAULTS),
        "latent_channels": latent_channels,
        "block_out_channels": tuple(widths),
        "down_block_types": ("LTX2VideoDownBlock3D",) * len(resamplers),
        "layers_per_block": tuple(level.num_layers for level in levels),
        "spatio_temporal_scaling": (True,) * len(resamplers),
        "downsample_type": tuple(level.resampler for level in resamplers),
        "encoder_causal": True,
    }


def _decoder_kwargs(levels: list[_Level], base_channels: int) -> dict[str, Any]:
    """Returns the decoder's lists: pixel end first, except the resampler kinds, which diffusers does not reverse."""
    resamplers = levels[:-1]
    # A width before its resampler divides it: level width times the level's own multiplier.
    widths = [base_channels * prod(level.multiplier for level in resamplers[: i + 1]) for i in range(len(resamplers))]
    return {
        "decoder_block_out_channels": tuple(widths),
        "decoder_layers_per_block": tuple(level.num_layers for level in levels),
        "decoder_spatio_temporal_scaling": (True,) * len(resamplers),
        "decoder_inject_noise": (False,) * len(levels),
        "upsample_type": tuple(level.resampler for level in reversed(resamplers)),
        "upsample_residual": tuple(level.residual for level in resamplers),
        "upsample_factor": tuple(level.multiplier for level in resamplers),
    }
