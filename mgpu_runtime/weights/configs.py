"""Turns the `config` of a checkpoint into constructor arguments of the `diffusers` transformer and text connectors.

Architecture comes from the config alone, never from `model_version`. The autoencoders: vae_configs and audio_configs.
"""

from collections.abc import Mapping
from typing import Any

from .bundle import Checkpoint
from .inferred import SECOND_EXTRACTOR
from .sections import Section, filled

# Keys that describe training or bookkeeping and change nothing here; the official code ignores them too.
BOOKKEEPING = {
    "_class_name",
    "_diffusers_version",
    "_name_or_path",
    "norm_num_groups",
    "attention_type",
    "causal_temporal_positioning",
    "use_embeddings_connector",
    "connector_norm_output",
    "connector_learnable_registers_std",
    "connector_num_learnable_registers",
    "text_encoder_norm_type",
}

# What every LTX-2 transformer has in common; another value is another architecture.
_CONSTANTS = {
    "dropout": 0.0,
    "attention_bias": True,
    "num_vector_embeds": None,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "use_linear_projection": False,
    "only_cross_attention": False,
    "cross_attention_norm": True,
    "double_self_attention": False,
    "upcast_attention": False,
    "standardization_norm": "rms_norm",
    "norm_elementwise_affine": False,
    "qk_norm": "rms_norm",
    "positional_embedding_type": "rope",
    "use_audio_video_cross_attention": True,
    "share_ff": False,
    "av_cross_ada_norm": True,
    "use_middle_indices_grid": True,
}

# Key -> value when absent, which also says of what kind it must be, see sections.filled.
_TRANSFORMER_DEFAULTS = {
    "num_layers": 48,
    "num_attention_heads": 32,
    "attention_head_dim": 128,
    "in_channels": 128,
    "out_channels": 128,
    "cross_attention_dim": 4096,
    "audio_num_attention_heads": 32,
    "audio_attention_head_dim": 64,
    "audio_in_channels": 128,
    "audio_out_channels": 128,
    "audio_cross_attention_dim": 2048,
    "caption_channels": 3840,
    "apply_gated_attention": False,
    "cross_attention_adaln": False,
    "use_prompt_adaln_single": True,
    "ff_bias": True,
    "audio_ff_bias": True,
    "use_keyframes_abs_pos_embedding": False,
    "rope_type": "split",
    "frequencies_precision": "float32",
    "positional_embedding_theta": 10000.0,
    "positional_embedding_max_pos": (20, 2048, 2048),
    "audio_positional_embedding_max_pos": [20],
    "timestep_scale_multiplier": 1000.0,
    "av_ca_timestep_scale_multiplier": 1.0,
    "norm_eps": 1e-6,
}

_CONNECTOR_DEFAULTS = {
    "connector_num_attention_heads": 30,
    "connector_attention_head_dim": 128,
    "connector_num_layers": 2,
    "connector_positional_embedding_max_pos": [1],
    "connector_apply_gated_attention": False,
    "connector_ff_bias": True,
}
_AUDIO_CONNECTOR_KEYS = {
    "audio_connector_num_attention_heads": "connector_num_attention_heads",
    "audio_connector_attention_head_dim": "connector_attention_head_dim",
    "audio_connector_num_layers": "connector_num_layers",
}

NUM_REGISTERS = 128  # always, whatever the config says


def transformer_values(file: Checkpoint) -> dict[str, Any]:
    """Returns the config's transformer section with defaults filled in; raises ValueError for what LTX-2 is not."""
    section = file.config_section("transformer")
    known = {
        *_CONSTANTS,
        *_TRANSFORMER_DEFAULTS,
        *_CONNECTOR_DEFAULTS,
        *_AUDIO_CONNECTOR_KEYS,
        *SECOND_EXTRACTOR,
    }
    warn_unknown(file, "transformer", section, known)
    require(section, _CONSTANTS, f"{file.path}: transformer")
    values = filled(file, "transformer", section, {**_TRANSFORMER_DEFAULTS, **_CONNECTOR_DEFAULTS})
    values |= filled(file, "transformer", section, {key: values[name] for key, name in _AUDIO_CONNECTOR_KEYS.items()})
    values["uses_second_extractor"] = _uses_second_extractor(section, file.path)
    _check_widths(values, file.path)
    return values


def is_from_2_5(values: Section) -> bool:
    """Tells the architecture of LTX-2.5 and later by transformer_values."""
    return bool(values["use_keyframes_abs_pos_embedding"] or not values["ff_bias"])


def transformer_kwargs(file: Checkpoint) -> dict[str, Any]:
    """Returns the constructor arguments of LTX2VideoTransformer3DModel, which LTXTransformer shares."""
    values = transformer_values(file)
    names = (
        "num_layers num_attention_heads attention_head_dim in_channels out_channels cross_attention_dim "
        "audio_num_attention_heads audio_attention_head_dim audio_in_channels audio_out_channels "
        "audio_cross_attention_dim caption_channels norm_eps rope_type timestep_scale_multiplier "
        "ff_bias audio_ff_bias use_prompt_adaln_single use_keyframes_abs_pos_embedding"
    ).split()
    frames, height, width = values["positional_embedding_max_pos"]
    return {
        **{name: values[name] for name in names},
        "gated_attn": values["apply_gated_attention"],
        "audio_gated_attn": values["apply_gated_attention"],
        "cross_attn_mod": values["cross_attention_adaln"],
        "audio_cross_attn_mod": values["cross_attention_adaln"],
        "use_prompt_embeddings": not values["uses_second_extractor"],
        "rope_theta": values["positional_embedding_theta"],
        "rope_double_precision": values["frequencies_precision"] == "float64",
        "cross_attn_timestep_scale_multiplier": values["av_ca_timestep_scale_multiplier"],
        "pos_embed_max_pos": frames,
        "base_height": height,
        "base_width": width,
        "audio_pos_embed_max_pos": values["audio_positional_embedding_max_pos"][0],
        "qk_norm": "rms_norm_across_heads",
    }


def connectors_kwargs(file: Checkpoint) -> dict[str, Any]:
    """Returns the constructor arguments of LTX2TextConnectors; the width of the text states comes from the tensors."""
    values = transformer_values(file)
    second = values["uses_second_extractor"]
    hidden_size, num_states = text_projection_input(file)
    return {
        "caption_channels": hidden_size,
        "text_proj_in_factor": num_states,
        "video_connector_num_attention_heads": values["connector_num_attention_heads"],
        "video_connector_attention_head_dim": values["connector_attention_head_dim"],
        "video_connector_num_layers": values["connector_num_layers"],
        "video_connector_num_learnable_registers": NUM_REGISTERS,
        "video_gated_attn": values["connector_apply_gated_attention"],
        "audio_connector_num_attention_heads": values["audio_connector_num_attention_heads"],
        "audio_connector_attention_head_dim": values["audio_connector_attention_head_dim"],
        "audio_connector_num_layers": values["audio_connector_num_layers"],
        "audio_connector_num_learnable_registers": NUM_REGISTERS,
        "audio_gated_attn": values["connector_apply_gated_attention"],
        "connector_rope_base_seq_len": values["connector_positional_embedding_max_pos"][0],
        "rope_theta": values["positional_embedding_theta"],
        "rope_double_precision": values["frequencies_precision"] == "float64",
        "rope_type": values["rope_type"],
        "per_modality_projections": second,
        "proj_bias": second,
        "video_hidden_dim": values["connector_num_attention_heads"] * values["connector_attention_head_dim"],
        "audio_hidden_dim": values["audio_connector_num_attention_heads"]
        * values["audio_connector_attention_head_dim"],
    }


def text_projection_input(file: Checkpoint) -> tuple[int, int]:
    """Returns (hidden size, number of states) of the text encoder the file was made for: (3840, 49) for Gemma 3 12B.

    Raises ValueError when the file has no text projection.
    """
    values = transformer_values(file)
    shape = file.shapes("connectors").get(_projection_name(values))
    if shape is None or len(shape) != 2:
        raise ValueError(
            f"{file.path} has text connectors but no text projection (text_embedding_projection.*). Choose a file with "
            "it as text_projection in Load LTX MGPU, or for LTX-2.5 the text encoder file that holds it."
        )
    hidden_size = values["caption_channels"]
    num_states, rest = divmod(shape[1], hidden_size)
    if rest or not num_states:
        raise ValueError(
            f"{file.path}: the text projection takes {shape[1]} numbers, which is no multiple of caption_channels "
            f"{hidden_size}. The config does not fit the tensors."
        )
    return hidden_size, num_states


def has_text_projection(file: Checkpoint) -> bool:
    """Tells whether the file holds the text projection; LTX-2.5 may keep it in the text encoder's file."""
    return _projection_name(transformer_values(file)) in file.components.get("connectors", {})


def _projection_name(values: Section) -> str:
    return "video_text_proj_in.weight" if values["uses_second_extractor"] else "text_proj_in.weight"


def warn_unknown(file: Checkpoint, where: str, section: Section, known: set[str] | Mapping[str, Any]) -> None:
    """Warns by name about config keys this program does not know, and so does not follow."""
    unknown = sorted(set(section) - set(known) - BOOKKEEPING)
    if unknown:
        file.warn(f"unknown keys in the config ({where}) are not followed: {', '.join(unknown)}.")


def require(section: Section, constants: Section, where: str) -> None:
    """Raises ValueError for the first constant that is present with another value."""
    for key, expected in constants.items():
        if key in section and section[key] != expected:
            raise ValueError(
                f"{where}.{key} is {section[key]!r}, but only {expected!r} is supported. "
                "The file needs a newer version of this program, or is no LTX-2 checkpoint."
            )


def _uses_second_extractor(section: Section, path: str) -> bool:
    """Tells LTX-2.3's text side from LTX-2.0's; raises ValueError for anything between."""
    given = {key: section[key] for key in SECOND_EXTRACTOR if key in section}
    if given and given != SECOND_EXTRACTOR:
        raise ValueError(
            f"{path}: the text side {given} is neither LTX-2.0's (none of these keys) nor LTX-2.3's "
            f"({SECOND_EXTRACTOR}). The file needs a newer version of this program."
        )
    return bool(given)


def _check_widths(values: Section, path: str) -> None:
    """Checks the numbers that must agree between the two streams."""
    heads, audio_heads = values["num_attention_heads"], values["audio_num_attention_heads"]
    if heads != audio_heads:
        raise ValueError(f"{path}: video has {heads} attention heads and audio {audio_heads}; LTX-2 needs them equal.")
    audio_width = audio_heads * values["audio_attention_head_dim"]
    if values["audio_cross_attention_dim"] != audio_width:
        raise ValueError(
            f"{path}: audio_cross_attention_dim is {values['audio_cross_attention_dim']}, but the audio stream is "
            f"{audio_width} wide; LTX-2 needs them equal."
        )
