"""What a model is, from file headers alone: enough to check a job before anything loads.

Imports neither diffusers nor transformers, so that a host process stays light.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from .checkpoint import CheckpointFile
from .configs import has_text_projection, text_projection_input, transformer_values
from .header import ContentKey, content_key
from .text_folder import TextEncoderFacts, describe_text_encoder
from .vae_configs import (
    audio_vae_kwargs,
    scale_factors,
    upsampler_kwargs,
    video_vae_kwargs,
    vocoder_kwargs,
    vocoder_sample_rate,
)

PUBLISHED_LATENT_MEL_BINS = 16


@dataclass(frozen=True)
class ModelFacts:
    """A checkpoint and its companions.

    Attributes:
        path: the checkpoint, absolute.
        version: the metadata `model_version` ("2.3.0"), None when absent; it selects defaults, never architecture.
        generation: "2.0", "2.3" or "2.5", by architecture.
        components: names of the parts the checkpoint holds, see keymaps.COMPONENTS.
        is_distilled: True or False where the file's name says so ("distilled", "dev"), else None.
        parameters: number of transformer parameters.
        num_layers, num_heads, audio_num_heads: of the transformer.
        video_channels: channels of a video latent (B, C, F, H, W).
        audio_channels, audio_mel_bins: C and M of an audio latent (B, C, T, M).
        audio_latent_rate: audio latent frames per second.
        video_context_width, audio_context_width: widths of the encoded prompt.
        scale_factors: frames, rows and columns of pixels per latent cell.
        sample_rate: samples per second of the decoded sound; None when the file has no vocoder.
        text_hidden_size, text_num_states: what the text projection takes (3840 and 49); None without text projection.
        decode_min_cells: the smallest side, in latent cells, of a tile that the video autoencoder can decode.
        upsample_scale: factor of the latent upsampler; None when there is none.
        text_encoder: facts of the text encoder folder; None when none was given.
    """

    path: str
    version: str | None
    generation: str
    components: tuple[str, ...]
    is_distilled: bool | None
    parameters: int
    num_layers: int
    num_heads: int
    audio_num_heads: int
    video_channels: int
    audio_channels: int
    audio_mel_bins: int
    audio_latent_rate: float
    video_context_width: int
    audio_context_width: int
    scale_factors: tuple[int, int, int]
    sample_rate: int | None
    text_hidden_size: int | None
    text_num_states: int | None
    decode_min_cells: int = 1
    upsample_scale: float | None = None
    text_encoder: TextEncoderFacts | None = None

    def require(self, component: str) -> None:
        """Raises ValueError when the checkpoint lacks a component or it is of a kind that is not supported.

        Lets a job say so before it starts; reads the header once per file and component.
        """
        _require(content_key(self.path), component)


def describe(
    checkpoint_path: str | os.PathLike,
    upsampler_path: str | os.PathLike | None = None,
    text_encoder_path: str | os.PathLike | None = None,
) -> ModelFacts:
    """Reads headers and returns what the model is; unchanged files are read once per process.

    Raises ValueError with one sentence for broken files and for companions that do not fit the checkpoint.
    """
    return _describe(
        content_key(checkpoint_path),
        None if upsampler_path is None else content_key(upsampler_path),
        None if text_encoder_path is None else describe_text_encoder(text_encoder_path),
    )


@lru_cache(maxsize=8)
def _describe(
    checkpoint_key: ContentKey, upsampler_key: ContentKey | None, text_encoder: TextEncoderFacts | None
) -> ModelFacts:
    file = CheckpointFile(checkpoint_key[0])
    shapes = file.shapes("transformer")
    values = transformer_values(file)
    channels, mel_bins, rate = _audio_latent(file, values["audio_in_channels"])
    hidden_size, num_states = text_projection_input(file) if has_text_projection(file) else (None, None)
    if text_encoder is not None:
        check_text_encoder(text_encoder, file)
    return ModelFacts(
        path=file.path,
        version=file.model_version,
        generation=_generation(values, shapes),
        components=tuple(file.components),
        is_distilled=_distilled_hint(file.path),
        parameters=sum(file.keys[source].numel for source in file.component("transformer").values()),
        num_layers=values["num_layers"],
        num_heads=values["num_attention_heads"],
        audio_num_heads=values["audio_num_attention_heads"],
        video_channels=values["in_channels"],
        audio_channels=channels,
        audio_mel_bins=mel_bins,
        audio_latent_rate=rate,
        video_context_width=_context_width(values, "connector"),
        audio_context_width=_context_width(values, "audio_connector"),
        scale_factors=scale_factors(file),
        sample_rate=vocoder_sample_rate(file) if "vocoder" in file.config else None,
        text_hidden_size=hidden_size,
        text_num_states=num_states,
        decode_min_cells=_decode_min_cells(file),
        upsample_scale=None if upsampler_key is None else _upsample_scale(upsampler_key[0], values["in_channels"]),
        text_encoder=text_encoder,
    )


def _decode_min_cells(file: CheckpointFile) -> int:
    """A decoder that pads by reflection needs two cells a side; 1 where the file's decoder is not one we build."""
    section = file.config.get("vae", {})
    # as video_vae_kwargs reads it, but without refusing the file: it may hold another kind of decoder
    return 2 if "video_vae" in file.components and not section.get("spatial_padding_mode") else 1


@lru_cache(maxsize=32)
def _require(checkpoint_key: ContentKey, component: str) -> None:
    file = CheckpointFile(checkpoint_key[0])
    file.component(component)
    _CONFIG_READERS[component](file)


_CONFIG_READERS: dict[str, Callable[[CheckpointFile], object]] = {
    "transformer": transformer_values,
    "connectors": text_projection_input,
    "video_vae": video_vae_kwargs,
    "audio_vae": audio_vae_kwargs,
    "vocoder": vocoder_kwargs,
    "upsampler": upsampler_kwargs,
}


def check_text_encoder(encoder: TextEncoderFacts, file: CheckpointFile) -> None:
    """Raises ValueError when a text encoder does not fit a checkpoint's text projection, or when it has none."""
    hidden_size, num_states = text_projection_input(file)
    if (encoder.hidden_size, encoder.num_states) != (hidden_size, num_states):
        raise ValueError(
            f"The text encoder {encoder.path} has hidden size {encoder.hidden_size} and {encoder.num_states} hidden "
            f"states, but {file.path} was made for hidden size {hidden_size} and {num_states} states"
            f"{' (Gemma 3 12B)' if (hidden_size, num_states) == (3840, 49) else ''}. Choose the matching text encoder."
        )


def _generation(values: dict, shapes: dict[str, tuple[int, ...]]) -> str:
    """Names the family by its architecture."""
    if values["use_keyframes_abs_pos_embedding"] or not values["ff_bias"] or "keyframes_abs_pos_embedding" in shapes:
        return "2.5"
    return "2.3" if values["cross_attention_adaln"] else "2.0"


def _distilled_hint(path: str) -> bool | None:
    """Reads the kind of a published file from its name (ltx-2-19b-distilled, ltx-2-19b-dev)."""
    words = re.split(r"[^a-z0-9]+", os.path.basename(path).lower())
    if "distilled" in words:
        return True
    return False if "dev" in words else None


def _audio_latent(file: CheckpointFile, token_width: int) -> tuple[int, int, float]:
    """Returns channels and mel bins of an audio latent and its frames per second.

    A file without an audio autoencoder's config is taken to use the published 16 bins at 25 frames a second.
    """
    if "audio_vae" not in file.config:
        return token_width // PUBLISHED_LATENT_MEL_BINS, PUBLISHED_LATENT_MEL_BINS, 25.0
    kwargs = audio_vae_kwargs(file)
    channels, mel_bins = kwargs["latent_channels"], kwargs["mel_bins"] // 4
    if channels * mel_bins != token_width:
        raise ValueError(
            f"{file.path}: an audio latent of {channels} channels x {mel_bins} bins does not fit the transformer's "
            f"audio tokens of {token_width}. The config does not fit itself."
        )
    return channels, mel_bins, kwargs["sample_rate"] / kwargs["mel_hop_length"] / 4


def _context_width(values: dict, connector: str) -> int:
    """Returns how wide the encoded prompt is: what the connector puts out."""
    return values[f"{connector}_num_attention_heads"] * values[f"{connector}_attention_head_dim"]


def _upsample_scale(path: str, video_channels: int) -> float:
    """Returns the spatial factor of an upsampler file; raises ValueError when it does not fit the checkpoint."""
    file = CheckpointFile(path)
    file.component("upsampler")
    kwargs = upsampler_kwargs(file)
    if kwargs["in_channels"] != video_channels:
        raise ValueError(
            f"The upsampler {path} works on {kwargs['in_channels']} latent channels, the checkpoint has "
            f"{video_channels}. Choose the upsampler of the same model family."
        )
    if not kwargs["spatial_upsample"] or kwargs["temporal_upsample"]:
        raise ValueError(f"The upsampler {path} works in time. Choose a spatial upsampler (x2 or x1.5).")
    # the pixel-shuffle upsampler is x2 by construction
    return float(kwargs["rational_spatial_scale"]) if kwargs["use_rational_resampler"] else 2.0
