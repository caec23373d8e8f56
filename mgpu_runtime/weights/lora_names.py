"""The names inside LoRA files, in the dialects of the known trainers. Pure functions of names.

A key is a module's path, with or without a prefix, and a suffix that says which part of the pair it holds.
"""

import re
from typing import Literal

Part = Literal["down", "up", "alpha"]

# In front of a dotted path, one after another in any order.
_PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.", "connectors.")

# In front of a path whose dots became underscores.
_FLAT_PREFIXES = (
    "lora_unet_",
    "lora_transformer_",
    "lora_connectors_",
    "lora_",
    "lycoris_",
    *(prefix.replace(".", "_") for prefix in _PREFIXES),
)

_HALF = re.compile(
    r"(?P<module>.+)\.(?P<half>lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up)"
    r"(?:(?:\.\w+)?\.weight)?"  # the word is the adapter's name, mostly "default"
)
_ALPHA = re.compile(r"(?P<module>.+?)(?:\.lora)?\.alpha")
_PARTS: dict[str, Part] = {
    "lora_A": "down",
    "lora_down": "down",
    "lora.down": "down",
    "lora_B": "up",
    "lora_up": "up",
    "lora.up": "up",
}

# Suffixes of other kinds of adapters -> how a sentence calls the kind.
_OTHER_KINDS = {
    r"\.(dora_scale|lora_magnitude_vector(\.\w+)*)": "a DoRA",
    r"\.hada_\w+(\.weight)?": "a LoHa",
    r"\.lokr_\w+(\.weight)?": "a LoKr",
    r"\.b?oft_\w+(\.weight)?": "an OFT",
    r"\.(diff|diff_b|set_weight|w_norm|b_norm)": "a file of whole weight differences",
    r"\.(lora_mid(\.weight)?|lora_[AB](\.\w+)?\.bias|lora_embedding_[AB](\.\w+)*)": "a LoRA with parts beside A and B",
    r"\.lora[._].*(\.scale_weight|weight_scale)": "a LoRA in scaled 8-bit numbers",
}

# The roots of LTX-2's modules by its own names and by diffusers', dotted or flattened.
_OF_LTX_2 = re.compile(
    r"transformer_blocks[._]\d+[._]((audio_)?(attn[12]|ff)|audio_to_video_attn|video_to_audio_attn)[._]"
    r"|(video|audio)(_embeddings)?_connector[._]|text_embedding_projection[._]|((video|audio)_)?text_proj_in"
    r"|(audio_)?(patchify_proj|proj_in|proj_out|caption_projection|adaln_single|time_embed|prompt_adaln)"
    r"|av_(ca|cross_attn)_"
)


def split_key(key: str) -> tuple[str, Part] | None:
    """Returns the module, without its prefix, and the part of its pair that a key names; None for another key."""
    for pattern in (_HALF, _ALPHA):
        match = pattern.fullmatch(key)
        if match is not None:
            return bare_module(match["module"]), _PARTS[match["half"]] if pattern is _HALF else "alpha"
    return None


def other_kind(key: str) -> str | None:
    """Names the kind of adapter that a key gives away, where it is not a plain LoRA."""
    return next((kind for suffix, kind in _OTHER_KINDS.items() if re.fullmatch(rf".+{suffix}", key)), None)


def bare_module(name: str) -> str:
    """Strips every known prefix from a dotted module path."""
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    return name if prefix is None else bare_module(name.removeprefix(prefix))


def is_of_ltx_2(module: str) -> bool:
    """Tells whether a module's name, without prefix, is one of LTX-2's; some of its names other models have too."""
    return any(_OF_LTX_2.match(reading) for reading in flat_readings(module))


def flatten(module: str) -> str:
    """Writes a module path the way trainers do that allow no dots."""
    return module.replace(".", "_")


def flat_readings(name: str) -> set[str]:
    """Returns every flattened path that a name without dots may mean: as it is, and without known prefixes."""
    readings, waiting = set(), [name]
    while waiting:
        reading = waiting.pop()
        if reading not in readings:
            readings.add(reading)
            waiting += [reading.removeprefix(prefix) for prefix in _FLAT_PREFIXES if reading.startswith(prefix)]
    return readings
