"""The configs of the published models, for files that lost theirs: recognised by the shapes of the tensors.

Sizes are read from the shapes. What no shape shows (the frequencies' precision, the gates' timestep scale, padding,
strides) is what the published file of the same layout says; a layout that no published file has is an error, never a
guess. The config of LTX-2.0, 2.3 and 2.5's transformer is here, those of the other components in inferred_parts.
"""

from collections.abc import Callable, Mapping
from typing import Any

from .inferred_parts import (
    Shapes,
    audio_vae_section,
    count,
    duration_head_section,
    matrix_shape,
    size_of,
    upsampler_config,
    video_vae_section,
    vocoder_section,
)

HEAD_WIDTH, AUDIO_HEAD_WIDTH = 128, 64  # published, where no gate tells how many heads there are

# Same in all published files, and in no shape.
_TRANSFORMER = {
    "rope_type": "split",
    "frequencies_precision": "float64",
    "av_ca_timestep_scale_multiplier": 1000.0,
    "connector_positional_embedding_max_pos": [4096],
    "caption_channels": 3840,
}
# The four keys of the text side: all absent is LTX-2.0's extractor, these values are LTX-2.3's.
SECOND_EXTRACTOR = {
    "caption_proj_before_connector": True,
    "caption_projection_first_linear": False,
    "caption_proj_input_norm": False,
    "caption_projection_second_linear": False,
}

# Version -> (modulation rows, gates, text projection inside, video biases, keyframe embedding).
_TRAITS = {
    "2.0": (6, False, True, True, False),
    "2.3": (9, True, False, True, False),
    "2.5": (9, True, False, False, True),
}


def transformer_section(shapes: Mapping[str, Shapes]) -> tuple[dict[str, Any], str]:
    """Returns the transformer's config, with the connectors' keys, and the version it is of."""
    tensors = shapes["transformer"]
    version = _version(tensors)
    is_gated = version != "2.0"
    width, channels = matrix_shape(tensors, "proj_in.weight")
    audio_width, audio_channels = matrix_shape(tensors, "audio_proj_in.weight")
    block = "transformer_blocks.0."
    heads = _heads(tensors, f"{block}attn1", width, HEAD_WIDTH, is_gated=is_gated)
    audio_heads = _heads(tensors, f"{block}audio_attn1", audio_width, AUDIO_HEAD_WIDTH, is_gated=is_gated)
    section = {
        **_TRANSFORMER,
        **(SECOND_EXTRACTOR if is_gated else {}),
        "num_layers": count(tensors, r"transformer_blocks\.(\d+)\."),
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "in_channels": channels,
        "out_channels": size_of(tensors, "proj_out.weight", 0),
        "cross_attention_dim": width,
        "audio_num_attention_heads": audio_heads,
        "audio_attention_head_dim": audio_width // audio_heads,
        "audio_in_channels": audio_channels,
        "audio_out_channels": size_of(tensors, "audio_proj_out.weight", 0),
        "audio_cross_attention_dim": audio_width,
        "apply_gated_attention": is_gated,
        "cross_attention_adaln": is_gated,
        "use_prompt_adaln_single": "prompt_adaln.linear.weight" in tensors or not is_gated,
        "ff_bias": f"{block}ff.net.2.bias" in tensors,
        "audio_ff_bias": f"{block}audio_ff.net.2.bias" in tensors,
        "use_keyframes_abs_pos_embedding": "keyframes_abs_pos_embedding" in tensors,
    }
    if not is_gated:
        section["caption_channels"] = size_of(tensors, "caption_projection.linear_1.weight", 1)
    return {**section, **_connector_keys(shapes.get("connectors", {}), width, audio_width, is_gated=is_gated)}, version


def _connector_keys(tensors: Shapes, width: int, audio_width: int, *, is_gated: bool) -> dict[str, Any]:
    """Returns the connectors' keys, the published ones where no file holds connectors."""
    has_tensors = any("_connector." in name for name in tensors)
    keys: dict[str, Any] = {"connector_apply_gated_attention": is_gated}
    published = {"video": (width, HEAD_WIDTH), "audio": (audio_width, AUDIO_HEAD_WIDTH)} if is_gated else {}
    for stream, prefix in (("video", "connector"), ("audio", "audio_connector")):
        wide, head_width = published.get(stream, (3840, HEAD_WIDTH))  # 2.0: both as wide as Gemma 3
        layers = 8 if is_gated else 2
        heads = wide // head_width
        if has_tensors:
            root = f"{stream}_connector"
            wide = size_of(tensors, f"{root}.learnable_registers", 1)
            layers = count(tensors, rf"{root}\.transformer_blocks\.(\d+)\.")
            heads = _heads(tensors, f"{root}.transformer_blocks.0.attn1", wide, head_width, is_gated=is_gated)
            keys["connector_ff_bias"] = f"{root}.transformer_blocks.0.ff.net.2.bias" in tensors
        if not heads:
            raise ValueError(f"a transformer {wide} wide, which is less than a head of {head_width} of its connectors")
        keys |= {
            f"{prefix}_num_attention_heads": heads,
            f"{prefix}_attention_head_dim": wide // heads,
            f"{prefix}_num_layers": layers,
        }
    return keys


def _version(tensors: Shapes) -> str:
    """Tells which published transformer this is; raises ValueError with the telling shapes when it is none."""
    block = "transformer_blocks.0."
    traits = (
        size_of(tensors, f"{block}scale_shift_table", 0),
        any(name.startswith(f"{block}attn1.to_gate_logits.") for name in tensors),
        "caption_projection.linear_1.weight" in tensors,
        f"{block}ff.net.2.bias" in tensors,
        "keyframes_abs_pos_embedding" in tensors,
    )
    for version, published in _TRAITS.items():
        if traits == published:
            return version
    rows, *has = traits
    names = ("attention gates", "a caption projection", "feed-forward biases", "a keyframe embedding")
    said = ", ".join(name if there else f"no {name.removeprefix('a ')}" for name, there in zip(names, has, strict=True))
    raise ValueError(f"a transformer with {rows} modulation rows, {said}")


def _heads(tensors: Shapes, attention: str, width: int, head_width: int, *, is_gated: bool) -> int:
    """Returns how many heads an attention has: its gates, else the published width of one."""
    heads, rest = divmod(width, head_width)
    if is_gated:
        heads = size_of(tensors, f"{attention}.to_gate_logits.bias", 0)
        rest = width % heads
    if rest or not heads:
        raise ValueError(f"{attention} is {width} wide, which is no whole number of heads")
    return heads


# Section of the config -> its component and what infers it.
READERS: dict[str, tuple[str, Callable[[Mapping[str, Shapes]], tuple[dict[str, Any], str]]]] = {
    "transformer": ("transformer", transformer_section),
    "vae": ("video_vae", lambda shapes: video_vae_section(shapes["video_vae"])),
    "audio_vae": ("audio_vae", lambda shapes: audio_vae_section(shapes["audio_vae"])),
    "vocoder": ("vocoder", lambda shapes: vocoder_section(shapes["vocoder"])),
    "duration_head": ("duration_head", lambda shapes: duration_head_section(shapes["duration_head"])),
    "upsampler": ("upsampler", lambda shapes: upsampler_config(shapes["upsampler"])),
}
