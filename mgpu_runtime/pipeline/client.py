"""The fleet as seen from outside: one object per configuration, one method per job.

Safe to make, to copy and to drop at any time: nothing starts before the first job, and equal settings find the same
warm fleet again. Knows no model code, so that a host process stays light.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..exchange.choice import candidates
from ..fleet import Event, JobCancelled, MGPUController, Stream, current, parse_devices, stop
from ..parallel.limits import check_heads
from ..sampling.sizes import pixel_frames
from ..weights.facts import ModelFacts, describe
from ..weights.keymaps import SLOTS
from ..weights.lora_targets import LoRAReport, check_lora
from ..weights.roles import check_roles
from . import checks, tensors
from .condition_checks import check_conditions
from .conditions import Conditions
from .jobs import (
    Decode,
    Decoded,
    Encode,
    EncodeAudio,
    EncodeVideo,
    Job,
    LoRASpec,
    PredictLength,
    PromptContext,
    SPStage,
    StageLatents,
    TDPStage,
    to_record,
)
from .latents import check_sound_length, check_waveform, fit_sound_to_clip, prepare_clip
from .settings import LTXSettings

log = logging.getLogger("mgpu")

RUNNER = "mgpu_runtime.pipeline.runner:LTXRunner"
START_TIMEOUT = 300.0
GROUP_TIMEOUT = 3600.0  # ranks wait for the first while it reads 40 GB from a slow disk; a dead one is noticed anyway
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Watch:
    """Lets a caller follow a job: `on_event` sees what it tells, `should_stop` is asked 5 times a second."""

    on_event: Callable[[Event], None] = lambda event: None
    should_stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class LTXClient:
    """Sends jobs to the fleet of one configuration, starting or reusing it.

    Every method checks its input first and raises ValueError in one sentence before anything starts. Later failures
    are the fleet's errors: SymmetricRunnerError (the fleet stays), AsymmetricRunnerError (the next job starts a new
    one), JobCancelled after `watch.should_stop` said so.
    """

    settings: LTXSettings

    def check(self) -> ModelFacts:
        """Reads file headers only and returns what the model is; raises ValueError where this fleet cannot run it."""
        settings = self.settings
        facts = describe(settings.checkpoint_files(), settings.upsampler, settings.text_encoder)
        check_roles({slot: getattr(settings, slot) for slot in SLOTS.values()})
        devices = self.devices
        num_workers = len(devices)
        if num_workers > 1:
            candidates(settings.transport, devices[0].split(":")[0])  # refuses one that is for other devices
        check_heads(facts.num_heads, num_workers)
        check_heads(facts.audio_num_heads, num_workers)
        return facts

    def check_loras(self, specs: Sequence[LoRASpec]) -> tuple[LoRAReport, ...]:
        """Reads file headers only and returns what each LoRA does to the model, in order.

        Raises ValueError for a file that is missing, broken or no LoRA, and for one that this model cannot take.
        """
        return tuple(check_lora(spec.path, self.settings.checkpoint_files()) for spec in specs)

    @property
    def devices(self) -> list[str]:
        """The devices of the workers, rank by rank; raises ValueError where the machine lacks one."""
        return parse_devices(self.settings.devices)

    def encode(
        self,
        prompt: str,
        negative_prompt: str = "",
        max_length: int = 1024,
        *,
        mode: str = "auto",
        release: bool = False,
        loras: Sequence[LoRASpec] = (),
        watch: Watch | None = None,
    ) -> tuple[PromptContext, PromptContext]:
        """Encodes both prompts (either may be empty) into contexts of `max_length` tokens; see Encode.

        Of `loras` those are used that change the text connectors; few do.
        """
        reports = self.check_loras(loras)
        used = tuple(lora for lora, report in zip(loras, reports, strict=True) if report.connectors and lora.strength)
        job = Encode((prompt, negative_prompt), max_length, mode, release, used)
        checks.check_components(job, self.check(), self.settings)
        contexts = self._run(job, {}, watch)["contexts"]
        positive, negative = (PromptContext(**context) for context in contexts)
        return positive, negative

    def predict_seconds(self, context: PromptContext, *, watch: Watch | None = None) -> float:
        """Returns the seconds that the shot of one prompt naturally takes, as the model's duration head predicts."""
        job, facts = PredictLength(), self.check()
        checks.check_components(job, facts, self.settings)
        tensors.check_contexts(facts, 1, context, None)
        return self._run(job, _context_tensors("positive", context), watch)["seconds"]

    def sp_stage(
        self,
        job: SPStage,
        positive: PromptContext,
        negative: PromptContext | None,
        latent: Tensor,
        *,
        noise_mask: Tensor | None = None,
        audio_latent: Tensor | None = None,
        audio_mask: Tensor | None = None,
        noise: tensors.Noise | None = None,
        conditions: Conditions = (),
        watch: Watch | None = None,
    ) -> StageLatents:
        """Samples under sequence parallelism from latent (B, C, F, H, W); see SPStage.

        `noise_mask` is 1 where the clip is made and 0 where the latent stays, broadcastable to (B, 1, F, H, W).
        `audio_latent` is the start of the sound, or what is kept of it: where `audio_mask` is 0, see
        expand_audio_mask for its shapes, or all of it by audio_mode. `noise` replaces the seeded noise: video
        (B, tokens, C), audio (B, tokens, C'), those that conditions append among the tokens. `conditions` are
        pictures, clips and sound to follow, each with its tensor.
        """
        job, condition_tensors = _with_conditions(job, conditions)
        facts = self.check()
        checks.check_components(job, facts, self.settings)
        self.check_loras(job.loras)
        grid = tensors.check_video_latent(latent, facts, self.settings.sp_max_tokens)
        tensors.check_contexts(facts, latent.shape[0], positive, negative)
        checks.check_plan(job, facts, has_negative=negative is not None)
        has_sound = job.sound != "none"
        appended = check_conditions(
            conditions, facts, grid, has_sound=has_sound, max_tokens=self.settings.sp_max_tokens
        )
        if noise_mask is not None:
            tensors.check_noise_mask(noise_mask, latent)
        if audio_latent is not None:
            audio_latent = tensors.fit_audio(audio_latent, facts, latent, job.fps)
        checks.check_sound(job, audio_latent, audio_mask)
        if noise is not None:
            makes_sound = job.sound == "generate"
            num_sounds = tensors.num_audio_frames(grid[0], job.fps, facts) if makes_sound else None
            tensors.check_noise(noise, facts, *_num_tokens(grid, num_sounds, appended), latent.shape[0])
        sent = {
            **_context_tensors("positive", positive),
            **_context_tensors("negative", negative),
            **_noise_tensors(noise),
            "latent": latent,
            **condition_tensors,
            "noise_mask": noise_mask,
            "audio_latent": audio_latent,
            "audio_mask": audio_mask,
        }
        return _stage_latents(self._run(job, sent, watch))

    def tdp_stage(
        self,
        job: TDPStage,
        positive: PromptContext,
        latent: Tensor,
        *,
        audio_latent: Tensor | None = None,
        noise: tensors.Noise | None = None,
        conditions: Conditions = (),
        watch: Watch | None = None,
    ) -> StageLatents:
        """Upscales latent (B, C, F, H, W) and refines it; see TDPStage. Sound passes through, or follows by mode.

        `noise` and `conditions` are as in sp_stage, the latter against the enlarged clip.
        """
        job, condition_tensors = _with_conditions(job, conditions)
        facts = self.check()
        self.check_loras(job.loras)
        grid = checks.check_tdp(job, latent, facts, self.settings)
        tensors.check_contexts(facts, latent.shape[0], positive, None)
        if audio_latent is not None:
            audio_latent = tensors.fit_audio(audio_latent, facts, latent, job.fps)
        limit = checks.token_limit(job, self.settings)
        appended = check_conditions(conditions, facts, grid, has_sound=audio_latent is not None, max_tokens=limit)
        if noise is not None:
            follows = job.mode == "sp" and audio_latent is not None
            num_sounds = audio_latent.shape[2] if follows else None
            tensors.check_noise(noise, facts, *_num_tokens(grid, num_sounds, appended), latent.shape[0])
        sent = {
            **_context_tensors("positive", positive),
            **_noise_tensors(noise),
            **condition_tensors,
            "latent": latent,
            "audio_latent": audio_latent,
        }
        return _stage_latents(self._run(job, sent, watch))

    def encode_video(self, images: Tensor, *, height: int = 0, width: int = 0, watch: Watch | None = None) -> Tensor:
        """Encodes a clip (N, H, W, C) of 0..1 to a normalised latent (1, C, f, h, w), float32.

        It is resized to fill `height` x `width` pixels and cropped at its centre where these are given; frames beyond
        8k+1 are left out with a warning.
        """
        job, facts = EncodeVideo(), self.check()
        checks.check_components(job, facts, self.settings)
        pixels = prepare_clip(images, facts, height, width)
        return self._run(job, {"pixels": pixels}, watch)["latent"]

    def encode_audio(
        self,
        waveform: Tensor,
        rate: int,
        *,
        num_frames: int = 0,
        fps: float = 24.0,
        watch: Watch | None = None,
    ) -> Tensor:
        """Encodes sound (B, channels, N) of `rate` samples a second to a normalised latent (B, C', T, M), float32.

        With `num_frames` it is fitted to a clip of so many frames: cut, or followed by silence, with a warning.
        """
        facts = self.check()
        check_waveform(waveform)
        num_latents = 0
        job = EncodeAudio(rate, num_latents)  # checks the rate, which the fitting divides by
        check_sound_length(num_frames / fps if num_frames else waveform.shape[-1] / rate)
        if num_frames:
            waveform, num_latents = fit_sound_to_clip(waveform, rate, num_frames, fps)
            job = replace(job, num_latents=num_latents)
        checks.check_components(job, facts, self.settings)
        return self._run(job, {"waveform": waveform}, watch)["latent"]

    def decode(
        self, job: Decode, latent: Tensor | None, *, audio_latent: Tensor | None = None, watch: Watch | None = None
    ) -> Decoded:
        """Decodes latent (B, C, F, H, W) to frames and, where given, an audio latent (B, C', T, M) to sound.

        Without a latent only sound is made, and there are no frames.
        """
        facts = self.check()
        checks.check_decode(job, latent, facts, self.settings, with_sound=audio_latent is not None)
        if audio_latent is not None:
            tensors.check_audio_latent(audio_latent, facts)
        num_frames = 0
        if latent is not None:
            num_frames = latent.shape[0] * pixel_frames(latent.shape[2], facts.scale_factors[0])
        frames = _Frames(watch or Watch(), num_frames)
        watch = Watch(frames.on_event, frames.watch.should_stop)
        result = self._run(job, {"latent": latent, "audio_latent": audio_latent}, watch)
        return Decoded(frames.whole, result["waveform"], result["sample_rate"])

    def release(self) -> None:
        """Ends the running fleet, whatever its configuration; the next job starts one again."""
        stop()

    def _run(self, job: Job, sent: dict[str, Tensor | None], watch: Watch | None) -> dict[str, Any]:
        watch = watch or Watch()
        controller = current(self._key(), lambda: self._start(watch))
        name, fields = to_record(job)
        stream = controller.stream(name=name, fields=fields, tensors=sent)
        return _follow(stream, watch)

    def _key(self) -> tuple:
        """Names the fleet by content: settings, and which version of each file is meant."""
        return (self.settings, tuple(self.devices), self.settings.stamps())

    def _start(self, watch: Watch) -> MGPUController:
        """Starts a fleet; a wish to stop ends it before it is up."""
        devices = self.devices
        text = f"starting {len(devices)} worker{'s' if len(devices) > 1 else ''} on {', '.join(devices)}"
        log.info(text)
        watch.on_event(Event("log", "", 0, {"text": text}))
        controller = MGPUController(RUNNER, devices=devices, group_timeout=GROUP_TIMEOUT)
        controller.start(timeout=START_TIMEOUT, should_stop=watch.should_stop, settings=asdict(self.settings))
        return controller


def _follow(stream: Stream, watch: Watch) -> dict[str, Any]:
    """Hands the events on until the result is there; turns a wish to stop into a cancel of all ranks."""
    cancelled = False
    with stream:  # whatever the caller's functions raise, the job does not go on without a reader
        while not stream.done:
            event = stream.next_event(POLL_SECONDS)
            if event is not None:
                watch.on_event(event)
            if not cancelled and watch.should_stop():
                stream.cancel()
                cancelled = True
    if cancelled:  # the job may have ended just before the cancel reached it; the caller asked to stop all the same
        raise JobCancelled("the job was cancelled")
    return stream.result


def _with_conditions(job: Job, conditions: Conditions) -> tuple[Job, dict[str, Tensor]]:
    """Returns the job with its conditions and their tensors by name, as they travel."""
    given = tuple(condition for condition, _ in conditions)
    if job.conditions and job.conditions != given:
        raise ValueError(
            f"the job names {len(job.conditions)} conditions of its own: give each with its tensor as `conditions`"
        )
    sent = {f"condition_{number}": tensor for number, (_, tensor) in enumerate(conditions)}
    return replace(job, conditions=given), sent


class _Frames:
    """Collects decoded frames as they stream in; a long clip is gigabytes, so it is never held twice."""

    def __init__(self, watch: Watch, num_frames: int) -> None:
        self.watch = watch
        self.whole = torch.empty(num_frames, 0, 0, 3)

    def on_event(self, event: Event) -> None:
        if event.kind != "frames":
            self.watch.on_event(event)
            return
        start, part = event.data["start"], event.data["tensor"]
        if self.whole.numel() == 0:
            self.whole = torch.empty(self.whole.shape[0], *part.shape[1:])
        self.whole[start : start + part.shape[0]] = part


def _context_tensors(name: str, context: PromptContext | None) -> dict[str, Tensor | None]:
    fields = ("video", "audio", "mask")
    return {f"{name}_{field}": None if context is None else getattr(context, field) for field in fields}


def _noise_tensors(noise: tensors.Noise | None) -> dict[str, Tensor | None]:
    video, audio = noise if noise is not None else (None, None)
    return {"video_noise": video, "audio_noise": audio}


def _num_tokens(
    grid: tuple[int, int, int], num_sounds: int | None, appended: tuple[int, int]
) -> tuple[int, int | None]:
    """Counts the video and audio tokens of a stage, None for a sound that gets no noise."""
    video = grid[0] * grid[1] * grid[2] + appended[0]
    return video, None if num_sounds is None else num_sounds + appended[1]


def _stage_latents(result: dict[str, Any]) -> StageLatents:
    return StageLatents(result["video"], result["audio"])
