"""Turns the `config` of a checkpoint into constructor arguments of the autoencoders, the vocoder and the upsampler."""

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from .bundle import Checkpoint
from .configs import Section, require, warn_unknown
from .diffusion_vae import diffusion_decoder_kwargs, diffusion_min_grid, diffusion_scale_factors, has_diffusion_decoder

PUBLISHED_SCALE_FACTORS = (8, 32, 32)

# Kind of a resampling block -> how `diffusers` calls it.
_RESAMPLERS = {"compress_space": "spatial", "compress_time": "temporal", "compress_all": "spatiotemporal"}

_VIDEO_KEYS = {
    "dims",
    "in_channels",
    "out_channels",
    "latent_channels",
    "patch_size",
    "norm_layer",
    "latent_log_var",
    "encoder_blocks",
    "decoder_blocks",
    "causal_decoder",
    "spatial_padding_mode",
    "encoder_spatial_padding_mode",
    "timestep_conditioning",
    "decoder_base_channels",
}
_ENCODER_KEYS = {
    "dims",
    "in_channels",
    "out_channels",
    "base_channels",
    "patch_size",
    "norm_layer",
    "latent_log_var",
    "latent_log_var_value",  # a variance, and only means are used
    "blocks",
    "encoder_blocks",
    "spatial_padding_mode",
}
_VIDEO_CONSTANTS = {"dims": 3, "norm_layer": "pixel_norm"}
_LATENT_MEL_FACTOR = 4  # three levels, two of them downsample; `diffusers` has it fixed


@dataclass(frozen=True)
class _Level:
    """A run of residual blocks and the resampler that follows it (None at the end of the list)."""

    num_layers: int
    inject_noise: bool
    resampler: str | None
    multiplier: int
    residual: bool


class MelLayout(NamedTuple):
    """How sound becomes the spectrogram that the audio autoencoder takes: samples per second, window, hop, mel bins."""

    rate: int
    window: int
    hop: int
    bins: int


def video_vae_kwargs(file: Checkpoint) -> dict[str, Any]:
    """Returns the constructor arguments of AutoencoderKLLTX2Video; raises ValueError for a layout it cannot express.

    For a file with a diffusion decoder only the encoder's are given: the decoder is another class, see diffusion_vae.
    """
    if has_diffusion_decoder(file):
        return _diffusion_encoder_kwargs(file)
    section = file.config_section("vae")
    warn_unknown(file, "vae", section, _VIDEO_KEYS)
    require(section, _VIDEO_CONSTANTS, f"{file.path}: vae")
    decoder = _levels(file, "decoder_blocks", section.get("decoder_blocks"), "", multiplier=1)
    if any(level.inject_noise for level in decoder):
        raise ValueError(f"{file.path}: the video decoder's blocks draw noise (inject_noise), which is not supported.")
    frames, side, _ = scale_factors(file)
    padding = section.get("spatial_padding_mode")
    return {
        **_encoder_kwargs(file, section, "encoder_blocks", section.get("latent_channels", 128)),
        **_decoder_kwargs(decoder, section.get("decoder_base_channels", 128)),
        "out_channels": section.get("out_channels", 3),
        "decoder_causal": section.get("causal_decoder", False),
        "timestep_conditioning": section.get("timestep_conditioning", True),
        # A present spatial_padding_mode rules both sides.
        "encoder_spatial_padding_mode": padding or section.get("encoder_spatial_padding_mode", "zeros"),
        "decoder_spatial_padding_mode": padding or "reflect",
        "spatial_compression_ratio": side,
        "temporal_compression_ratio": frames,
    }


def encoded_channels(file: Checkpoint) -> int:
    """Returns how many channels the video encoder puts out: the latent's means, and what it says of their variance."""
    section = file.config_section("vae")
    if has_diffusion_decoder(file):
        section = _encoder_section(file, section)
        latent = section.get("out_channels", 128)
    else:
        latent = section.get("latent_channels", 128)
    kind = section.get("latent_log_var", "uniform")
    extra = {"uniform": 1, "constant": 1, "per_channel": latent, "none": 0}
    if kind not in extra:
        raise ValueError(f"{file.path}: vae latent_log_var is {kind!r}, but only {', '.join(extra)} are supported.")
    return latent + extra[kind]


def scale_factors(file: Checkpoint) -> tuple[int, int, int]:
    """Returns how many (frames, rows, columns) one latent cell stands for, from the decoder's layout.

    The published (8, 32, 32) for a file that tells no such layout.
    """
    section = file.config.get("vae") or {}
    if has_diffusion_decoder(file):
        is_told = isinstance(section.get("decoder"), dict)
        return diffusion_scale_factors(diffusion_decoder_kwargs(file)) if is_told else PUBLISHED_SCALE_FACTORS
    if "decoder_blocks" not in section:
        return PUBLISHED_SCALE_FACTORS
    levels = _levels(file, "decoder_blocks", section["decoder_blocks"], "", multiplier=1)
    kinds = [level.resampler for level in levels]
    space = section.get("patch_size", 4) * 2 ** (kinds.count("spatial") + kinds.count("spatiotemporal"))
    return 2 ** (kinds.count("temporal") + kinds.count("spatiotemporal")), space, space


def decode_min_cells(file: Checkpoint) -> int:
    """Returns the smallest side, in latent cells, of a tile that the video decoder can take.

    A decoder that pads by reflection needs two cells; a diffusion decoder the width of its attention windows, though
    it pads a whole clip that is smaller. 1 where the file has no video autoencoder.
    """
    section = file.config.get("vae") or {}
    if "video_vae" not in file.components:
        return 1
    if has_diffusion_decoder(file):
        is_told = isinstance(section.get("decoder"), dict)
        return max(diffusion_min_grid(diffusion_decoder_kwargs(file))[1:]) if is_told else 1
    return 2 if (section.get("spatial_padding_mode") or "reflect") == "reflect" else 1


def audio_vae_kwargs(file: Checkpoint) -> dict[str, Any]:
    """Returns the constructor arguments of AutoencoderKLLTX2Audio."""
    section = file.config_section("audio_vae")
    params = section.get("model", {}).get("params", {})
    net = params.get("ddconfig")
    if net is None:
        raise ValueError(f"{file.path}: the config has no audio_vae.model.params.ddconfig. Choose the original file.")
    where = f"{file.path}: audio_vae ddconfig"
    names = {"ch", "out_ch", "in_channels", "ch_mult", "num_res_blocks", "attn_resolutions", "resolution"}
    names |= {"z_channels", "double_z", "norm_type", "causality_axis", "dropout", "mid_block_add_attention", "mel_bins"}
    warn_unknown(file, "audio_vae ddconfig", net, names)
    mel_bins, latent = net.get("mel_bins", 64), net.get("z_channels", 8)
    channels, multipliers = net.get("ch", 128), net.get("ch_mult", [1, 2, 4])
    if 2 ** (len(multipliers) - 1) != _LATENT_MEL_FACTOR:
        raise ValueError(f"{where} has {len(multipliers)} levels (ch_mult {multipliers}), but only 3 are supported.")
    if channels * _LATENT_MEL_FACTOR != latent * mel_bins:
        raise ValueError(
            f"{where}: ch is {channels}, but the latent statistics need z_channels * mel_bins / 4 = "
            f"{latent * mel_bins // _LATENT_MEL_FACTOR}."
        )
    return {
        "base_channels": channels,
        "output_channels": net.get("out_ch", 2),
        "in_channels": net.get("in_channels", 2),
        "ch_mult": tuple(multipliers),
        "num_res_blocks": net.get("num_res_blocks", 2),
        # These two official defaults differ from what every published file says.
        "attn_resolutions": tuple(net.get("attn_resolutions", (8, 16, 32))) or None,
        "mid_block_add_attention": net.get("mid_block_add_attention", True),
        "resolution": net.get("resolution", 256),
        "latent_channels": latent,
        "double_z": net.get("double_z", True),
        "norm_type": net.get("norm_type", "pixel"),
        "causality_axis": net.get("causality_axis", "height"),
        "dropout": net.get("dropout", 0.0),
        "mel_bins": mel_bins,
        "sample_rate": params.get("sampling_rate", 16000),
        "mel_hop_length": section.get("preprocessing", {}).get("stft", {}).get("hop_length", 160),
        "is_causal": section.get("preprocessing", {}).get("stft", {}).get("causal", True),
    }


def mel_layout(file: Checkpoint) -> MelLayout:
    """Returns how sound must be turned into a spectrogram for this file's audio autoencoder."""
    kwargs = audio_vae_kwargs(file)
    window = file.config_section("audio_vae").get("preprocessing", {}).get("stft", {}).get("filter_length", 1024)
    return MelLayout(kwargs["sample_rate"], window, kwargs["mel_hop_length"], kwargs["mel_bins"])


def has_bandwidth_extension(file: Checkpoint) -> bool:
    """Tells LTX-2.3's two-stage vocoder (16 to 48 kHz) from LTX-2.0's plain one."""
    return "bwe" in file.config_section("vocoder")


def vocoder_kwargs(file: Checkpoint) -> dict[str, Any]:
    """Returns the constructor arguments of LTX2VocoderWithBWE or LTX2Vocoder, see has_bandwidth_extension."""
    section = file.config_section("vocoder")
    if "bwe" not in section:
        kwargs = _generator_kwargs(file, "vocoder", section, bounded=True)
        return {**kwargs, "output_sampling_rate": section.get("output_sampling_rate", 24000)}
    bwe = section["bwe"]
    # Officially the first generator's sound is clamped to -1..1 and the extension's is not.
    first = _generator_kwargs(file, "vocoder.vocoder", section.get("vocoder", {}), bounded=True)
    second = _generator_kwargs(file, "vocoder.bwe", bwe, bounded=False)
    window = bwe.get("n_fft", 512)
    return {
        **first,
        **{f"bwe_{name}": value for name, value in second.items()},
        "filter_length": window,
        "window_length": window,
        "hop_length": bwe.get("hop_length", 80),
        "num_mel_channels": bwe.get("num_mels", 64),
        "input_sampling_rate": bwe.get("input_sampling_rate", 16000),
        "output_sampling_rate": bwe.get("output_sampling_rate", 48000),
    }


def vocoder_sample_rate(file: Checkpoint) -> int:
    """Returns the samples per second of the finished sound."""
    return vocoder_kwargs(file)["output_sampling_rate"]


def upsampler_kwargs(file: Checkpoint) -> dict[str, Any]:
    """Returns the constructor arguments of LTX2LatentUpsamplerModel; the fields are at the top of the config."""
    config = file.config
    defaults = {
        "in_channels": 128,
        "mid_channels": 512,
        "num_blocks_per_stage": 4,
        "dims": 3,
        "spatial_upsample": True,
        "temporal_upsample": False,
    }
    warn_unknown(file, "top level", config, {*defaults, "spatial_scale", "rational_resampler"})
    return {
        **{name: config.get(name, default) for name, default in defaults.items()},
        "rational_spatial_scale": config.get("spatial_scale", 2.0),
        "use_rational_resampler": config.get("rational_resampler", False),
    }


def _diffusion_encoder_kwargs(file: Checkpoint) -> dict[str, Any]:
    """Returns the encoder's arguments of a file with a diffusion decoder, and checks the decoder's."""
    section = file.config_section("vae")
    decoder = diffusion_decoder_kwargs(file)
    encoder = _encoder_section(file, section)
    warn_unknown(file, "vae.encoder", encoder, _ENCODER_KEYS)
    require({**section, **encoder}, _VIDEO_CONSTANTS, f"{file.path}: vae.encoder")
    blocks = "blocks" if "blocks" in encoder else "encoder_blocks"
    latent = encoder.get("out_channels", decoder["latent_channels"])
    if latent != decoder["latent_channels"]:
        raise ValueError(
            f"{file.path}: the video encoder makes latents of {latent} channels, the decoder takes "
            f"{decoder['latent_channels']}. The config does not fit itself."
        )
    padding = encoder.get("spatial_padding_mode", section.get("encoder_spatial_padding_mode", "zeros"))
    return {
        **_encoder_kwargs(file, encoder, blocks, latent),
        "encoder_spatial_padding_mode": padding,
        "spatial_compression_ratio": decoder["spatial_compression_ratio"],
        "temporal_compression_ratio": decoder["temporal_compression_ratio"],
    }


def _encoder_section(file: Checkpoint, section: Section) -> Section:
    """Returns the `encoder` part of the vae section of a file with a diffusion decoder."""
    encoder = section.get("encoder")
    if not isinstance(encoder, dict):
        raise ValueError(f"{file.path} has no vae.encoder section in its config. Choose the original file.")
    return encoder


def _levels(file: Checkpoint, key: str, blocks: list | None, suffix: str, *, multiplier: int) -> list[_Level]:
    """Reads a block list (res_x, compress_*, res_x, ... res_x) as levels, in the order of the file."""
    blocks = blocks or []
    names = [block[0] for block in blocks]
    expected = [name in ("res_x", *(kind + suffix for kind in _RESAMPLERS)) for name in names]
    alternates = len(names) % 2 == 1 and all((name == "res_x") == (i % 2 == 0) for i, name in enumerate(names))
    if not alternates or not all(expected):
        raise ValueError(
            f"{file.path}: vae.{key} is {names}, but only res_x and compress_*{suffix} in turn are supported."
        )
    # a number alone is the number of layers
    blocks = [(name, {"num_layers": options} if isinstance(options, int) else options) for name, options in blocks]
    levels = []
    for (_, layers), (name, resample) in zip(blocks[::2], [*blocks[1::2], (None, {})], strict=True):
        warn_unknown(file, f"vae.{key}", layers, {"num_layers", "inject_noise"})
        warn_unknown(file, f"vae.{key}", resample, {"multiplier", "residual"})
        levels.append(
            _Level(
                num_layers=layers.get("num_layers", 1),
                inject_noise=layers.get("inject_noise", False),
                resampler=None if name is None else _RESAMPLERS[name.removesuffix(suffix)],
                multiplier=resample.get("multiplier", multiplier),
                # Only compress_all honours the key.
                residual=name == "compress_all" and resample.get("residual", False),
            )
        )
    return levels


def _encoder_kwargs(file: Checkpoint, section: Section, key: str, latent_channels: int) -> dict[str, Any]:
    """Returns the encoder's arguments, lists pixel end first; its first level is as wide as the latent."""
    levels = _levels(file, key, section.get(key), "_res", multiplier=2)
    resamplers = levels[:-1]
    widths = [latent_channels * prod(level.multiplier for level in resamplers[: i + 1]) for i in range(len(resamplers))]
    return {
        "in_channels": section.get("in_channels", 3),
        "latent_channels": latent_channels,
        "patch_size": section.get("patch_size", 4),
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


def _generator_kwargs(file: Checkpoint, part: str, section: Section, *, bounded: bool) -> dict[str, Any]:
    """Returns the arguments of one waveform generator; `bounded` clamps to -1..1 where there is no tanh."""
    where = f"{file.path}: {part}"
    kind = section.get("resblock", "1")
    if kind not in ("1", "AMP1"):
        raise ValueError(f"{where}.resblock is {kind!r}, but only '1' and 'AMP1' are supported.")
    require(section, {"stereo": True, **({"activation": "snakebeta"} if kind == "AMP1" else {})}, where)
    known = {"resblock", "stereo", "activation", "upsample_rates", "upsample_kernel_sizes", "resblock_kernel_sizes"}
    known |= {"resblock_dilation_sizes", "upsample_initial_channel", "use_tanh_at_final", "use_bias_at_final"}
    known |= {"input_sampling_rate", "output_sampling_rate", "n_fft", "hop_length", "num_mels"}
    known |= {"win_size", "apply_final_activation"}  # present in files, officially ignored
    warn_unknown(file, part, section, known)
    unbounded = "clamp" if bounded else None
    return {
        "in_channels": 128,
        "out_channels": 2,
        "hidden_channels": section.get("upsample_initial_channel", 1024),
        "upsample_factors": section.get("upsample_rates", [6, 5, 2, 2, 2]),
        "upsample_kernel_sizes": section.get("upsample_kernel_sizes", [16, 15, 8, 4, 4]),
        "resnet_kernel_sizes": section.get("resblock_kernel_sizes", [3, 7, 11]),
        "resnet_dilations": section.get("resblock_dilation_sizes", [[1, 3, 5]] * 3),
        "act_fn": "leaky_relu" if kind == "1" else "snakebeta",
        "antialias": kind == "AMP1",
        "final_act_fn": "tanh" if section.get("use_tanh_at_final", True) else unbounded,
        "final_bias": section.get("use_bias_at_final", True),
    }
