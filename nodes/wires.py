"""Reads and writes what travels on the wires: LATENT, CONDITIONING, AUDIO, SIGMAS. Plain dictionaries and tensors.

Letters: B batch, C channels, F latent frames, H latent rows, W latent columns, T audio latents, M mel bins, S text
positions, D context width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgpu_runtime.pipeline.jobs import PromptContext

Latent = dict[str, Any]
Conditioning = list[list[Any]]

AUDIO_CONTEXT = "ltx_mgpu_audio_context"
FRAME_RATE = "frame_rate"


@dataclass(frozen=True)
class StageStart:
    """What a stage starts from: video (B, C, F, H, W), audio (B, C, T, M), their masks (1 = make, 0 = keep), fps."""

    video: Tensor
    noise_mask: Tensor | None
    audio: Tensor | None
    audio_mask: Tensor | None
    frame_rate: float | None


def read_latents(latent: Latent, audio_latent: Latent | None = None) -> StageStart:
    """Reads a video LATENT and an optional audio LATENT; a nested (video, audio) one counts as both.

    Samples and noise mask may each be nested or plain; an audio mask that keeps nothing counts as none. Raises
    ValueError for wrong shapes, for two sources of audio, for batches that do not fit and for a mask without its sound.
    """
    video, audio = _streams(latent, "samples")
    mask, audio_mask = _streams(latent, "noise_mask")
    _expect_dims("latent", video, 5, "(batch, channels, frames, height, width), as Empty LTXV Latent Video makes it")
    if audio_latent is not None:
        if audio is not None:
            raise ValueError(
                f"The latent holds video {_shape(video)} and audio {_shape(audio)} already, and an audio latent is "
                "connected too. Disconnect one of the two."
            )
        audio = _one_stream(audio_latent, "audio latent", "audio")
        audio_mask = audio_latent.get("noise_mask", audio_mask)
    if audio is not None:
        _expect_dims("audio latent", audio, 4, "(batch, channels, time, mel bins)")
        video, audio = _match_batches(video, audio)
    if audio_mask is not None and bool((audio_mask == 1).all()):
        audio_mask = None
    if audio_mask is not None and audio is None:
        raise ValueError(
            f"The noise mask keeps parts of a sound (audio mask {_shape(audio_mask)}), but no audio latent is there to "
            "keep. Connect it, or remove the audio mask."
        )
    return StageStart(_plain(video), _plain(mask), _plain(audio), _plain(audio_mask), latent.get(FRAME_RATE))


def read_latent(latent: Latent, name: str) -> Tensor:
    """Returns the samples (B, C, F, H, W) of a LATENT that must hold video alone; raises ValueError for another."""
    samples = _one_stream(latent, name, "video")
    _expect_dims(name, samples, 5, "(batch, channels, frames, height, width), as a stage or an encoder makes it")
    return _plain(samples)


def read_sound_latent(latent: Latent, name: str) -> Tensor:
    """Returns the samples (B, C, T, M) of a LATENT that must hold sound alone; raises ValueError for another."""
    samples = _one_stream(latent, name, "audio")
    _expect_dims(name, samples, 4, "(batch, channels, time, mel bins), as Encode Audio makes it")
    return _plain(samples)


def is_sound(latent: Latent) -> bool:
    """Tells a LATENT of sound alone, as ComfyUI's audio nodes and Encode Audio type it."""
    samples, second = _streams(latent, "samples")
    return second is None and samples.ndim == 4 and latent.get("type") == "audio"


def write_latent(source: Latent, samples: Tensor, frame_rate: float, **entries: Any) -> Latent:
    """Returns a LATENT with new samples that keeps what else `source` carried; an old mask no longer fits and goes."""
    kept = {key: value for key, value in source.items() if key not in ("samples", "noise_mask", "type")}
    return {**kept, "samples": samples, FRAME_RATE: frame_rate, **entries}


def write_audio_latent(samples: Tensor | None, frame_rate: float) -> Latent | None:
    """Returns an audio LATENT as ComfyUI's own audio nodes type it, or None when the model made no sound."""
    return None if samples is None else {"samples": samples, "type": "audio", FRAME_RATE: frame_rate}


def read_context(conditioning: Conditioning, name: str) -> PromptContext:
    """Returns the prompt of a CONDITIONING from Encode Prompt; raises ValueError for one from elsewhere."""
    if len(conditioning) != 1:
        raise ValueError(
            f"{name} holds {len(conditioning)} prompts, and a stage takes one. "
            "Connect Encode Prompt (LTX MGPU) directly, without nodes that combine prompts."
        )
    video, extras = conditioning[0]
    if extras.get("keyframe_idxs") is not None:
        raise ValueError(
            f"{name} carries guide frames (LTXV Add Guide), which the stages cannot follow. Remove the guide nodes and "
            "connect the pictures through Image Condition (LTX MGPU) to the stage's conditions instead."
        )
    audio = extras.get(AUDIO_CONTEXT)
    if audio is None:
        raise ValueError(
            f"{name} was not made by Encode Prompt (LTX MGPU), so it lacks the context for sound. "
            "Connect the output of Encode Prompt (LTX MGPU)."
        )
    return PromptContext(video=video, audio=audio)


def write_context(context: PromptContext) -> Conditioning:
    """Returns a CONDITIONING: the tensor is the video context (1, S, D), the audio context rides in its dictionary."""
    return [[context.video, {AUDIO_CONTEXT: context.audio}]]


def read_sigmas(sigmas: Tensor | None) -> tuple[float, ...] | None:
    """Returns SIGMAS as plain numbers, or None when none are connected."""
    return None if sigmas is None else tuple(float(sigma) for sigma in sigmas.flatten())


def write_audio(waveform: Tensor | None, sample_rate: int | None) -> dict[str, Any] | None:
    """Returns AUDIO of a waveform (B, 2, N), or None when there is no sound."""
    return None if waveform is None else {"waveform": waveform, "sample_rate": sample_rate}


def _one_stream(latent: Latent, name: str, part: str) -> Tensor:
    """Returns the samples of a LATENT that must not be nested; `part` is what to connect instead."""
    samples, second = _streams(latent, "samples")
    if second is not None:
        raise ValueError(
            f"The {name} holds two streams, {_shape(samples)} and {_shape(second)}. Separate them first "
            f"(LTXV Separate AV Latent) and connect the {part} part."
        )
    return samples


def _streams(latent: Latent, key: str) -> tuple[Tensor, Tensor | None]:
    """Returns the one or two streams of an entry; ComfyUI's nested class is known by its flag, not its identity."""
    value = latent.get(key)
    if not getattr(value, "is_nested", False):
        return value, None
    streams = list(value.unbind())
    if len(streams) != 2:
        shapes = ", ".join(_shape(stream) for stream in streams)
        raise ValueError(
            f"A nested latent must hold two streams, video and audio; {key} of this one holds {len(streams)}: {shapes}."
        )
    return streams[0], streams[1]


def _match_batches(video: Tensor, audio: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats a batch of one to the other's size."""
    if video.shape[0] == audio.shape[0]:
        return video, audio
    if 1 not in (video.shape[0], audio.shape[0]):
        raise ValueError(
            f"The video latent has batch size {video.shape[0]} and the audio latent {audio.shape[0]}. "
            "Make them equal, or one of them 1."
        )
    batch = max(video.shape[0], audio.shape[0])
    return video.expand(batch, *video.shape[1:]), audio.expand(batch, *audio.shape[1:])


def _expect_dims(name: str, samples: Tensor, dims: int, meaning: str) -> None:
    if samples.ndim != dims:
        raise ValueError(f"The {name} has shape {_shape(samples)}; it must be {meaning}.")


def _plain(samples: Tensor | None) -> Tensor | None:
    return None if samples is None else samples.detach().to("cpu", torch.float32).contiguous()


def _shape(samples: Tensor) -> str:
    return " x ".join(str(size) for size in samples.shape)
