"""Checks of the tensors that come with a job, in the caller's process, before any worker starts or any weight is read.

Every function raises ValueError with one sentence: what is wrong, the numbers, what to do.
"""

import torch
from torch import Tensor

from ..parallel.limits import check_tokens
from ..sampling.sizes import audio_latent_frames, pixel_frames
from ..sampling.state import expand_audio_mask, expand_noise_mask, fit_audio_latent
from ..weights.facts import ModelFacts
from .jobs import PromptContext

Noise = tuple[Tensor, Tensor | None]  # video (B, tokens, C), audio (B, tokens, C') or None


def check_video_latent(latent: Tensor, facts: ModelFacts, max_tokens: int | None) -> tuple[int, int, int]:
    """Checks a video latent (B, C, F, H, W) against the model and returns its grid (F, H, W)."""
    _check_numbers(latent, "video latent")
    if latent.dim() != 5:
        raise ValueError(
            f"a video latent has 5 dimensions (batch, channels, frames, height, width), got {tuple(latent.shape)}; "
            "use EmptyLTXVLatentVideo"
        )
    batch, channels, *grid = latent.shape
    if channels != facts.video_channels:
        raise ValueError(
            f"the latent has {channels} channels, this checkpoint's video latents have {facts.video_channels}: "
            "make it with EmptyLTXVLatentVideo or a stage of the same model"
        )
    if batch < 1 or min(grid) < 1:
        raise ValueError(f"the video latent is empty: {tuple(latent.shape)}")
    _check_finite(latent, "video latent")
    num_tokens = grid[0] * grid[1] * grid[2]
    if max_tokens is not None:
        check_tokens(num_tokens, max_tokens)
    return grid[0], grid[1], grid[2]


def fit_audio(latent: Tensor, facts: ModelFacts, video: Tensor, fps: float) -> Tensor:
    """Checks an audio latent and returns it fitted to the video latent's clip: its length, its number of items.

    One frame off is trimmed or repeated with a warning; more is refused.
    """
    check_audio_latent(latent, facts)
    check_audio_length(latent.shape[2], video.shape[2], fps, facts)
    return fit_audio_latent(latent, num_audio_frames(video.shape[2], fps, facts), video.shape[0])


def num_audio_frames(latent_frames: int, fps: float, facts: ModelFacts) -> int:
    """Returns the audio latent frames of a clip of so many video latent frames."""
    return audio_latent_frames(pixel_frames(latent_frames, facts.scale_factors[0]), fps)


def check_audio_length(length: int, latent_frames: int, fps: float, facts: ModelFacts) -> None:
    """Checks that a sound of so many latents is as long as a clip of so many latent frames; one off is near enough."""
    needed = num_audio_frames(latent_frames, fps, facts)
    if abs(length - needed) > 1:
        raise ValueError(
            f"the audio latent has {length} frames ({facts.audio_latent_rate:g} a second), but this clip of {fps:g} "
            f"fps needs {needed}: connect the clip's latent to video_latent of Encode Audio (or set its frames and "
            "fps), and give every stage the same fps"
        )


def check_noise_mask(mask: Tensor, latent: Tensor) -> None:
    """Checks that a noise mask fits a video latent (B, C, F, H, W) and holds 0 to 1."""
    _check_numbers(mask, "noise mask")
    if mask.numel() == 0:
        raise ValueError(f"the noise mask is empty: {tuple(mask.shape)}")
    expand_noise_mask(mask, latent.shape[0], tuple(latent.shape[2:]))


def check_audio_mask(mask: Tensor, audio_latent: Tensor | None) -> None:
    """Checks that a noise mask of the sound fits the audio latent (B, C, T, M) whose parts it keeps."""
    _check_numbers(mask, "audio noise mask")
    if audio_latent is None:
        raise ValueError(
            "an audio noise mask needs an audio latent whose parts it keeps: connect one, or remove the mask"
        )
    if mask.numel() == 0:
        raise ValueError(f"the audio noise mask is empty: {tuple(mask.shape)}")
    expand_audio_mask(mask, audio_latent.shape[0], audio_latent.shape[2])


def check_audio_latent(latent: Tensor, facts: ModelFacts) -> None:
    """Checks an audio latent (B, C, T, M) against the model."""
    _check_numbers(latent, "audio latent")
    expected = (facts.audio_channels, facts.audio_mel_bins)
    if latent.dim() != 4 or (latent.shape[1], latent.shape[3]) != expected:
        raise ValueError(
            f"an audio latent of this checkpoint is (batch, {expected[0]}, frames, {expected[1]}), "
            f"got {tuple(latent.shape)}; take it from the audio output of SP Stage"
        )
    if latent.shape[0] < 1 or latent.shape[2] < 1:
        raise ValueError(f"the audio latent is empty: {tuple(latent.shape)}")
    _check_finite(latent, "audio latent")


def check_noise(noise: Noise, facts: ModelFacts, video_tokens: int, audio_tokens: int | None, batch: int) -> None:
    """Checks given noise against the tokens of a stage, those of its conditions among them; None makes no sound."""
    with_audio = audio_tokens is not None
    for name, tensor, wanted in zip(("video", "audio"), noise, (True, with_audio), strict=True):
        if (tensor is not None) != wanted:
            raise ValueError(
                f"{name} noise is {'missing' if wanted else 'given'}, but the stage "
                f"{'makes' if wanted else 'does not make'} {name}: give noise for what is made, or none at all"
            )
    expected = {"video": (batch, video_tokens, facts.video_channels)}
    if with_audio:
        expected["audio"] = (batch, audio_tokens, facts.audio_channels * facts.audio_mel_bins)
    for name, shape in expected.items():
        tensor = noise[0] if name == "video" else noise[1]
        if tensor is None:
            continue
        _check_numbers(tensor, f"{name} noise")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} noise must be {shape} (clips, tokens, channels), got {tuple(tensor.shape)}")
        _check_finite(tensor, f"{name} noise")


def check_contexts(facts: ModelFacts, batch: int, positive: PromptContext, negative: PromptContext | None) -> None:
    """Checks that the prompts were encoded for this checkpoint and can be shared by the clips of a batch."""
    for name, context in (("positive", positive), ("negative", negative)):
        if context is not None:
            _check_context(name, context, facts, batch)


def _check_context(name: str, context: PromptContext, facts: ModelFacts, batch: int) -> None:
    widths = {"video": facts.video_context_width, "audio": facts.audio_context_width}
    for stream, width in widths.items():
        tensor = getattr(context, stream)
        _check_numbers(tensor, f"{name} prompt's {stream} context")
        if tensor.dim() != 3 or tensor.shape[2] != width or 0 in tensor.shape:
            raise ValueError(
                f"the {name} prompt's {stream} context is {tuple(tensor.shape)}, this checkpoint takes "
                f"(1, tokens, {width}): encode the prompt with the same Load LTX MGPU"
            )
        _check_finite(tensor, f"{name} prompt")
    shape = context.video.shape[:2]
    for what, other in (("audio context", context.audio.shape[:2]), ("mask", context.mask)):
        other = other.shape if isinstance(other, Tensor) else other
        if other is not None and tuple(other) != tuple(shape):
            raise ValueError(
                f"the {name} prompt has {tuple(shape)} video (prompts, tokens) but {tuple(other)} in its {what}: "
                "encode the prompt again"
            )
    if batch % shape[0]:
        raise ValueError(f"{batch} clips cannot share {shape[0]} {name} prompts evenly: give 1 prompt or {batch}")


def _check_numbers(value: Tensor, name: str) -> None:
    if not isinstance(value, Tensor) or value.is_complex() or value.is_meta:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the {name} must be a tensor of real numbers, got {kind}")


def _check_finite(latent: Tensor, name: str) -> None:
    if not torch.isfinite(latent).all():
        raise ValueError(f"the {name} holds values that are not finite: an earlier stage went wrong, run it again")
