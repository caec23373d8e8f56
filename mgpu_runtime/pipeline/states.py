"""The streams of a stage before noise: the latents it starts from, and what its conditions put in or append.

Letters: C channels of a latent, F H W latent frames, rows and columns, N pictures.
"""

from dataclasses import dataclass

from torch import Tensor

from ..sampling.conditioning import append_keyframe, append_reference, append_reference_audio, place_latent
from ..sampling.sizes import ScaleFactors, latent_frames
from .conditions import (
    Condition,
    ImageCondition,
    LatentCondition,
    ReferenceAudioCondition,
    ReferenceCondition,
    first_frame,
)
from .first_rank import share
from .images import prepare
from .models import LTXModels
from .progress import Progress
from .sampler import Streams, Tensors


@dataclass(frozen=True)
class _Clip:
    """What a condition is placed in: the video latent's grid (F, H, W), its frames per second, the model's factors."""

    grid: tuple[int, int, int]
    fps: float
    scale: ScaleFactors


def add_conditions(
    streams: Streams,
    conditions: tuple[Condition, ...],
    tensors: Tensors,
    models: LTXModels,
    progress: Progress,
    *,
    grid: tuple[int, int, int],
    fps: float,
) -> Streams:
    """Returns the streams with all conditions in them; collective: pictures are encoded on the first rank.

    `grid` is the clip's own, at this stage's size. A condition of strength 0 leaves no trace.
    """
    clip = _Clip(grid, fps, ScaleFactors(*models.facts.scale_factors))
    numbered = [(tensors[f"condition_{number}"], condition) for number, condition in enumerate(conditions)]
    for tensor, condition in numbered:
        if condition.strength > 0.0:
            streams = _add(streams, condition, tensor, clip, _Encoder(models, progress, clip))
    return streams


def _add(streams: Streams, condition: Condition, tensor: Tensor, clip: _Clip, encoder: "_Encoder") -> Streams:
    video, audio = streams
    if isinstance(condition, ReferenceAudioCondition):
        assert audio is not None, "a reference sound without sound"
        return video, append_reference_audio(audio, tensor, condition.strength)
    attention = None if condition.attention == 1.0 else condition.attention  # 1 limits nothing, and costs a mask
    if isinstance(condition, ReferenceCondition):
        video = append_reference(
            video,
            encoder(tensor, crf=0, downscale=condition.downscale),
            condition.strength,
            clip.fps,
            downscale=condition.downscale,
            time_scale=condition.time_scale,
            attention=attention,
            scale=clip.scale,
        )
        return video, audio
    latent = tensor if isinstance(condition, LatentCondition) else encoder(tensor, crf=_crf(condition, tensor, encoder))
    frame = first_frame(condition, clip.grid[0], clip.scale)
    if frame == 0:
        return place_latent(video, latent, condition.strength), audio
    video = append_keyframe(video, latent, frame, condition.strength, clip.fps, attention=attention, scale=clip.scale)
    return video, audio


def _crf(condition: ImageCondition, pictures: Tensor, encoder: "_Encoder") -> int:
    """Returns how coarsely pictures are compressed: as asked, else a picture as the model saw them, a clip not."""
    if condition.crf is not None:
        return condition.crf
    return encoder.models.facts.image_crf if pictures.shape[0] == 1 else 0


@dataclass(frozen=True)
class _Encoder:
    """Turns pictures (N, H, W, 3) into a latent of the clip's size on the first rank and shares it with all."""

    models: LTXModels
    progress: Progress
    clip: _Clip

    def __call__(self, pictures: Tensor, *, crf: int, downscale: int = 1) -> Tensor:
        """Returns the latent (1, C, f, h, w) float32 on the CPU, the same on every rank."""
        _, height, width = self.clip.grid
        cells = (height // downscale, width // downscale)
        size = (cells[0] * self.clip.scale.height, cells[1] * self.clip.scale.width)
        self.progress.step("encode pictures", 0, 1)
        self.progress.raise_if_cancelled()
        shape = (1, self.models.facts.video_channels, latent_frames(pictures.shape[0], self.clip.scale.frames), *cells)
        latent = share(self.models.info, lambda: self.models.encode_video(prepare(pictures, *size, crf)), shape)
        self.progress.step("encode pictures", 1, 1)
        return latent
