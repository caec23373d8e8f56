"""The fleet as seen from outside: one object per configuration, one method per job.

Safe to make, to copy and to drop at any time: nothing starts before the first job, and equal settings find the same
warm fleet again. Knows no model code, so that a host process stays light.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..fleet import Event, JobCancelled, MGPUController, Stream, current, parse_devices, stop
from ..parallel.limits import check_heads
from ..sampling.sizes import pixel_frames
from ..weights.facts import ModelFacts, describe
from . import checks, tensors
from .jobs import Decode, Decoded, Encode, Job, PromptContext, SPStage, StageLatents, TDPStage, to_record
from .settings import LTXSettings

log = logging.getLogger("mgpu")

RUNNER = "mgpu_runtime.pipeline.runner:LTXRunner"
START_TIMEOUT = 300.0
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
        facts = describe(settings.checkpoint, settings.upsampler, settings.text_encoder)
        num_workers = len(self.devices)
        check_heads(facts.num_heads, num_workers)
        check_heads(facts.audio_num_heads, num_workers)
        return facts

    @property
    def devices(self) -> list[str]:
        """The devices of the workers, rank by rank; raises ValueError where the machine lacks one."""
        return parse_devices(self.settings.devices)

    def encode(
        self, prompt: str, negative_prompt: str = "", max_length: int = 1024, *, watch: Watch | None = None
    ) -> tuple[PromptContext, PromptContext]:
        """Encodes both prompts (either may be empty) into contexts of `max_length` tokens."""
        job = Encode((prompt, negative_prompt), max_length)
        checks.check_components(job, self.check(), self.settings)
        contexts = self._run(job, {}, watch)["contexts"]
        positive, negative = (PromptContext(**context) for context in contexts)
        return positive, negative

    def sp_stage(
        self,
        job: SPStage,
        positive: PromptContext,
        negative: PromptContext | None,
        latent: Tensor,
        *,
        noise_mask: Tensor | None = None,
        audio_latent: Tensor | None = None,
        noise: tensors.Noise | None = None,
        watch: Watch | None = None,
    ) -> StageLatents:
        """Samples under sequence parallelism from latent (B, C, F, H, W); see SPStage.

        `noise_mask` is 1 where the clip is made and 0 where the latent stays, broadcastable to (B, 1, F, H, W).
        `audio_latent` is the start of the sound. `noise` replaces the seeded noise: video (B, tokens, C), audio
        (B, tokens, C').
        """
        facts = self.check()
        checks.check_components(job, facts, self.settings)
        grid = tensors.check_video_latent(latent, facts, self.settings.sp_max_tokens)
        tensors.check_contexts(facts, latent.shape[0], positive, negative)
        checks.check_plan(job, facts, negative)
        if noise_mask is not None:
            tensors.check_noise_mask(noise_mask, latent)
        if audio_latent is not None:
            audio_latent = tensors.fit_audio(audio_latent, facts, latent, job.fps)
        if noise is not None:
            num_sounds = tensors.num_audio_frames(grid[0], job.fps, facts) if job.with_audio else None
            tensors.check_noise(noise, facts, grid, num_sounds, latent.shape[0])
        sent = {
            **_context_tensors("positive", positive),
            **_context_tensors("negative", negative),
            **_noise_tensors(noise),
            "latent": latent,
            "noise_mask": noise_mask,
            "audio_latent": audio_latent,
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
        watch: Watch | None = None,
    ) -> StageLatents:
        """Upscales latent (B, C, F, H, W) and refines it; see TDPStage. Sound passes through, or follows by mode."""
        facts = self.check()
        grid = checks.check_tdp(job, latent, facts, self.settings)
        tensors.check_contexts(facts, latent.shape[0], positive, None)
        if audio_latent is not None:
            audio_latent = tensors.fit_audio(audio_latent, facts, latent, job.fps)
        if noise is not None:
            follows = job.mode == "sp" and audio_latent is not None
            tensors.check_noise(noise, facts, grid, audio_latent.shape[2] if follows else None, latent.shape[0])
        sent = {
            **_context_tensors("positive", positive),
            **_noise_tensors(noise),
            "latent": latent,
            "audio_latent": audio_latent,
        }
        return _stage_latents(self._run(job, sent, watch))

    def decode(
        self, job: Decode, latent: Tensor, *, audio_latent: Tensor | None = None, watch: Watch | None = None
    ) -> Decoded:
        """Decodes latent (B, C, F, H, W) to frames and, where given, an audio latent (B, C', T, M) to sound."""
        facts = self.check()
        checks.check_decode(job, latent, facts, self.settings, with_sound=audio_latent is not None)
        if audio_latent is not None:
            tensors.check_audio_latent(audio_latent, facts)
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
        controller = MGPUController(RUNNER, devices=devices)
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


def _stage_latents(result: dict[str, Any]) -> StageLatents:
    return StageLatents(result["video"], result["audio"])
