"""Turns a model's velocities into guided predictions of the clean latent, in one batched call or several.

Letters: B batch items (clips), P passes, R = P*B rows of one call, T tokens, C channels, S text tokens, D text width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..models.streams import AUDIO_SELF, AUDIO_TO_VIDEO, NUM_PERTURBATION_KINDS, VIDEO_SELF, VIDEO_TO_AUDIO, StreamInput
from .guidance import NEUTRAL, BySigma, GuiderParams, check_all_guidance, combine, guider_at
from .state import StreamState

Pair = tuple[Tensor | None, Tensor | None]  # video, audio


class VelocityModel(Protocol):
    """What sampling needs of a model; the parallel wrappers keep the same call."""

    def predict(self, video: StreamInput | None, audio: StreamInput | None, perturbation: Tensor | None = None) -> Pair:
        """Returns the velocities (R, T, C) of both streams."""
        ...


class TextContext(Protocol):
    """A prompt as the transformer reads it, one for all clips (b = 1) or b of them.

    Shapes: video (b, S, D), audio (b, S, D'), mask (b, S) with 1 for the tokens to keep, or None for all.
    """

    video: Tensor
    audio: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class _Pass:
    name: str  # as combine() calls it
    context: TextContext


@dataclass(frozen=True)
class _Text:
    """The text of a call's rows: video (R, S, D), audio (R, S, D'), mask (R, S) or None."""

    video: Tensor
    audio: Tensor
    mask: Tensor | None


class GuidedDenoiser:
    """The `denoise` of one job's loop: runs the passes that guidance asks for and combines them per clip.

    It remembers the last predictions for skip_step, so each job makes its own.
    """

    def __init__(
        self,
        model: VelocityModel,
        positive: TextContext,
        negative: TextContext | None = None,
        *,
        video: GuiderParams = NEUTRAL,
        audio: GuiderParams = NEUTRAL,
        video_by_sigma: BySigma = (),
        audio_by_sigma: BySigma = (),
        num_layers: int | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        """Checks that what the guidance needs is there.

        `num_layers` is the model's block count, needed for the perturbed and isolated passes; `max_batch_size` limits
        the rows of one call (at least all clips of one pass). See guider_at for the guidance by noise level. Raises
        ValueError where the negative prompt is missing or an STG block is not in the model.
        """
        check_all_guidance(
            video, audio, video_by_sigma, audio_by_sigma, has_negative=negative is not None, num_layers=num_layers
        )
        guiders = [video, audio, *(guider for _, guider in (*video_by_sigma, *audio_by_sigma))]
        assert num_layers is not None or not any(g.needs_perturbed or g.needs_isolated for g in guiders)
        self._model = model
        self._positive = positive
        self._negative = negative
        self._base = ((video, video_by_sigma), (audio, audio_by_sigma))
        self._num_layers = num_layers
        self._max_batch_size = max_batch_size
        self._last: Pair = (None, None)
        self._texts: dict[tuple[str, ...], _Text] = {}

    def __call__(self, video: StreamState | None, audio: StreamState | None, sigma: float, step: int) -> Pair:
        """Returns the guided predictions (B, T, C) float32 of both streams at a step (0-based)."""
        streams = (video, audio)
        guiders = [guider_at(sigma, base, by_sigma) for base, by_sigma in self._base]
        due = [
            stream is not None and not stream.frozen and guider.is_due(step)
            for stream, guider in zip(streams, guiders, strict=True)
        ]
        if not any(due):
            return self._last
        passes = self._passes(
            [guider for guider, is_due in zip(guiders, due, strict=True) if is_due],
            both=video is not None and audio is not None,
        )
        predictions: dict[str, Pair] = {}
        for chunk in self._chunks(passes, (video or audio).batch):
            predictions.update(self._run(chunk, streams, guiders, sigma))
        self._last = tuple(
            _combine_items(guiders[i], {name: pair[i] for name, pair in predictions.items()})
            if due[i]
            else self._last[i]
            for i in (0, 1)
        )
        return self._last

    def _passes(self, guiders: Sequence[GuiderParams], *, both: bool) -> list[_Pass]:
        """Lists the passes that any of the guidances asks for, in the official order."""
        passes = [_Pass("cond", self._positive)]
        if any(guider.needs_uncond for guider in guiders):
            passes.append(_Pass("uncond", self._negative))
        if any(guider.needs_perturbed for guider in guiders):
            passes.append(_Pass("perturbed", self._positive))
        if both and any(guider.needs_isolated for guider in guiders):
            passes.append(_Pass("isolated", self._positive))
        return passes

    def _chunks(self, passes: Sequence[_Pass], batch: int) -> Iterator[list[_Pass]]:
        """Groups passes into calls: no more rows than allowed, and contexts of one shape."""
        limit = len(passes) if self._max_batch_size is None else max(1, self._max_batch_size // batch)
        chunk: list[_Pass] = []
        for item in passes:
            if chunk and (len(chunk) == limit or _lengths(item.context) != _lengths(chunk[0].context)):
                yield chunk
                chunk = []
            chunk.append(item)
        yield chunk

    def _run(
        self,
        passes: Sequence[_Pass],
        streams: tuple[StreamState | None, StreamState | None],
        guiders: Sequence[GuiderParams],
        sigma: float,
    ) -> dict[str, Pair]:
        """Runs some passes as one call and returns each one's predictions."""
        video, audio = streams
        batch = (video or audio).batch
        text = self._text(passes, video or audio)
        velocities = self._model.predict(
            None if video is None else _stream_input(video, sigma, text.video, text.mask),
            None if audio is None else _stream_input(audio, sigma, text.audio, text.mask),
            self._perturbation(passes, guiders, batch),
        )
        split = [
            [None] * len(passes) if stream is None else _clean_latents(stream, velocity, sigma, len(passes))
            for stream, velocity in zip(streams, velocities, strict=True)
        ]
        return {item.name: pair for item, pair in zip(passes, zip(*split, strict=True), strict=True)}

    def _text(self, passes: Sequence[_Pass], state: StreamState) -> "_Text":
        """Joins the passes' prompts, once per job: they are large and may come from the CPU."""
        names = tuple(item.name for item in passes)
        if names not in self._texts:
            contexts = [item.context for item in passes]
            masks = [_text_mask(context) for context in contexts]
            keeps_all = all(bool((mask == 1).all()) for mask in masks)
            self._texts[names] = _Text(
                video=_rows([context.video for context in contexts], state),
                audio=_rows([context.audio for context in contexts], state),
                mask=None if keeps_all else _rows(masks, state),
            )
        return self._texts[names]

    def _perturbation(self, passes: Sequence[_Pass], guiders: Sequence[GuiderParams], batch: int) -> Tensor | None:
        """Builds the keep mask (4, layers, R), 0 where a pass bypasses an attention; None where none does."""
        if all(item.name in ("cond", "uncond") for item in passes):
            return None
        keep = torch.ones(NUM_PERTURBATION_KINDS, self._num_layers, len(passes) * batch)
        video, audio = guiders
        for index, item in enumerate(passes):
            rows = slice(index * batch, (index + 1) * batch)
            if item.name == "perturbed":
                for kind, guider in ((VIDEO_SELF, video), (AUDIO_SELF, audio)):
                    if guider.needs_perturbed:  # official: blocks of a stream without STG do not count
                        keep[kind, list(guider.stg_blocks), rows] = 0.0
            if item.name == "isolated":
                keep[[AUDIO_TO_VIDEO, VIDEO_TO_AUDIO], :, rows] = 0.0
        return keep


def _lengths(context: TextContext) -> tuple[int, int]:
    return context.video.shape[1], context.audio.shape[1]


def _text_mask(context: TextContext) -> Tensor:
    return context.video.new_ones(context.video.shape[:2]) if context.mask is None else context.mask


def _stream_input(state: StreamState, sigma: float, context: Tensor, context_mask: Tensor | None) -> StreamInput:
    """Repeats a stream once per pass, beside its text of all rows; rows are ordered pass by pass."""
    rows = context.shape[0]
    num_passes = rows // state.batch

    def repeat(value: Tensor | None) -> Tensor | None:
        return value if value is None or num_passes == 1 else value.repeat(num_passes, *[1] * (value.dim() - 1))

    return StreamInput(
        latent=repeat(state.latent),
        timesteps=repeat(state.timesteps(sigma)),
        sigma=state.latent.new_full((rows,), state.stream_sigma(sigma)),
        positions=repeat(state.positions),
        context=context,
        context_mask=context_mask,
        # one mask for all clips stays one: it is the largest thing here, and attention broadcasts it
        attention_mask=state.attention_mask if _is_shared(state.attention_mask) else repeat(state.attention_mask),
        keyframes_mask=repeat(state.keyframes_mask),
    )


def _is_shared(mask: Tensor | None) -> bool:
    return mask is not None and mask.shape[0] == 1


def _rows(values: Sequence[Tensor], state: StreamState) -> Tensor:
    """Joins the prompts' values of all passes, repeated for the clips, on the state's device."""
    return torch.cat([_per_clip(value, state.batch) for value in values]).to(state.latent.device)


def _per_clip(context: Tensor, batch: int) -> Tensor:
    """Repeats per-prompt rows for the clips of each prompt, grouped (p0, p0, p1, p1), never interleaved."""
    if batch % context.shape[0]:
        raise ValueError(f"{batch} clips cannot share {context.shape[0]} prompts evenly; give 1 prompt or {batch}.")
    return context.repeat_interleave(batch // context.shape[0], dim=0)


def _clean_latents(state: StreamState, velocity: Tensor, sigma: float, num_passes: int) -> Sequence[Tensor]:
    """Gives each pass's x0 = latent - timestep * velocity (B, T, C), in float32."""
    timesteps = state.timesteps(sigma)[:, :, None]
    return [state.latent - timesteps * part.float() for part in velocity.chunk(num_passes)]


def _combine_items(guider: GuiderParams, predictions: dict[str, Tensor]) -> Tensor:
    """Combines clip by clip, so that rescaling one clip does not look at its neighbours in the batch."""
    batch = predictions["cond"].shape[0]
    items = [
        combine(guider, **{name: value[item : item + 1] for name, value in predictions.items()})
        for item in range(batch)
    ]
    return items[0] if batch == 1 else torch.cat(items)
