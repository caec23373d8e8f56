"""Maps the tensor names of Lightricks' files, and of those split out of them, to the names of the `diffusers` modules.

Pure functions of names and shapes. The tables follow the layouts of the published LTX-2.0, 2.3 and 2.5 files.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

# Component -> how a sentence calls it.
COMPONENTS = {
    "transformer": "transformer",
    "connectors": "text connectors",
    "video_vae": "video autoencoder",
    "audio_vae": "audio autoencoder",
    "vocoder": "vocoder",
    "upsampler": "latent upsampler",
    "duration_head": "duration head",
}

# Component -> the input of Load LTX MGPU that names a file with it.
SLOTS = {
    "transformer": "checkpoint",
    "connectors": "text_projection",
    "video_vae": "video_vae",
    "audio_vae": "audio_vae",
    "vocoder": "audio_vae",
    "upsampler": "upsampler",
    "duration_head": "duration_head",
}

TEXT_PROJECTION = "text projection"  # the part of the connectors that may be in a file of its own
TRANSFORMER_PREFIX = "model.diffusion_model."

_INNER_PREFIXES = (TRANSFORMER_PREFIX, "diffusion_model.", "transformer.")  # what may stand before a known root
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
_AUTOENCODER_ROOTS = ("encoder", "decoder", "per_channel_statistics")
_GENERATOR_ROOTS = ("conv_pre", "ups", "resblocks", "conv_post", "act_post")
_EXTENSION_ROOTS = ("bwe_generator", "mel_stft")
_DURATION_ROOTS = (
    "video_input_proj",
    "video_modality_emb",
    "audio_input_proj",
    "audio_modality_emb",
    "attention_pooler",
    "mlp_hidden",
    "mlp_out",
)
FP8_MARKER = "scaled_fp8"  # says of the file's other tensors that they are scaled

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

_VIDEO_PARTS = {
    ".res_blocks.": ".resnets.",
    "decoder.last_time_embedder.": "decoder.time_embedder.",
    "decoder.last_scale_shift_table": "decoder.scale_shift_table",
}

_STATISTICS = {
    "per_channel_statistics.mean-of-means": "latents_mean",
    "per_channel_statistics.std-of-means": "latents_std",
    "per_channel_statistics.channel": None,
    "per_channel_statistics.mean-of-stds": None,
    "per_channel_statistics.mean-of-stds_over_std-of-means": None,
}


@dataclass(frozen=True)
class Naming:
    """How one file names its tensors, where names alone do not tell.

    Attributes:
        encoder_levels: how often the video encoder downsamples.
        autoencoder: the component that names without a prefix (`encoder.*`, `decoder.*`) belong to; None when unknown.
        is_bare_vocoder: whether the two-stage vocoder stands without its prefix, so that `vocoder.*` is its first part.
        has_transformer: whether the file holds a transformer.
    """

    encoder_levels: int = 4
    autoencoder: str | None = None
    is_bare_vocoder: bool = False
    has_transformer: bool = True


def read_naming(shapes: Mapping[str, tuple[int, ...]]) -> Naming:
    """Finds out how a file names its tensors; `shapes` are all of the file's, by its own names."""
    roots = {name.split(".", 1)[0] for name in shapes}
    return Naming(
        encoder_levels=_count_encoder_levels(shapes),
        autoencoder=_bare_autoencoder(shapes) if "per_channel_statistics" in roots else None,
        is_bare_vocoder=bool(roots.intersection(_EXTENSION_ROOTS)),
        has_transformer=any(name.endswith("patchify_proj.weight") for name in shapes),
    )


def map_key(name: str, naming: Naming | None = None) -> tuple[str | None, str | None]:
    """Returns (component, the module's tensor name) for a tensor name of a file.

    The component is None for a tensor of nothing known; the name is None for one that is known and not needed.
    `naming` is what read_naming says of the file; the default is a published file's.
    """
    naming = naming or Naming()
    component, rest = _split(name, naming)
    if component is None:
        return None, None
    if component == "video_vae":
        rest = rest.replace(f"encoder.down_blocks.{2 * naming.encoder_levels}.", "encoder.mid_block.")
    return component, _RULES[component](rest)


def part_of(component: str, target: str) -> str:
    """Names what comes from one file as a whole: a component, but the connectors are two parts."""
    return TEXT_PROJECTION if component == "connectors" and "text_proj_in" in target else component


def part_title(component: str, targets: Iterable[str]) -> str:
    """Says how a sentence calls what a file holds of a component."""
    parts = {part_of(component, target) for target in targets}
    return TEXT_PROJECTION if parts == {TEXT_PROJECTION} else COMPONENTS[component]


def _count_encoder_levels(names: Iterable[str]) -> int:
    """Counts the downsamplers of the video encoder: the odd blocks, which always have tensors."""
    blocks = (re.match(r"(?:vae\.)?encoder\.down_blocks\.(\d*[13579])\.", name) for name in names)
    return len({block[1] for block in blocks if block})


def _bare_autoencoder(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Tells video (convolutions in time) from sound by the first layer of encoder or decoder."""
    first = {name: shape for name, shape in shapes.items() if re.match(r"(en|de)coder\.conv_in[._].*weight$", name)}
    ranks = {len(shape) for shape in first.values()}
    if 5 in ranks or "decoder.conv_in_x_t.weight" in first:  # the latter is the diffusion decoder's
        return "video_vae"
    return "audio_vae" if 4 in ranks else None


def _split(name: str, naming: Naming) -> tuple[str | None, str]:
    """Finds the component a tensor belongs to and strips its prefix."""
    for prefix in _INNER_PREFIXES:
        component, rest = _inner(name.removeprefix(prefix)) if name.startswith(prefix) else (None, name)
        if component is not None:
            return component, rest
    if name.startswith(TRANSFORMER_PREFIX) and naming.has_transformer:
        return "transformer", name.removeprefix(TRANSFORMER_PREFIX)  # an unknown part of it, to be reported as such
    component, rest = _inner(name)
    return (component, rest) if component is not None else _outer(name, naming)


def _inner(name: str) -> tuple[str | None, str]:
    """Finds the component of a tensor that may stand under the transformer's prefix."""
    root, _, rest = name.partition(".")
    if root in _CONNECTOR_ROOTS:
        return "connectors", name
    if root == "duration_head":
        return "duration_head", rest
    if root in _DURATION_ROOTS:
        return "duration_head", name
    return ("transformer", name) if root in _TRANSFORMER_ROOTS else (None, name)


def _outer(name: str, naming: Naming) -> tuple[str | None, str]:
    """Finds the component of a tensor that never stands under the transformer's prefix."""
    root = name.split(".", 1)[0]
    if root in _GENERATOR_ROOTS or root in _EXTENSION_ROOTS or (root == "vocoder" and naming.is_bare_vocoder):
        return "vocoder", name
    for prefix, component in _PREFIXES.items():
        if name.startswith(prefix):
            return component, name[len(prefix) :]  # one prefix only: 2.3 has vocoder.vocoder.*
    if root in _AUTOENCODER_ROOTS and naming.autoencoder is not None:
        return naming.autoencoder, name
    if name == FP8_MARKER and naming.has_transformer:
        return "transformer", name
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
    for part, target in _VIDEO_PARTS.items():
        name = name.replace(part, target)
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


def _duration_head(name: str) -> str:
    """Renames the attention; its fused query, key and value stay one tensor, `attention_pooler.to_qkv.*`."""
    renamed = {"cross_attn.in_proj_": "to_qkv.", "cross_attn.out_proj.": "to_out."}
    for old, new in renamed.items():
        name = name.replace(f"attention_pooler.{old}", f"attention_pooler.{new}")
    return name


_RULES: dict[str, Callable[[str], str | None]] = {
    "transformer": _transformer,
    "connectors": _connectors,
    "video_vae": _video_vae,
    "audio_vae": _audio_vae,
    "vocoder": _vocoder,
    "upsampler": _upsampler,
    "duration_head": _duration_head,
}
