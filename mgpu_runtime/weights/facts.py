"""What a model is, from file headers alone: enough to check a job before anything loads.

Imports neither diffusers nor transformers, so that a host process stays light.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from .audio_configs import audio_vae_kwargs, vocoder_kwargs, vocoder_sample_rate
from .bundle import Checkpoint, Paths, as_paths, read_checkpoint
from .configs import has_text_projection, is_from_2_5, text_projection_input, transformer_values
from .diffusion_vae import has_diffusion_decoder
from .header import ContentKey, content_key
from .quantized import count_parameters, describe_precision, read_quantization
from .text_pairing import check_text_encoder, expected_gemma_version
from .text_source import TextEncoderFacts, describe_text_encoder
from .vae_configs import decode_min_cells, scale_factors, upsampler_kwargs, video_vae_kwargs

PUBLISHED_LATENT_MEL_BINS = 16
_ENCODER = "encoder.conv_in.conv.weight"  # first layer of an autoencoder's encoder


@dataclass(frozen=True)
class ModelFacts:
    """A checkpoint and its companions.

    Attributes:
        path: the file with the transformer, absolute.
        files: all files that make the model, absolute, the chosen checkpoint first.
        layout: "one file" for a whole model, "split" where the transformer's file has no video autoencoder.
        version: the metadata `model_version` ("2.3.0"), or the published version its shapes told where there is no
            metadata; None where neither is. It selects defaults, never architecture.
        generation: "2.0", "2.3" or "2.5", by architecture.
        precision: how the transformer is stored, see quantized.describe_precision.
        components: names of the parts the checkpoint holds, see keymaps.COMPONENTS.
        is_distilled: True or False where name or metadata say so ("distilled", "dev"), else None.
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
        text_encoder: facts of the text encoder; None when none was given.
        gemma_version: the text encoder version that the transformer was trained with; None where it does not say.
        has_video_encoder, has_audio_encoder: whether pictures and sound can be turned into latents.
        has_diffusion_decoder: whether the video autoencoder decodes by diffusion, as LTX-2.5's.
    """

    path: str
    files: tuple[str, ...]
    layout: str
    version: str | None
    generation: str
    precision: str
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
    gemma_version: str | None = None
    has_video_encoder: bool = False
    has_audio_encoder: bool = False
    has_diffusion_decoder: bool = False

    @property
    def version_tuple(self) -> tuple[int, ...]:
        """The version as numbers to compare; the oldest where the file tells none, as officially."""
        return version_numbers(self.version)

    @property
    def image_crf(self) -> int:
        """The H.264 quality at which pictures are re-compressed before they condition a clip, by version."""
        return 18 if self.version_tuple >= (2, 4) else 33

    def require(self, component: str) -> None:
        """Raises ValueError when the checkpoint lacks a component or it is of a kind that is not supported.

        Lets a job say so before it starts; reads the headers once per set of files and component.
        """
        _require(tuple(content_key(path) for path in self.files), component)


def describe(
    checkpoint_paths: Paths,
    upsampler_path: str | os.PathLike | None = None,
    text_encoder_path: str | os.PathLike | None = None,
) -> ModelFacts:
    """Reads headers and returns what the model is, of one file or several; unchanged files are read once per process.

    Raises ValueError with one sentence for broken files and for companions that do not fit the checkpoint.
    """
    return _describe(
        tuple(content_key(path) for path in as_paths(checkpoint_paths)),
        None if upsampler_path is None else content_key(upsampler_path),
        None if text_encoder_path is None else describe_text_encoder(text_encoder_path),
    )


@lru_cache(maxsize=8)
def _describe(
    checkpoint_keys: tuple[ContentKey, ...], upsampler_key: ContentKey | None, text_encoder: TextEncoderFacts | None
) -> ModelFacts:
    return describe_checkpoint(_open(checkpoint_keys), upsampler_key and upsampler_key[0], text_encoder)


def describe_checkpoint(
    file: Checkpoint, upsampler_path: str | None = None, text_encoder: TextEncoderFacts | None = None
) -> ModelFacts:
    """Returns what a checkpoint that was read already is, as describe does."""
    shapes = file.shapes("transformer")
    file.check_files()
    values = transformer_values(file)
    channels, mel_bins, rate = _audio_latent(file, values["audio_in_channels"])
    _check_video_latent(file, values["in_channels"])
    hidden_size, num_states = text_projection_input(file) if has_text_projection(file) else (None, None)
    if text_encoder is not None:
        check_text_encoder(text_encoder, file)
    return ModelFacts(
        path=file.path,
        files=tuple(part.path for part in file.files),
        layout="one file" if "video_vae" in file.supplier("transformer").components else "split",
        version=model_version(file),
        generation=_generation(values, shapes),
        precision=describe_precision(file, "transformer"),
        components=tuple(file.components),
        is_distilled=distilled_hint(file.path, file.metadata),
        parameters=count_parameters(shapes, read_quantization(file, "transformer")),
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
        decode_min_cells=decode_min_cells(file),
        upsample_scale=None if upsampler_path is None else _upsample_scale(upsampler_path, values["in_channels"]),
        text_encoder=text_encoder,
        gemma_version=expected_gemma_version(file),
        has_video_encoder=_ENCODER in file.components.get("video_vae", {}),
        has_audio_encoder=_ENCODER in file.components.get("audio_vae", {}),
        has_diffusion_decoder=has_diffusion_decoder(file),
    )


@lru_cache(maxsize=32)
def _require(checkpoint_keys: tuple[ContentKey, ...], component: str) -> None:
    file = _open(checkpoint_keys)
    read_quantization(file, component)
    _CONFIG_READERS[component](file)


def _open(keys: tuple[ContentKey, ...]) -> Checkpoint:
    return read_checkpoint([path for path, _, _ in keys])


def _check_connectors(file: Checkpoint) -> None:
    """Raises ValueError where the text projection or the connectors are missing: they may be in two files."""
    text_projection_input(file)
    if not any(name.startswith("video_connector.") for name in file.component("connectors")):
        raise ValueError(
            f"{file.where('connectors')} has the text projection but no text connectors (*_embeddings_connector.*). "
            "Choose a file with both as text_projection in Load LTX MGPU."
        )


_CONFIG_READERS: dict[str, Callable[[Checkpoint], object]] = {
    "transformer": transformer_values,
    "connectors": _check_connectors,
    "video_vae": video_vae_kwargs,
    "audio_vae": audio_vae_kwargs,
    "vocoder": vocoder_kwargs,
    "upsampler": upsampler_kwargs,
    "duration_head": lambda file: file.config_section("duration_head"),
}


def version_numbers(version: str | None) -> tuple[int, ...]:
    """Returns the numbers of a version such as "2.3.0" or "2.4.0-rc1"; (2, 0) for None or words."""
    numbers: list[int] = []
    for part in (version or "").replace("-", ".").split("."):
        digits = re.match(r"\d+", part)
        if digits is None:
            break
        numbers.append(int(digits[0]))
        if digits[0] != part:
            break
    return tuple(numbers) or (2, 0)


def model_version(file: Checkpoint) -> str | None:
    """Returns the metadata `model_version`, else the version that the shapes told of a file without config."""
    return file.model_version or file.inferred.get("transformer")


def _generation(values: dict, shapes: dict[str, tuple[int, ...]]) -> str:
    """Names the family by its architecture."""
    if is_from_2_5(values) or "keyframes_abs_pos_embedding" in shapes:
        return "2.5"
    return "2.3" if values["cross_attention_adaln"] else "2.0"


def distilled_hint(path: str, metadata: Mapping[str, str]) -> bool | None:
    """Reads the kind of a file from its name (ltx-2-19b-distilled, ltx-2-19b-dev) or its metadata `variant`."""
    words = re.split(r"[^a-z0-9]+", f"{os.path.basename(path)} {metadata.get('variant', '')}".lower())
    if "distilled" in words:
        return True
    return False if "dev" in words else None


def _audio_latent(file: Checkpoint, token_width: int) -> tuple[int, int, float]:
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


def _check_video_latent(file: Checkpoint, video_channels: int) -> None:
    """Raises ValueError where the video autoencoder, which may be a file of its own, has latents of another width."""
    statistics = file.shapes("video_vae").get("latents_mean") if "video_vae" in file.components else None
    if statistics is not None and statistics != (video_channels,):
        raise ValueError(
            f"The video autoencoder {file.where('video_vae')} makes latents of {prod(statistics)} channels, the "
            f"transformer {file.path} takes {video_channels}. Choose the video autoencoder of the same model family."
        )


def _context_width(values: dict, connector: str) -> int:
    """Returns how wide the encoded prompt is: what the connector puts out."""
    return values[f"{connector}_num_attention_heads"] * values[f"{connector}_attention_head_dim"]


def _upsample_scale(path: str, video_channels: int) -> float:
    """Returns the spatial factor of an upsampler file; raises ValueError when it does not fit the checkpoint."""
    file = read_checkpoint(path)
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
