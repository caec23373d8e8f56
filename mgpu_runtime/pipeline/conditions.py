"""What a stage is given beside its prompt: pictures, clips, latents and sound to follow. Each checks itself.

A condition is a description that travels with its job; its tensor travels beside the job, under the condition's number.
Letters: N pictures, H W pixels, C channels of a latent, f h w latent frames, rows and columns, T audio latent frames,
M mel bins.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from ..sampling.sizes import ScaleFactors, pixel_frames
from .fields import number, settle, whole

MAX_CRF = 51  # the coarsest that H.264 knows
MAX_REFERENCE_FACTOR = 64
_READERS = {
    "frame": whole,
    "crf": whole,
    "downscale": whole,
    "time_scale": whole,
    "strength": number,
    "attention": number,
}


@dataclass(frozen=True)
class ImageCondition:
    """Asks that the clip shows given pictures, (N, H, W, 3) float 0..1, N = 1 or 8k+1, from a frame on.

    Attributes:
        frame: the pixel frame of the clip where the first picture lies; negative counts from the clip's end, -1 is its
            last frame. At frame 0 the pictures take the place of the clip's own tokens, elsewhere tokens are added.
        strength: 1 keeps the pictures as they are, 0 ignores them.
        crf: how coarsely H.264 compresses the pictures first, 0 (not at all) to 51; None as the model was trained.
        attention: how strongly the clip's tokens and the added ones see each other, 0 to 1; None without any limit.
            Not for frame 0, where no tokens are added.
    """

    frame: int = 0
    strength: float = 1.0
    crf: int | None = None
    attention: float | None = None

    def __post_init__(self) -> None:
        _settle(self, "image")
        if self.crf is not None and not 0 <= self.crf <= MAX_CRF:
            raise ValueError(f"the image's crf must be 0 (no compression) to {MAX_CRF}, got {self.crf}")
        _refuse_attention_at_start(self, "an image")


@dataclass(frozen=True)
class LatentCondition:
    """Asks for an already encoded piece of video, a latent (1, C, f, h, w), at a pixel frame; see ImageCondition."""

    frame: int
    strength: float = 1.0
    attention: float | None = None

    def __post_init__(self) -> None:
        _settle(self, "latent")
        _refuse_attention_at_start(self, "a latent")


@dataclass(frozen=True)
class ReferenceCondition:
    """Shows the model a whole clip, (N, H, W, 3) float 0..1, beside the one it makes, as IC-LoRAs are trained for.

    Attributes:
        strength: 1 keeps the reference as it is, 0 ignores it.
        downscale: how many times smaller than the clip the LoRA wants its reference.
        time_scale: how many times fewer frames than the clip the LoRA wants its reference.
        attention: how strongly the clip's tokens and the reference's see each other, 0 to 1; None without any limit.
    """

    strength: float = 1.0
    downscale: int = 1
    time_scale: int = 1
    attention: float | None = None

    def __post_init__(self) -> None:
        _settle(self, "reference clip")
        for name in ("downscale", "time_scale"):
            value = getattr(self, name)
            if not 1 <= value <= MAX_REFERENCE_FACTOR:
                raise ValueError(f"the reference clip's {name} must be 1 to {MAX_REFERENCE_FACTOR}, got {value}")


@dataclass(frozen=True)
class ReferenceAudioCondition:
    """Lets the model hear a piece of sound, an audio latent (1, C, T, M), that ends where the clip begins."""

    strength: float = 1.0

    def __post_init__(self) -> None:
        _settle(self, "reference audio")


Condition = ImageCondition | LatentCondition | ReferenceCondition | ReferenceAudioCondition
Conditions = Sequence[tuple[Condition, Tensor]]  # each with its tensor

_KINDS: dict[str, type] = {
    "image": ImageCondition,
    "latent": LatentCondition,
    "reference": ReferenceCondition,
    "reference audio": ReferenceAudioCondition,
}


def to_record(condition: Condition) -> dict[str, Any]:
    """Turns a condition into plain values, its kind among them."""
    (kind,) = (name for name, cls in _KINDS.items() if cls is type(condition))
    return {"kind": kind, **asdict(condition)}


def from_record(record: dict[str, Any]) -> Condition:
    """Builds a condition again; it checks itself once more. Raises ValueError for an unknown kind or field."""
    fields = dict(record)
    kind = fields.pop("kind", None)
    if kind not in _KINDS:
        raise ValueError(f"unknown condition {kind!r}; known are {', '.join(_KINDS)}")
    try:
        return _KINDS[kind](**fields)
    except TypeError as error:
        raise ValueError(f"the condition {kind!r} does not fit: {error}") from None


def read_conditions(values: Any) -> tuple[Condition, ...]:
    """Returns conditions as a tuple, each given as itself or as its record."""
    made = tuple(from_record(value) if isinstance(value, dict) else value for value in values)
    for value in made:
        if not isinstance(value, Condition):
            raise ValueError(f"a condition cannot be {value!r} ({type(value).__name__})")
    return made


def first_frame(condition: ImageCondition | LatentCondition, clip_frames: int, scale: ScaleFactors) -> int:
    """Returns the pixel frame where a condition begins in a clip of so many latent frames, negative ones resolved.

    Always against the clip itself, whatever other conditions have appended.
    """
    num_frames = pixel_frames(clip_frames, scale.frames)
    return condition.frame if condition.frame >= 0 else condition.frame + num_frames


def _settle(condition: Any, name: str) -> None:
    """Replaces a new condition's fields by plain numbers and checks those that several kinds share."""
    own = [field.name for field in fields(condition)]
    settle(condition, f"the {name}'s ", **{field: _READERS[field] for field in own})
    for field in ("strength", "attention"):
        value = getattr(condition, field, None)
        if value is not None and not 0.0 <= value <= 1.0:  # false for NaN too
            raise ValueError(f"the {name}'s {field} must be from 0 to 1, got {value}")


def _refuse_attention_at_start(condition: ImageCondition | LatentCondition, name: str) -> None:
    """Raises ValueError for an attention at frame 0; a frame counted from the end is looked at beside its clip."""
    if condition.frame == 0 and condition.attention is not None:
        raise ValueError(
            f"an attention of {condition.attention:g} has no meaning for {name} at frame 0, which takes the place of "
            "the clip's own first frames: set attention to -1, or choose another frame"
        )
