"""Checks of a job against the model, in the caller's process, before any worker starts or any weight is read.

Every function raises ValueError with one sentence: what is wrong, the numbers, what to do.
"""

from torch import Tensor

from ..parallel.limits import check_tokens
from ..parallel.pixel_tiles import PixelLayout, VAEShape
from ..sampling.guidance import check_all_guidance
from ..tiling import TileCountConfig, parse_tiles
from ..weights.facts import ModelFacts
from .conditions import ImageCondition, ReferenceCondition
from .jobs import Decode, Encode, EncodeAudio, EncodeVideo, Job, PredictLength, SPStage, TDPStage
from .plan import plan_sp_stage, plan_tdp_stage
from .settings import LTXSettings
from .tensors import check_audio_mask, check_video_latent

# 16 K latent cells decode through activations of at most 2^30 elements; kernels that count in 32 bits stay safe
MAX_DECODE_CELLS = 16384
MAX_DIFFUSION_CELLS = 4096  # a diffusion decoder holds about four times as much for each cell


def needs_encoder(job: Job) -> bool:
    """Whether a job encodes pictures of its conditions."""
    conditions = getattr(job, "conditions", ())
    return any(isinstance(condition, (ImageCondition, ReferenceCondition)) for condition in conditions)


def needed_components(job: Job, *, with_sound: bool, with_picture: bool = True) -> tuple[str, ...]:
    """Names what a job loads, in order; the flags say what a decode has to make.

    A preview also uses the video autoencoder, but does without where there is none.
    """
    if isinstance(job, Encode | PredictLength):
        return ("connectors",) if isinstance(job, Encode) else ("duration_head",)
    if isinstance(job, Decode):
        return ("video_vae",) * with_picture + ("audio_vae", "vocoder") * with_sound
    if isinstance(job, EncodeVideo | EncodeAudio):
        return ("video_vae",) if isinstance(job, EncodeVideo) else ("audio_vae",)
    if isinstance(job, TDPStage) and job.upscale:
        return ("upsampler", "video_vae", "transformer")  # the upsampler works with the autoencoder's statistics
    return ("video_vae", "transformer") if needs_encoder(job) else ("transformer",)


def check_components(
    job: Job, facts: ModelFacts, settings: LTXSettings, *, with_sound: bool = False, with_picture: bool = True
) -> None:
    """Checks that the files hold what a job needs."""
    if isinstance(job, Encode) and settings.text_encoder is None:
        raise ValueError("no text encoder is chosen: pick a Gemma folder or file under text_encoders in Load LTX MGPU")
    for component in needed_components(job, with_sound=with_sound, with_picture=with_picture):
        if component != "upsampler":
            _require(component, facts)
        elif settings.upsampler is None:
            raise ValueError(
                "upscale is on but no upsampler is chosen: pick one in Load LTX MGPU, or switch upscale off"
            )
    _check_encoders(job, facts)


def _require(component: str, facts: ModelFacts) -> None:
    try:
        facts.require(component)
    except ValueError as error:
        if component != "duration_head":
            raise
        raise ValueError(f"{error} (Predict Length needs a duration head, and only LTX-2.5 has one.)") from error


def _check_encoders(job: Job, facts: ModelFacts) -> None:
    """Checks that the autoencoder a job encodes with has an encoder: some files hold decoders only."""
    for kind, has_encoder, what in (
        (EncodeVideo, facts.has_video_encoder, "video"),
        (EncodeAudio, facts.has_audio_encoder, "audio"),
    ):
        if (isinstance(job, kind) or (kind is EncodeVideo and needs_encoder(job))) and not has_encoder:
            raise ValueError(f"the {what} autoencoder's file holds no encoder: choose the file that has both parts")


def check_plan(job: SPStage, facts: ModelFacts, *, has_negative: bool) -> None:
    """Checks that a stage's settings fit together, and that its guidance has what it needs at every noise level."""
    plan = plan_sp_stage(job, facts)
    check_all_guidance(
        plan.video,
        plan.audio,
        plan.video_by_sigma,
        plan.audio_by_sigma,
        has_negative=has_negative,
        num_layers=facts.num_layers,
    )


def check_sound(job: SPStage, audio_latent: Tensor | None, audio_mask: Tensor | None) -> None:
    """Checks what a stage is given of its sound against what it does with it."""
    if job.sound == "keep" and audio_latent is None:
        raise ValueError(
            "audio_mode keep listens to a given sound, but there is no audio latent: connect Encode Audio (LTX MGPU) "
            "to audio_latent"
        )
    if job.sound == "none" and audio_latent is not None:
        raise ValueError("audio_mode none has no sound, but an audio latent is given: remove it, or choose keep")
    if audio_mask is not None:
        if job.sound != "generate":
            raise ValueError(f"an audio noise mask has no meaning with audio_mode {job.sound}: remove it")
        check_audio_mask(audio_mask, audio_latent)


def check_tdp(job: TDPStage, latent: Tensor, facts: ModelFacts, settings: LTXSettings) -> tuple[int, int, int]:
    """Checks what the second stage needs, a token limit or a grid that the tiles fit; returns the grid it refines."""
    grid = check_video_latent(latent, facts, None)
    check_components(job, facts, settings)
    plan_tdp_stage(job)
    if job.upscale:
        grid = upscaled_grid(grid, facts)
    limit = token_limit(job, settings)
    if limit is None:
        tdp_tiling(job, grid)
    else:
        check_tokens(grid[0] * grid[1] * grid[2], limit)
    return grid


def token_limit(job: SPStage | TDPStage, settings: LTXSettings) -> int | None:
    """Returns the most video tokens that a stage may hold; None where it works tile by tile."""
    return None if isinstance(job, TDPStage) and job.mode == "tdp" else settings.sp_max_tokens


def upscaled_grid(grid: tuple[int, int, int], facts: ModelFacts) -> tuple[int, int, int]:
    """Returns the grid (F, H, W) after the upsampler; refuses a side that would not be whole."""
    scale = facts.upsample_scale
    frames, *sides = grid
    for name, side in zip(("height", "width"), sides, strict=True):
        if side * scale != int(side * scale):
            raise ValueError(
                f"a latent {name} of {side} times the upsampler's {scale:g} is {side * scale:g}, not whole: "
                f"choose a {name} of {side + 1} or {side - 1} latent cells"
            )
    return frames, int(sides[0] * scale), int(sides[1] * scale)


def tdp_tiling(job: TDPStage, grid: tuple[int, int, int]) -> TileCountConfig:
    """Returns how a stage's latent (F, H, W), after the upscale, is cut into tiles."""
    return parse_tiles(job.tiles, grid, job.overlap)


def check_decode(
    job: Decode, latent: Tensor | None, facts: ModelFacts, settings: LTXSettings, *, with_sound: bool
) -> None:
    """Checks a latent to decode, and that its tiles are ones the autoencoder can take; None has only sound."""
    if latent is None and not with_sound:
        raise ValueError("there is nothing to decode: connect a video latent, an audio latent or both")
    check_components(job, facts, settings, with_sound=with_sound, with_picture=latent is not None)
    if latent is not None:
        grid = check_video_latent(latent, facts, None)
        shape = VAEShape(*facts.scale_factors, min_cells=facts.decode_min_cells, pads_clips=facts.has_diffusion_decoder)
        PixelLayout.of(decode_tiling(job, grid, shape), grid, shape)


def decode_tiling(job: Decode, grid: tuple[int, int, int], shape: VAEShape) -> TileCountConfig:
    """Returns how a latent (F, H, W) is cut into tiles for decoding."""
    most = MAX_DIFFUSION_CELLS if shape.pads_clips else MAX_DECODE_CELLS
    return parse_tiles(job.tiles, grid, job.overlap, max_cells=most, min_cells=shape.min_cells)
