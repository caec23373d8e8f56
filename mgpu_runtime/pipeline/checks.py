"""Checks of a job against the model, in the caller's process, before any worker starts or any weight is read.

Every function raises ValueError with one sentence: what is wrong, the numbers, what to do.
"""

from torch import Tensor

from ..parallel.limits import check_tokens
from ..parallel.pixel_tiles import PixelLayout, VAEShape
from ..sampling.guidance import check_guidance
from ..tiling import TileCountConfig, parse_tiles
from ..weights.facts import ModelFacts
from .jobs import Decode, Encode, Job, PromptContext, SPStage, TDPStage
from .plan import plan_sp_stage
from .settings import LTXSettings
from .tensors import check_video_latent

# 16 K latent cells decode through activations of at most 2^30 elements; kernels that count in 32 bits stay safe
MAX_DECODE_CELLS = 16384


def needed_components(job: Job, *, with_sound: bool) -> tuple[str, ...]:
    """Names what a job loads, in order; `with_sound` says whether a decode has sound to make.

    A preview also uses the video autoencoder, but does without where there is none.
    """
    if isinstance(job, Encode):
        return ("connectors",)
    if isinstance(job, Decode):
        return ("video_vae", "audio_vae", "vocoder") if with_sound else ("video_vae",)
    if isinstance(job, TDPStage) and job.upscale:
        return ("upsampler", "video_vae", "transformer")  # the upsampler works with the autoencoder's statistics
    return ("transformer",)


def check_components(job: Job, facts: ModelFacts, settings: LTXSettings, *, with_sound: bool = False) -> None:
    """Checks that the files hold what a job needs."""
    if isinstance(job, Encode) and settings.text_encoder is None:
        raise ValueError("no text encoder is chosen: pick a Gemma folder under text_encoders in Load LTX MGPU")
    for component in needed_components(job, with_sound=with_sound):
        if component != "upsampler":
            facts.require(component)
        elif settings.upsampler is None:
            raise ValueError(
                "upscale is on but no upsampler is chosen: pick one in Load LTX MGPU, or switch upscale off"
            )


def check_plan(job: SPStage, facts: ModelFacts, negative: PromptContext | None) -> None:
    """Checks that the guidance a stage will use has what it needs."""
    plan = plan_sp_stage(job, facts)
    check_guidance(plan.video, plan.audio, has_negative=negative is not None, num_layers=facts.num_layers)


def check_tdp(job: TDPStage, latent: Tensor, facts: ModelFacts, settings: LTXSettings) -> tuple[int, int, int]:
    """Checks what the second stage needs, a token limit or a grid that the tiles fit; returns the grid it refines."""
    grid = check_video_latent(latent, facts, None)
    check_components(job, facts, settings)
    if job.upscale:
        grid = upscaled_grid(grid, facts)
    if job.mode == "sp":
        check_tokens(grid[0] * grid[1] * grid[2], settings.sp_max_tokens)
    else:
        tdp_tiling(job, grid)
    return grid


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


def check_decode(job: Decode, latent: Tensor, facts: ModelFacts, settings: LTXSettings, *, with_sound: bool) -> None:
    """Checks a latent to decode, and that its tiles are ones the autoencoder can take."""
    grid = check_video_latent(latent, facts, None)
    check_components(job, facts, settings, with_sound=with_sound)
    shape = VAEShape(*facts.scale_factors, min_cells=facts.decode_min_cells)
    PixelLayout.of(decode_tiling(job, grid), grid, shape)


def decode_tiling(job: Decode, grid: tuple[int, int, int]) -> TileCountConfig:
    """Returns how a latent (F, H, W) is cut into tiles for decoding."""
    return parse_tiles(job.tiles, grid, job.overlap, max_cells=MAX_DECODE_CELLS)
