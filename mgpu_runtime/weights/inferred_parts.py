"""The configs of the published autoencoders, vocoders, upsamplers and duration head, recognised by their shapes.

See inferred. Every function takes {the module's tensor name: shape} of one component and returns its section of the
config and the version whose file says so; it raises ValueError with the telling shapes when no published file has them.
"""

import re
from collections.abc import Mapping
from math import isqrt
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]

_COMPRESSION = {4: "compress_space", 2: "compress_time", 8: "compress_all"}  # what a resampler folds into channels
_ALL, _SPACE, _TIME = "compress_all", "compress_space", "compress_time"

# Kinds of the decoder's resamplers, pixel end first -> version, and what no shape shows.
_DECODERS: dict[tuple[str, ...], tuple[str, dict[str, Any], dict[str, Any]]] = {
    (_ALL, _ALL, _ALL): ("2.0", {}, {"residual": True}),
    (_SPACE, _TIME, _ALL, _ALL): ("2.3", {"spatial_padding_mode": "zeros"}, {}),
}
_ENCODER_KINDS = [_SPACE, _TIME, _ALL, _ALL]

_DIFFUSION_DECODER = {
    "stage_channels": [2048, 1024, 512, 512, 256],
    "stage_depths": [4, 6, 4, 2, 8],
    "stage_kernels": [[3, 7, 7], [3, 7, 7], [3, 5, 5], [3, 5, 5], [11, 11, 11]],
    "stage5_kernel": [11, 11, 11],
    "upsamples": [[[1, 2, 2], 2], [[2, 1, 1], 2], [[2, 2, 2], 1], [[2, 2, 2], 2]],
    "head_dim": 64,
    "t_emb_dim": 384,
    "timestep_scale_multiplier": 1000.0,
    "default_num_inference_steps": 1,
    "patch_size": 4,
    "in_channels": 128,
    "out_channels": 3,
}

# Kernels of a generator's upsamplers -> their rates, which no shape shows.
_VOCODER_RATES = {
    (16, 15, 8, 4, 4): [6, 5, 2, 2, 2],
    (11, 4, 4, 4, 4, 4): [5, 2, 2, 2, 2, 2],
    (12, 11, 4, 4, 4): [6, 5, 2, 2, 2],
}
_AMPLIFIER = {"resblock": "AMP1", "activation": "snakebeta", "use_tanh_at_final": False, "use_bias_at_final": False}
_SHUFFLE_SCALES = {2: 2.0, 3: 1.5}  # numerator of the rational resampler -> published factor


def shape_of(shapes: Shapes, name: str) -> tuple[int, ...]:
    """Returns a tensor's shape; raises ValueError when there is none of that name, or it holds nothing."""
    if name not in shapes:
        raise ValueError(f"no tensor {name}")
    if 0 in shapes[name]:
        raise ValueError(f"a tensor {name} of shape {list(shapes[name])}")
    return shapes[name]


def size_of(shapes: Shapes, name: str, axis: int) -> int:
    """Returns one size of a tensor; raises ValueError as shape_of, and when it has no such axis."""
    shape = shape_of(shapes, name)
    if axis >= len(shape):
        raise ValueError(f"a tensor {name} of shape {list(shape)}")
    return shape[axis]


def matrix_shape(shapes: Shapes, name: str) -> tuple[int, int]:
    """Returns the two sizes of a matrix; raises ValueError as shape_of, and when it is none."""
    if len(shape_of(shapes, name)) != 2:
        raise ValueError(f"a tensor {name} of shape {list(shapes[name])}")
    return shapes[name][0], shapes[name][1]


def count(shapes: Shapes, pattern: str) -> int:
    """Counts the different numbers that a pattern's group finds at the start of the names."""
    return len({match[1] for match in (re.match(pattern, name) for name in shapes) if match})


def video_vae_section(shapes: Shapes) -> tuple[dict[str, Any], str]:
    """Returns the config of the convolutional autoencoder of 2.0 or 2.3, or of 2.5's with the diffusion decoder."""
    latent = size_of(shapes, "latents_mean", 0)
    if "decoder.conv_in_x_t.weight" in shapes:
        encoder = {**_encoder(shapes), "out_channels": latent, "latent_log_var": "constant", "patch_size": 4}
        encoder["blocks"] = encoder.pop("encoder_blocks")
        decoder = _diffusion_decoder(shapes)
        kind = {"_class_name": "CausalDiffusionVAE", "model_output_type": "x0"}
        return {**kind, "encoder": encoder, "decoder": decoder}, "2.5"
    blocks, base = _decoder(shapes)
    version, extra, option = _known_decoder(blocks)
    section = {
        "_class_name": "CausalVideoAutoencoder",
        "latent_channels": latent,
        "patch_size": isqrt(size_of(shapes, "decoder.conv_out.conv.weight", 0) // 3),
        "latent_log_var": "uniform",
        "timestep_conditioning": any(name.startswith("decoder.time_embedder.") for name in shapes),
        "causal_decoder": False,
        "decoder_base_channels": base,
        "decoder_blocks": [[name, {**values, **(option if "multiplier" in values else {})}] for name, values in blocks],
        **extra,
    }
    return {**section, **_encoder(shapes)}, version


def audio_vae_section(shapes: Shapes) -> tuple[dict[str, Any], str]:
    """Returns the config of the audio autoencoder, which is the same in all versions."""
    channels, inputs = (size_of(shapes, "encoder.conv_in.conv.weight", axis) for axis in (0, 1))
    latent = size_of(shapes, "decoder.conv_in.conv.weight", 1)
    levels = count(shapes, r"encoder\.down\.(\d+)\.")
    widths = [size_of(shapes, f"encoder.down.{i}.block.0.conv1.conv.weight", 0) for i in range(levels)]
    if levels != 3 or any(width % channels for width in widths) or any(".attn" in name for name in shapes):
        raise ValueError(f"an audio autoencoder with levels of {widths} channels and a first layer of {channels}")
    net = {
        "ch": channels,
        "ch_mult": [width // channels for width in widths],
        "num_res_blocks": count(shapes, r"encoder\.down\.0\.block\.(\d+)\."),
        "in_channels": inputs,
        "out_ch": size_of(shapes, "decoder.conv_out.conv.weight", 0),
        "z_channels": latent,
        "double_z": size_of(shapes, "encoder.conv_out.conv.weight", 0) == 2 * latent,
        "mel_bins": 4 * channels // latent,
        "attn_resolutions": [],
        "mid_block_add_attention": False,
        "resolution": 256,
        "norm_type": "pixel",
        "causality_axis": "height",
        "dropout": 0.0,
    }
    stft = {"filter_length": 1024, "hop_length": 160, "causal": True}
    params = {"sampling_rate": 16000, "ddconfig": net}
    return {"model": {"params": params}, "preprocessing": {"stft": stft}}, "2"


def vocoder_section(shapes: Shapes) -> tuple[dict[str, Any], str]:
    """Returns the config of 2.0's vocoder, or of 2.3's with bandwidth extension."""
    if not any(name.startswith("bwe_generator.") for name in shapes):
        plain = {"resblock": "1", "output_sampling_rate": 24000, "use_tanh_at_final": True, "use_bias_at_final": True}
        return {**_generator(shapes, "", 24000), **plain}, "2.0"
    extension = {
        **_generator(shapes, "bwe_generator.", 48000),
        **_AMPLIFIER,
        "n_fft": 2 * (size_of(shapes, "mel_stft.mel_basis", 1) - 1),
        "num_mels": size_of(shapes, "mel_stft.mel_basis", 0),
        "hop_length": 80,
        "input_sampling_rate": 16000,
        "output_sampling_rate": 48000,
    }
    return {"vocoder": {**_generator(shapes, "vocoder.", 16000), **_AMPLIFIER}, "bwe": extension}, "2.3"


def upsampler_config(shapes: Shapes) -> tuple[dict[str, Any], str]:
    """Returns the config of a latent upsampler: twice or 1.5 times the sides, or twice the frames."""
    middle, channels = (size_of(shapes, "initial_conv.weight", axis) for axis in (0, 1))
    config = {
        "in_channels": channels,
        "mid_channels": middle,
        "num_blocks_per_stage": count(shapes, r"res_blocks\.(\d+)\."),
        "dims": len(shape_of(shapes, "initial_conv.weight")) - 2,
    }
    if "upsampler.blur_down.kernel" in shapes:
        factor = isqrt(size_of(shapes, "upsampler.conv.weight", 0) // middle)
        if factor not in _SHUFFLE_SCALES:
            raise ValueError(f"an upsampler whose resampler enlarges {factor} times")
        scale = {"spatial_scale": _SHUFFLE_SCALES[factor], "rational_resampler": True}
        return {**config, **scale, "spatial_upsample": True, "temporal_upsample": False}, "2"
    shape = shape_of(shapes, "upsampler.0.weight")
    is_temporal, is_spatial = len(shape) == 5, len(shape) == 4 or shape[:1] == (8 * middle,)
    return {**config, "spatial_upsample": is_spatial, "temporal_upsample": is_temporal}, "2"


def duration_head_section(shapes: Shapes) -> tuple[dict[str, Any], str]:
    """Returns the config of LTX-2.5's duration head."""
    queries, hidden = matrix_shape(shapes, "attention_pooler.query_tokens")
    if hidden % 4:
        raise ValueError(f"a duration head {hidden} wide, which is no multiple of its 4 heads")
    section = {
        "video_cross_attention_dim": size_of(shapes, "video_input_proj.weight", 1),
        "audio_cross_attention_dim": size_of(shapes, "audio_input_proj.weight", 1),
        "pooler_hidden_dim": hidden,
        "num_queries": queries,
        "num_pooler_heads": 4,
        "mlp_hidden": size_of(shapes, "mlp_hidden.weight", 0),
    }
    return section, "2.5"


def _encoder(shapes: Shapes) -> dict[str, Any]:
    """Reads the video encoder's block list, pixel end first; empty where the file has a decoder alone."""
    if "encoder.conv_in.conv.weight" not in shapes:
        return {}
    levels = count(shapes, r"encoder\.down_blocks\.(\d+)\.downsamplers\.")
    stages = [f"encoder.down_blocks.{i}." for i in range(levels)] + ["encoder.mid_block."]
    samplers = [f"encoder.down_blocks.{i}.downsamplers.0.conv.conv.weight" for i in range(levels)]
    widths = _widths(shapes, stages, samplers, size_of(shapes, "encoder.conv_out.conv.weight", 1))
    blocks: list[list[Any]] = []
    for index, stage in enumerate(stages):
        blocks.append(["res_x", {"num_layers": count(shapes, rf"{re.escape(stage)}resnets\.(\d+)\.")}])
        if index < levels:
            kind = _kind(widths[index + 1], size_of(shapes, samplers[index], 0))
            blocks.append([f"{kind}_res", {"multiplier": widths[index + 1] // widths[index]}])
    kinds = [name.removesuffix("_res") for name, _ in blocks[1::2]]
    if kinds != _ENCODER_KINDS:
        raise ValueError(f"a video encoder with {', '.join(kinds)}")
    return {"in_channels": 3, "encoder_blocks": blocks}


def _decoder(shapes: Shapes) -> tuple[list[tuple[str, dict[str, Any]]], int]:
    """Reads the convolutional decoder's block list, pixel end first, and the width at that end."""
    levels = count(shapes, r"decoder\.up_blocks\.(\d+)\.upsamplers\.")
    base = size_of(shapes, "decoder.conv_out.conv.weight", 1)
    stages = ["decoder.mid_block."] + [f"decoder.up_blocks.{i}." for i in range(levels)]
    samplers = [f"decoder.up_blocks.{i}.upsamplers.0.conv.conv.weight" for i in range(levels)]
    widths = _widths(shapes, stages, samplers, base)
    blocks: list[tuple[str, dict[str, Any]]] = []
    for index, stage in enumerate(stages):  # from the latent on
        blocks.append(("res_x", {"num_layers": count(shapes, rf"{re.escape(stage)}resnets\.(\d+)\.")}))
        if index < levels:
            kind = _kind(size_of(shapes, samplers[index], 0), widths[index + 1])
            blocks.append((kind, {"multiplier": widths[index] // widths[index + 1]}))
    return blocks[::-1], base


def _known_decoder(blocks: list[tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Returns version and invisible values of a published decoder; raises ValueError when it is none."""
    kinds = tuple(name for name, _ in blocks[1::2])
    if kinds not in _DECODERS:
        raise ValueError(f"a video decoder with {', '.join(kinds) or 'no upsampler'}")
    return _DECODERS[kinds]


def _diffusion_decoder(shapes: Shapes) -> dict[str, Any]:
    """Returns the published config of the diffusion decoder; raises ValueError when widths or depths are others."""
    stages = count(shapes, r"decoder\.det_stages\.(\d+)\.")
    widths = [size_of(shapes, f"decoder.det_stages.{i}.0.norm1.weight", 0) for i in range(stages)]
    widths.append(size_of(shapes, "decoder.conv_in_x_t.weight", 0))
    depths = [count(shapes, rf"decoder\.det_stages\.{i}\.(\d+)\.") for i in range(stages)]
    depths.append(count(shapes, r"decoder\.diff_blocks\.(\d+)\."))
    if (widths, depths) != (_DIFFUSION_DECODER["stage_channels"], _DIFFUSION_DECODER["stage_depths"]):
        raise ValueError(f"a diffusion decoder with {widths} channels and {depths} blocks")
    return dict(_DIFFUSION_DECODER)


def _widths(shapes: Shapes, stages: list[str], samplers: list[str], last: int) -> list[int]:
    """Returns the channels of each stage: of its first block, or of what follows where it has none."""
    widths = []
    for index, stage in enumerate(stages):
        first = f"{stage}resnets.0.conv1.conv.weight"
        following = size_of(shapes, samplers[index], 1) if index < len(samplers) else last
        widths.append(size_of(shapes, first, 1) if first in shapes else following)
    return widths


def _kind(larger: int, smaller: int) -> str:
    """Names a resampler by how many cells it folds into channels."""
    factor, rest = divmod(larger, smaller)
    if rest or factor not in _COMPRESSION:
        raise ValueError(f"a resampler between {larger} and {smaller} channels")
    return _COMPRESSION[factor]


def _generator(shapes: Shapes, prefix: str, rate: int) -> dict[str, Any]:
    """Reads one waveform generator of the vocoder; `rate` (Hz) names it in an error."""
    levels = count(shapes, rf"{re.escape(prefix)}upsamplers\.(\d+)\.")
    kernels = tuple(size_of(shapes, f"{prefix}upsamplers.{i}.weight", 2) for i in range(levels))
    if kernels not in _VOCODER_RATES:
        raise ValueError(f"a vocoder to {rate} Hz with upsampling kernels {list(kernels)}")
    per_level, rest = divmod(count(shapes, rf"{re.escape(prefix)}resnets\.(\d+)\."), levels)
    sizes = [size_of(shapes, f"{prefix}resnets.{i}.convs1.0.weight", 2) for i in range(per_level)]
    depth = count(shapes, rf"{re.escape(prefix)}resnets\.0\.convs1\.(\d+)\.")
    if rest or depth != 3:
        raise ValueError(f"a vocoder to {rate} Hz with blocks of {depth} convolutions")
    return {
        "stereo": True,
        "upsample_rates": _VOCODER_RATES[kernels],
        "upsample_kernel_sizes": list(kernels),
        "upsample_initial_channel": size_of(shapes, f"{prefix}conv_in.weight", 0),
        "resblock_kernel_sizes": sizes,
        "resblock_dilation_sizes": [[1, 3, 5]] * per_level,
    }
