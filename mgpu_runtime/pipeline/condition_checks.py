"""Checks of a stage's conditions against its clip, in the caller's process, before any worker starts.

Every check raises ValueError with one sentence: what is wrong, the numbers, what to do.
"""

from torch import Tensor

from ..parallel.limits import check_tokens
from ..sampling.sizes import ScaleFactors, latent_frames, pixel_frames
from ..weights.facts import ModelFacts
from .conditions import (
    Condition,
    Conditions,
    ImageCondition,
    LatentCondition,
    ReferenceAudioCondition,
    ReferenceCondition,
    first_frame,
)
from .images import check_pictures
from .tensors import check_audio_latent, check_video_latent

Grid = tuple[int, int, int]
_MAX_REFERENCE_SECONDS = 20.0  # the span of time that the models' positions are made for


def check_conditions(
    conditions: Conditions,
    facts: ModelFacts,
    grid: Grid,
    *,
    has_sound: bool,
    max_tokens: int | None,
) -> tuple[int, int]:
    """Checks conditions against a clip (F, H, W) and returns how many video and audio tokens they append.

    `max_tokens` limits the clip's tokens and theirs together; None where nothing does.
    """
    video_tokens = audio_tokens = 0
    for number, (condition, tensor) in enumerate(conditions):
        name = f"condition {number + 1}"
        if isinstance(condition, ReferenceAudioCondition):
            count = _check_sound(name, tensor, facts, has_sound=has_sound)
            audio_tokens += count if condition.strength > 0.0 else 0
        else:
            count = _check_pictures(name, condition, tensor, facts, grid)
            video_tokens += count if condition.strength > 0.0 else 0
    if max_tokens is not None and video_tokens:
        check_tokens_with_conditions(grid[0] * grid[1] * grid[2], video_tokens, max_tokens)
    return video_tokens, audio_tokens


def check_tokens_with_conditions(clip_tokens: int, condition_tokens: int, max_tokens: int) -> None:
    """Raises ValueError when a clip and its conditions together are longer than the limit chosen at load."""
    check_tokens(clip_tokens, max_tokens)
    if clip_tokens + condition_tokens > max_tokens:
        raise ValueError(
            f"{clip_tokens} video tokens of the clip and {condition_tokens} of its conditions exceed sp_max_tokens "
            f"{max_tokens}: use fewer or shorter conditions, a shorter or smaller clip, or raise sp_max_tokens in Load "
            "LTX MGPU."
        )


def _check_pictures(name: str, condition: Condition, tensor: Tensor, facts: ModelFacts, grid: Grid) -> int:
    """Checks a condition of the picture and returns how many tokens it appends."""
    scale = ScaleFactors(*facts.scale_factors)
    if isinstance(condition, LatentCondition):
        piece = _check_latent(name, tensor, facts, grid)
    else:
        piece = _check_images(name, condition, tensor, scale, grid)
    if isinstance(condition, ReferenceCondition):
        return piece[0] * piece[1] * piece[2]
    frame = _check_frame(name, condition, piece[0], grid[0], scale)
    if frame == 0 and condition.attention is not None:
        raise ValueError(
            f"{name} lies at frame 0, where it takes the place of the clip's own first frames, so an attention of "
            f"{condition.attention:g} has no meaning: set attention to -1, or choose another frame"
        )
    return 0 if frame == 0 else piece[0] * piece[1] * piece[2]


def _check_frame(
    name: str, condition: ImageCondition | LatentCondition, length: int, clip_frames: int, scale: ScaleFactors
) -> int:
    """Checks where a piece of so many latent frames lies in the clip and returns its first pixel frame."""
    num_frames, piece_frames = pixel_frames(clip_frames, scale.frames), pixel_frames(length, scale.frames)
    frame = first_frame(condition, clip_frames, scale)
    if not 0 <= frame < num_frames:
        raise ValueError(
            f"{name} is at frame {condition.frame}, but the clip has {num_frames} frames: choose 0 to "
            f"{num_frames - 1}, or -1 (the last) to {-num_frames}"
        )
    if frame + piece_frames > num_frames:
        raise ValueError(
            f"{name} is {piece_frames} frames long from frame {frame} on, but the clip has {num_frames} frames: begin "
            "earlier, or give fewer frames"
        )
    return frame


def _check_images(name: str, condition: Condition, pictures: Tensor, scale: ScaleFactors, grid: Grid) -> Grid:
    """Checks pictures (N, H, W, 3) and returns the grid of their latent."""
    check_pictures(pictures, f"pictures of {name}")
    count = pictures.shape[0]
    if count % scale.frames != 1:
        below = pixel_frames(latent_frames(count, scale.frames), scale.frames)
        raise ValueError(
            f"{name} holds {count} pictures; one picture or a clip of {scale.frames}k+1 can be encoded: the nearest "
            f"are {below} and {below + scale.frames}"
        )
    downscale = 1
    if isinstance(condition, ReferenceCondition):
        _check_reference(name, condition, count, scale, grid)
        downscale = condition.downscale
    return latent_frames(count, scale.frames), grid[1] // downscale, grid[2] // downscale


def _check_reference(name: str, condition: ReferenceCondition, count: int, scale: ScaleFactors, grid: Grid) -> None:
    downscale, covered = condition.downscale, (count - 1) * condition.time_scale + 1
    num_frames = pixel_frames(grid[0], scale.frames)
    if covered > num_frames:
        raise ValueError(
            f"{name} is a reference clip that covers {covered} frames ({count}, time_scale {condition.time_scale}), "
            f"more than the clip's {num_frames}: give fewer frames, or make a longer clip"
        )
    for side, cells, factor in (("height", grid[1], scale.height), ("width", grid[2], scale.width)):
        if cells % downscale:
            raise ValueError(
                f"{name} is a reference clip of 1/{downscale} of the clip's size, but a {side} of {cells * factor} "
                f"pixels does not divide into multiples of {factor}: choose a {side} that is a multiple of "
                f"{downscale * factor}"
            )


def _check_latent(name: str, latent: Tensor, facts: ModelFacts, grid: Grid) -> Grid:
    frames, *cells = check_video_latent(latent, facts, None)
    if latent.shape[0] != 1:
        raise ValueError(f"{name} holds {latent.shape[0]} latents, and a condition is one for all clips: give one")
    if tuple(cells) != grid[1:]:
        raise ValueError(
            f"{name} is a latent of {cells[0]}x{cells[1]} cells, but this stage's clip has {grid[1]}x{grid[2]}: encode "
            "it at this stage's size, or give pictures, which are fitted"
        )
    return frames, *cells


def _check_sound(name: str, latent: Tensor, facts: ModelFacts, *, has_sound: bool) -> int:
    if not has_sound:
        raise ValueError(
            f"{name} is a reference sound, but this stage has no sound: remove it, or give the stage sound"
        )
    check_audio_latent(latent, facts)
    if latent.shape[0] != 1:
        raise ValueError(f"{name} holds {latent.shape[0]} sounds, and a condition is one for all clips: give one")
    seconds = latent.shape[2] / facts.audio_latent_rate
    if seconds > _MAX_REFERENCE_SECONDS:
        raise ValueError(
            f"{name} is a reference sound of {seconds:.1f} s, more than {_MAX_REFERENCE_SECONDS:g} s: cut it"
        )
    return latent.shape[2]
