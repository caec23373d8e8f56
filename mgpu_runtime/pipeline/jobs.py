"""The jobs a fleet takes and what it gives back. Every job checks itself when it is made.

Letters: B batch, C channels of a latent, F H W latent frames, rows and columns, S text tokens, D text width, T audio
latent frames, M mel bins of an audio latent, N samples of sound.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from ..sampling.guidance import GuiderParams
from ..sampling.sigmas import check_sigmas
from ..tiling import read_tiles

SCHEDULES = ("auto", "distilled", "ltx2")
UPSCALE_MODES = ("tdp", "sp")
MAX_SEED = 2**64 - 1


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
class Encode:
    """Asks for the contexts of some prompts, each padded or cut to `max_length` tokens (a multiple of 128)."""

    prompts: tuple[str, ...]
    max_length: int = 1024

    def __post_init__(self) -> None:
        if isinstance(self.prompts, str) or not all(isinstance(prompt, str) for prompt in self.prompts):
            raise ValueError(f"prompts must be a sequence of texts, got {self.prompts!r}")
        for prompt in self.prompts:
            check_text(prompt)
        _settle(self, prompts=tuple, max_length=_whole)
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
        schedule: "distilled" (8 fixed steps), "ltx2" (the LTX-2 scheduler) or "auto" (by the checkpoint); not used with
            `sigmas`.
        steps: steps of the "ltx2" schedule; 0 takes the model's default.
        sigmas: explicit noise levels, used unchanged; None follows `schedule`.
        video, audio: guidance per stream; None follows the schedule (none when distilled, the model's defaults else).
        with_audio: whether sound is made beside the video.
        preview: whether each step sends a picture of the clip's middle frame.
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

    def __post_init__(self) -> None:
        _settle(self, seed=_whole, fps=_number, steps=_whole, sigmas=check_sigmas)
        _check_seed(self.seed)
        _check_fps(self.fps)
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        if not 0 <= self.steps <= 1000:
            raise ValueError(f"steps must be 0 (the model's default) to 1000, got {self.steps}")


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

    def __post_init__(self) -> None:
        _settle(self, seed=_whole, fps=_number, overlap=_whole, sigmas=check_sigmas, tiles=_tiles)
        _check_seed(self.seed)
        _check_fps(self.fps)
        if self.mode not in UPSCALE_MODES:
            raise ValueError(f"mode must be one of {', '.join(UPSCALE_MODES)}, got {self.mode!r}")
        if self.overlap < 0:
            raise ValueError(f"overlap must be 0 or more latent cells, got {self.overlap}")


@dataclass(frozen=True)
class Decode:
    """Asks for the frames and the sound of latents.

    Attributes:
        tiles: "auto" (by the latent's size alone) or rows x columns such as "2x2".
        overlap: latent cells that neighbouring tiles share.
    """

    tiles: str = "auto"
    overlap: int = 4

    def __post_init__(self) -> None:
        _settle(self, overlap=_whole, tiles=_tiles)
        if self.overlap < 0:
            raise ValueError(f"overlap must be 0 or more latent cells, got {self.overlap}")


Job = Encode | SPStage | TDPStage | Decode
_KINDS: dict[str, type] = {cls.__name__: cls for cls in (Encode, SPStage, TDPStage, Decode)}


def to_record(job: Job) -> tuple[str, dict[str, Any]]:
    """Turns a job into its name and its fields as plain values, as they travel to the workers."""
    return type(job).__name__, asdict(job)


def from_record(name: str, fields: dict[str, Any]) -> Job:
    """Builds a job again on the other side; it checks itself once more. Raises ValueError for an unknown name."""
    if name not in _KINDS:
        raise ValueError(f"unknown job {name!r}; known are {', '.join(_KINDS)}")
    guiders = {key: GuiderParams(**fields[key]) for key in ("video", "audio") if fields.get(key) is not None}
    return _KINDS[name](**{**fields, **guiders})


def check_text(prompt: str) -> None:
    """Raises ValueError for a text that no tokenizer takes: half of a character, as a cut in the middle leaves it."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt holds half of a character at position {error.start}: type that character again"
        ) from None


def _settle(job: Any, **kinds: Callable[[Any], Any]) -> None:
    """Replaces a new job's fields by plain values that can travel, each by its kind; None stays None."""
    for name, kind in kinds.items():
        value = getattr(job, name)
        if value is None:
            continue
        try:
            object.__setattr__(job, name, kind(value))
        except TypeError:
            raise ValueError(f"{name} cannot be {value!r} ({type(value).__name__})") from None


def _whole(value: Any) -> int:
    return operator.index(value)


def _number(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError
    return float(value)


def _tiles(value: Any) -> str:
    read_tiles(value)
    return value


def _check_seed(seed: int) -> None:
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed must be 0 to {MAX_SEED}, got {seed}")


def _check_fps(fps: float) -> None:
    if not (math.isfinite(fps) and 1 <= fps <= 240):
        raise ValueError(f"fps must be 1 to 240 frames per second, got {fps}")
