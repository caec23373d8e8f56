"""The jobs a fleet takes and what it gives back. Every job checks itself when it is made.

Letters: B batch, C channels of a latent, F H W latent frames, rows and columns, S text tokens, D text width, T audio
latent frames, M mel bins of an audio latent, N samples of sound.
"""

import math
import os
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from ..sampling.guidance import BySigma, GuiderParams, read_guider, read_guiders
from ..sampling.sigmas import check_sigmas
from ..tiling import read_tiles
from .conditions import Condition, read_conditions
from .conditions import to_record as condition_record
from .fields import number, settle, whole

SCHEDULES = ("auto", "distilled", "ltx2", "linear_quadratic", "beta", "hq")
SCHEDULE_TOKENS = ("auto", "anchor", "clip")
SAMPLERS = ("auto", "euler", "ancestral", "res_2s")
AUDIO_MODES = ("generate", "keep", "none")
UPSCALE_MODES = ("tdp", "sp")
TEXT_MODES = ("auto", "first", "sharded", "replicated")
MAX_SEED = 2**64 - 1
MAX_LORA_STRENGTH = 100.0
MIN_RATE, MAX_RATE = 1000, 10**7  # samples per second; less is no sound, and grows by 16 in the encoder


@dataclass(frozen=True)
class PromptContext:
    """Holds one encoded prompt as the transformer takes it: video (1, S, D), audio (1, S, D'), mask (1, S) or None.

    A mask of None keeps every text token: LTX's connectors fill padding with learned registers.
    """

    video: Tensor
    audio: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True)
class StageLatents:
    """Holds what a stage gives: video (B, C, F, H, W) and audio (B, C', T, M) or None, normalised, float32, CPU."""

    video: Tensor
    audio: Tensor | None


@dataclass(frozen=True)
class Decoded:
    """Holds a decoded clip: frames (B*F', H', W', 3) float32 0..1, waveform (B, 2, N) float32 or None, rate in Hz."""

    frames: Tensor
    waveform: Tensor | None
    sample_rate: int | None


@dataclass(frozen=True)
class LoRASpec:
    """Names a LoRA file, by absolute path, and how strongly it changes the model; 0 leaves the model as it is."""

    path: str
    strength: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not os.path.isabs(self.path):
            raise ValueError(f"a LoRA's path must be an absolute path, got {self.path!r}")
        settle(self, strength=number)
        if not abs(self.strength) <= MAX_LORA_STRENGTH:  # false for NaN too
            raise ValueError(
                f"a LoRA's strength must be from {-MAX_LORA_STRENGTH:g} to {MAX_LORA_STRENGTH:g}, got {self.strength}"
            )


@dataclass(frozen=True)
class Encode:
    """Asks for the contexts of some prompts.

    Attributes:
        prompts: texts, each may be empty.
        max_length: tokens that each is padded or cut to, a multiple of 128.
        mode: who holds the text encoder: the "first" worker alone, "sharded" layer by layer over all GPUs, or
            "replicated" on every worker with the prompts dealt; "auto" takes the first that has room.
        release: whether the text encoder's memory is freed afterwards; the next new prompt loads it again.
        loras: LoRAs of the text connectors, in order; what else these files change is left to the stages.
    """

    prompts: tuple[str, ...]
    max_length: int = 1024
    mode: str = "auto"
    release: bool = False
    loras: tuple[LoRASpec, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.prompts, str) or not all(isinstance(prompt, str) for prompt in self.prompts):
            raise ValueError(f"prompts must be a sequence of texts, got {self.prompts!r}")
        for prompt in self.prompts:
            check_text(prompt)
        settle(self, prompts=tuple, max_length=whole, loras=_loras)
        _check_choice("mode", self.mode, TEXT_MODES)
        if self.max_length < 128 or self.max_length % 128:
            below = max(128, self.max_length // 128 * 128)
            raise ValueError(
                f"max_length must be a multiple of 128 of tokens, got {self.max_length}: use {below} or {below + 128}"
            )


@dataclass(frozen=True)
class SPStage:
    """Asks for a sequence-parallel sampling pass over video and audio.

    Attributes:
        seed: noise seed; item k of a batch draws from seed + k.
        fps: frames per second of the clip.
        schedule: "distilled" (8 fixed steps), "ltx2" (the LTX-2 scheduler), "linear_quadratic", "beta", "hq" (the
            high-quality preset: "ltx2" by the clip's tokens, fewer steps, res_2s) or "auto" (by the checkpoint); not
            used with `sigmas`.
        steps: steps of the schedule; 0 takes the model's default.
        sigmas: explicit noise levels, used unchanged; None follows `schedule`.
        video, audio: guidance per stream; None follows the schedule (none when distilled, the model's defaults else).
        with_audio: False is the old name of `audio_mode` "none"; see `sound`.
        preview: whether each step sends a picture of the clip's middle frame.
        sampler: how a step goes from one noise level to the next; "auto" follows the model and the schedule.
        eta: how much fresh noise a step of "ancestral" or "res_2s" adds, 0 (none) to 1; None is the published value, 1
            and 0.5.
        max_batch_size: most rows (clips times passes) of one forward; 0 sets no limit.
        audio_mode: "generate" makes sound, "keep" listens to the given audio latent and leaves it as it is, "none" has
            no sound.
        conditions: pictures, clips and sound to follow; their tensors travel beside the job.
        loras: LoRAs of the transformer for this stage, in order.
        video_by_sigma, audio_by_sigma: guidance from a noise level on downwards, (level, guidance) pairs; at each step
            the pair with the smallest level at or above the step's holds, above all of them `video` and `audio`.
        schedule_tokens: token count that shifts the "ltx2" schedule: "anchor" the official 4096, "clip" the clip's own;
            "auto" is "clip" for "hq", else "anchor".
    """

    seed: int
    fps: float
    schedule: str = "auto"
    steps: int = 0
    sigmas: tuple[float, ...] | None = None
    video: GuiderParams | None = None
    audio: GuiderParams | None = None
    with_audio: bool = True
    preview: bool = True
    sampler: str = "auto"
    eta: float | None = None
    max_batch_size: int = 0
    audio_mode: str = "generate"
    conditions: tuple[Condition, ...] = ()
    loras: tuple[LoRASpec, ...] = ()
    video_by_sigma: BySigma = ()
    audio_by_sigma: BySigma = ()
    schedule_tokens: str = "auto"

    def __post_init__(self) -> None:
        settle(self, seed=whole, fps=number, steps=whole, sigmas=check_sigmas, video=read_guider, audio=read_guider)
        settle(self, eta=number, max_batch_size=whole, conditions=read_conditions, loras=_loras)
        settle(self, video_by_sigma=read_guiders, audio_by_sigma=read_guiders)
        _check_seed(self.seed)
        _check_fps(self.fps)
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("schedule_tokens", self.schedule_tokens, SCHEDULE_TOKENS)
        _check_choice("sampler", self.sampler, SAMPLERS)
        _check_choice("audio_mode", self.audio_mode, AUDIO_MODES)
        _check_rows(self.max_batch_size)
        if not 0 <= self.steps <= 1000:
            raise ValueError(f"steps must be 0 (the model's default) to 1000, got {self.steps}")
        _check_eta(self.eta)
        if self.audio_mode == "keep" and not self.with_audio:
            raise ValueError("with_audio is off, but audio_mode keeps a sound: leave with_audio on")

    @property
    def sound(self) -> str:
        """What happens to the sound, as `audio_mode` says it unless `with_audio` is off: "generate", "keep", "none"."""
        return self.audio_mode if self.with_audio else "none"


@dataclass(frozen=True)
class TDPStage:
    """Asks for the second stage: upscale the latent, then refine it in tiles ("tdp") or whole ("sp").

    Attributes:
        seed: noise seed; item k of a batch draws from seed + k.
        fps: frames per second of the clip.
        sigmas: noise levels; None takes the list made for the mode.
        upscale: whether the latent upsampler runs first.
        tiles: "auto" (by the latent's size alone) or rows x columns such as "1x2".
        overlap: latent cells that neighbouring tiles share.
        normalize_positions: whether each tile's positions start at zero.
        mode: "tdp" keeps the sound of stage 1 as it is; "sp" runs the stage under sequence parallelism and lets the
            sound follow the picture, as the distilled pipeline does.
        preview: whether each step sends a picture of the clip's middle frame.
        conditions, loras, max_batch_size: as in SPStage; pictures are prepared again for this stage's size.
        sampler, eta: as in SPStage; "auto" is "euler".
    """

    seed: int
    fps: float
    sigmas: tuple[float, ...] | None = None
    upscale: bool = True
    tiles: str = "auto"
    overlap: int = 5
    normalize_positions: bool = True
    mode: str = "tdp"
    preview: bool = True
    conditions: tuple[Condition, ...] = ()
    loras: tuple[LoRASpec, ...] = ()
    max_batch_size: int = 0
    sampler: str = "auto"
    eta: float | None = None

    def __post_init__(self) -> None:
        settle(self, seed=whole, fps=number, overlap=whole, sigmas=check_sigmas, tiles=_tiles)
        settle(self, eta=number, max_batch_size=whole, conditions=read_conditions, loras=_loras)
        _check_seed(self.seed)
        _check_fps(self.fps)
        _check_rows(self.max_batch_size)
        _check_choice("mode", self.mode, UPSCALE_MODES)
        _check_choice("sampler", self.sampler, SAMPLERS)
        _check_eta(self.eta)
        _check_overlap(self.overlap)


@dataclass(frozen=True)
class Decode:
    """Asks for the frames and the sound of latents.

    Attributes:
        tiles: "auto" (by the latent's size alone) or rows x columns such as "2x2".
        overlap: latent cells that neighbouring tiles share.
        seed: noise seed of decoders that draw noise (LTX-2.5's by diffusion); clip k of a batch draws from seed + k.
        fps: frames per second of the clip, where known: the sound is then cut or filled up to the picture's length.
    """

    tiles: str = "auto"
    overlap: int = 4
    seed: int = 0
    fps: float | None = None

    def __post_init__(self) -> None:
        settle(self, overlap=whole, tiles=_tiles, seed=whole, fps=number)
        _check_seed(self.seed)
        if self.fps is not None:
            _check_fps(self.fps)
        _check_overlap(self.overlap)


@dataclass(frozen=True)
class EncodeVideo:
    """Asks for the latent of a clip; its pixels (1, 3, N, H, W) of -1..1 travel beside the job."""


@dataclass(frozen=True)
class EncodeAudio:
    """Asks for the latents of sound (B, channels, N), which travels beside the job.

    Attributes:
        rate: its samples per second.
        num_latents: how many audio latent frames to keep; 0 keeps all.
    """

    rate: int
    num_latents: int = 0

    def __post_init__(self) -> None:
        settle(self, rate=whole, num_latents=whole)
        if not MIN_RATE <= self.rate <= MAX_RATE:
            raise ValueError(f"the sound's rate must be {MIN_RATE} to {MAX_RATE} samples per second, got {self.rate}")
        if self.num_latents < 0:
            raise ValueError(f"num_latents must be 0 or more, got {self.num_latents}")


@dataclass(frozen=True)
class PredictLength:
    """Asks how many seconds the shot of an encoded prompt naturally takes."""


Job = Encode | SPStage | TDPStage | Decode | EncodeVideo | EncodeAudio | PredictLength
_KINDS: dict[str, type] = {cls.__name__: cls for cls in Job.__args__}


def to_record(job: Job) -> tuple[str, dict[str, Any]]:
    """Turns a job into its name and its fields as plain values, as they travel to the workers."""
    fields = asdict(job)
    if "conditions" in fields:
        fields["conditions"] = tuple(condition_record(condition) for condition in job.conditions)
    return type(job).__name__, fields


def from_record(name: str, fields: dict[str, Any]) -> Job:
    """Builds a job again on the other side; it checks itself once more.

    Raises ValueError for an unknown name, and TypeError for a field that the job does not have.
    """
    if name not in _KINDS:
        raise ValueError(f"unknown job {name!r}; known are {', '.join(_KINDS)}")
    return _KINDS[name](**fields)


def check_text(prompt: str) -> None:
    """Raises ValueError for a text that no tokenizer takes: half of a character, as a cut in the middle leaves it."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt holds half of a character at position {error.start}: type that character again"
        ) from None


def _tiles(value: Any) -> str:
    read_tiles(value)
    return value


def _loras(values: Any) -> tuple[LoRASpec, ...]:
    return tuple(LoRASpec(**value) if isinstance(value, dict) else value for value in values)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _check_rows(max_batch_size: int) -> None:
    if not 0 <= max_batch_size <= 1024:
        raise ValueError(f"max_batch_size must be 0 (no limit) to 1024 rows, got {max_batch_size}")


def _check_overlap(overlap: int) -> None:
    if overlap < 0:
        raise ValueError(f"overlap must be 0 or more latent cells, got {overlap}")


def _check_eta(eta: float | None) -> None:
    if eta is not None and not 0.0 <= eta <= 1.0:
        raise ValueError(f"eta must be from 0 (no fresh noise) to 1, got {eta}")


def _check_seed(seed: int) -> None:
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed must be 0 to {MAX_SEED}, got {seed}")


def _check_fps(fps: float) -> None:
    if not (math.isfinite(fps) and 1 <= fps <= 240):
        raise ValueError(f"fps must be 1 to 240 frames per second, got {fps}")
