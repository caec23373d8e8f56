"""Maps Lightricks' tensor names to the names of the `diffusers` modules, component by component.

Pure functions of names. The tables follow the layouts of the published LTX-2.0, 2.3 and 2.5 files.
"""

import re
from collections.abc import Callable, Iterable

# Component -> how a sentence calls it.
COMPONENTS = {
    "transformer": "transformer",
    "connectors": "text connectors",
    "video_vae": "video autoencoder",
    "audio_vae": "audio autoencoder",
    "vocoder": "vocoder",
    "upsampler": "latent upsampler",
}

TRANSFORMER_PREFIX = "model.diffusion_model."

_PREFIXES = {"vae.": "video_vae", "audio_vae.": "audio_vae", "vocoder.": "vocoder"}
_CONNECTOR_ROOTS = ("text_embedding_projection", "video_embeddings_connector", "audio_embeddings_connector")
_UPSAMPLER_ROOTS = (
    "initial_conv",
    "initial_norm",
    "res_blocks",
    "upsampler",
    "post_upsample_res_blocks",
    "final_conv",
)

# First part of a transformer tensor's name, original -> diffusers.
_TRANSFORMER_ROOTS = {
    "patchify_proj": "proj_in",
    "audio_patchify_proj": "audio_proj_in",
    "adaln_single": "time_embed",
    "audio_adaln_single": "audio_time_embed",
    "prompt_adaln_single": "prompt_adaln",
    "audio_prompt_adaln_single": "audio_prompt_adaln",
    "av_ca_video_scale_shift_adaln_single": "av_cross_attn_video_scale_shift",
    "av_ca_audio_scale_shift_adaln_single": "av_cross_attn_audio_scale_shift",
    "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
    "av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
    "caption_projection": "caption_projection",
    "audio_caption_projection": "audio_caption_projection",
    "scale_shift_table": "scale_shift_table",
    "audio_scale_shift_table": "audio_scale_shift_table",
    "proj_out": "proj_out",
    "audio_proj_out": "audio_proj_out",
    "keyframes_abs_pos_embedding": "keyframes_abs_pos_embedding",
    "transformer_blocks": "transformer_blocks",
}

# Parts inside a transformer block or a connector block, original -> diffusers.
_BLOCK_PARTS = {
    "q_norm": "norm_q",
    "k_norm": "norm_k",
    "scale_shift_table_a2v_ca_video": "video_a2v_cross_attn_scale_shift_table",
    "scale_shift_table_a2v_ca_audio": "audio_a2v_cross_attn_scale_shift_table",
}

_STATISTICS = {
    "per_channel_statistics.mean-of-means": "latents_mean",
    "per_channel_statistics.std-of-means": "latents_std",
    "per_channel_statistics.channel": None,
    "per_channel_statistics.mean-of-stds": None,
    "per_channel_statistics.mean-of-stds_over_std-of-means": None,
}


def map_key(name: str, *, encoder_levels: int = 4) -> tuple[str | None, str | None]:
    """Returns (component, the module's tensor name) for a tensor name of a file.

    The component is None for a tensor of nothing known; the name is None for one that is known and not needed.
    `encoder_levels` is how often the video encoder downsamples, see count_encoder_levels.
    """
    component, rest = _split(name)
    if component is None:
        return None, None
    if component == "video_vae":
        rest = rest.replace(f"encoder.down_blocks.{2 * encoder_levels}.", "encoder.mid_block.")
    return component, _RULES[component](rest)


def count_encoder_levels(names: Iterable[str]) -> int:
    """Counts the downsamplers of the video encoder: the odd blocks, which always have tensors."""
    blocks = (re.match(r"vae\.encoder\.down_blocks\.(\d*[13579])\.", name) for name in names)
    return len({block[1] for block in blocks if block})


def _split(name: str) -> tuple[str | None, str]:
    """Finds the component a tensor belongs to and strips its prefix."""
    inside = name.removeprefix(TRANSFORMER_PREFIX)
    root = inside.split(".", 1)[0]
    if root in _CONNECTOR_ROOTS:
        return "connectors", inside
    if inside != name or root in _TRANSFORMER_ROOTS:
        return "transformer", inside
    for prefix, component in _PREFIXES.items():
        if name.startswith(prefix):
            return component, name[len(prefix) :]  # one prefix only: 2.3 has vocoder.vocoder.*
    return ("upsampler", name) if root in _UPSAMPLER_ROOTS else (None, name)


def _transformer(name: str) -> str:
    root, *parts = name.split(".")
    return ".".join([_TRANSFORMER_ROOTS.get(root, root), *(_BLOCK_PARTS.get(part, part) for part in parts)])


def _connectors(name: str) -> str:
    root, *parts = name.split(".")
    if root == "text_embedding_projection":
        projection = parts[0].replace("aggregate_embed", "text_proj_in")  # video_, audio_ or neither in front
        return ".".join([projection, *parts[1:]])
    renamed = {**_BLOCK_PARTS, "transformer_1d_blocks": "transformer_blocks"}
    return ".".join([root.replace("_embeddings", ""), *(renamed.get(part, part) for part in parts)])


def _video_vae(name: str) -> str | None:
    name = _STATISTICS.get(name, name)
    if name is None:
        return None
    name = name.replace(".res_blocks.", ".resnets.")
    return re.sub(r"^(encoder\.down|decoder\.up)_blocks\.(\d+)\.", _video_vae_level, name)


def _video_vae_level(match: re.Match[str]) -> str:
    """Renames a block: even positions are levels, odd ones the resamplers between them."""
    side, position = match[1], int(match[2])
    level, is_resampler = divmod(position, 2)
    if side == "encoder.down":
        return f"encoder.down_blocks.{level}.{'downsamplers.0.' if is_resampler else ''}"
    if position == 0:
        return "decoder.mid_block."
    return f"decoder.up_blocks.{level}.upsamplers.0." if is_resampler else f"decoder.up_blocks.{level - 1}."


def _audio_vae(name: str) -> str | None:
    return _STATISTICS.get(name, name)


def _vocoder(name: str) -> str:
    renamed = {
        "conv_pre": "conv_in",
        "conv_post": "conv_out",
        "ups": "upsamplers",
        "resblocks": "resnets",
        "act_post": "act_out",
    }
    name = ".".join(renamed.get(part, part) for part in name.split("."))
    return name.replace(".downsample.lowpass.filter", ".downsample.filter")


def _upsampler(name: str) -> str:
    return name


_RULES: dict[str, Callable[[str], str | None]] = {
    "transformer": _transformer,
    "connectors": _connectors,
    "video_vae": _video_vae,
    "audio_vae": _audio_vae,
    "vocoder": _vocoder,
    "upsampler": _upsampler,
}
