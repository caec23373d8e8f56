"""Input checks that run in the caller's process, before any worker starts or any weight is read.

Every function raises ValueError with one sentence: what is wrong, the numbers, what to do.
"""

import torch
from torch import Tensor

from ..parallel.limits import check_tokens
from ..sampling.sizes import audio_latent_frames, pixel_frames
from ..sampling.state import expand_noise_mask, fit_audio_latent
from ..tiling import TileCountConfig, parse_tiles
from ..weights.facts import ModelFacts
from .jobs import Decode, PromptContext, SPStage, TDPStage
from .plan import plan_sp_stage
from .settings import LTXSettings

# 16 K latent cells decode through activations of at most 2^30 elements; kernels that count in 32 bits stay safe
MAX_DECODE_CELLS = 16384


def check_text_encoder(settings: LTXSettings) -> None:
    """Refuses to encode without a text encoder."""
    if settings.text_encoder is None:
        raise ValueError("no text encoder is chosen: pick a Gemma folder under text_encoders in Load LTX MGPU")


def check_video_latent(latent: Tensor, facts: ModelFacts, max_tokens: int | None) -> tuple[int, int, int]:
    """Checks a video latent (B, C, F, H, W) against the model and returns its grid (F, H, W)."""
    if latent.dim() != 5:
        raise ValueError(
            f"a video latent has 5 dimensions (batch, channels, frames, height, width), got {tuple(latent.shape)}; "
            "use EmptyLTXVLatentVideo"
        )
    batch, channels, *grid = latent.shape
    if channels != facts.video_channels:
        raise ValueError(
            f"the latent has {channels} channels, this checkpoint's video latents have {facts.video_channels}: "
            "make it with EmptyLTXVLatentVideo or a stage of the same model"
        )
    if batch < 1 or min(grid) < 1:
        raise ValueError(f"the video latent is empty: {tuple(latent.shape)}")
    _check_finite(latent, "video latent")
    num_tokens = grid[0] * grid[1] * grid[2]
    if max_tokens is not None:
        check_tokens(num_tokens, max_tokens)
    return grid[0], grid[1], grid[2]


def fit_audio(latent: Tensor, facts: ModelFacts, video: Tensor, fps: float) -> Tensor:
    """Checks an audio latent and returns it fitted to the video latent's clip: its length, its number of items.

    One frame off is trimmed or repeated with a warning; more is refused.
    """
    check_audio_latent(latent, facts)
    num_frames = audio_latent_frames(pixel_frames(video.shape[2], facts.scale_factors[0]), fps)
    return fit_audio_latent(latent, num_frames, video.shape[0])


def check_noise_mask(mask: Tensor, latent: Tensor) -> None:
    """Checks that a noise mask fits a video latent (B, C, F, H, W) and holds 0 to 1."""
    expand_noise_mask(mask, latent.shape[0], tuple(latent.shape[2:]))


def check_audio_latent(latent: Tensor, facts: ModelFacts) -> None:
    """Checks an audio latent (B, C, T, M) against the model."""
    expected = (facts.audio_channels, facts.audio_mel_bins)
    if latent.dim() != 4 or (latent.shape[1], latent.shape[3]) != expected:
        raise ValueError(
            f"an audio latent of this checkpoint is (batch, {expected[0]}, frames, {expected[1]}), "
            f"got {tuple(latent.shape)}; take it from the audio output of SP Stage"
        )
    if latent.shape[0] < 1 or latent.shape[2] < 1:
        raise ValueError(f"the audio latent is empty: {tuple(latent.shape)}")
    _check_finite(latent, "audio latent")


def check_contexts(facts: ModelFacts, batch: int, positive: PromptContext, negative: PromptContext | None) -> None:
    """Checks that the prompts were encoded for this checkpoint and can be shared by the clips of a batch."""
    for name, context in (("positive", positive), ("negative", negative)):
        if context is None:
            continue
        for stream, tensor, width in (
            ("video", context.video, facts.video_context_width),
            ("audio", context.audio, facts.audio_context_width),
        ):
            if tensor.dim() != 3 or tensor.shape[2] != width:
                raise ValueError(
                    f"the {name} prompt's {stream} context is {tuple(tensor.shape)}, this checkpoint takes "
                    f"(1, tokens, {width}): encode the prompt with the same Load LTX MGPU"
                )
            if batch % tensor.shape[0]:
                raise ValueError(
                    f"{batch} clips cannot share {tensor.shape[0]} {name} prompts evenly: give 1 prompt or {batch}"
                )


def check_plan(job: SPStage, facts: ModelFacts, negative: PromptContext | None) -> None:
    """Checks that the guidance a stage will use has what it needs."""
    plan = plan_sp_stage(job, facts)
    if negative is None and (plan.video.needs_uncond or (job.with_audio and plan.audio.needs_uncond)):
        raise ValueError(
            f"guidance of cfg {plan.video.cfg:g} (video) and {plan.audio.cfg:g} (audio) needs a negative prompt: "
            "connect the negative output of Encode Prompt, or set both to 1"
        )
    for name, guider in (("video", plan.video), ("audio", plan.audio)):
        outside = [block for block in guider.stg_blocks if block >= facts.num_layers]
        if guider.needs_perturbed and outside:
            raise ValueError(
                f"{name} STG names block {outside[0]}, but this model's blocks are 0 to {facts.num_layers - 1}"
            )


def check_tdp(job: TDPStage, latent: Tensor, facts: ModelFacts, settings: LTXSettings) -> None:
    """Checks what the second stage needs: an upsampler where it upscales, a grid that the tiles fit, a token limit."""
    frames, height, width = check_video_latent(latent, facts, None)
    if job.upscale:
        if settings.upsampler is None:
            raise ValueError(
                "upscale is on but no upsampler is chosen: pick one in Load LTX MGPU, or switch upscale off"
            )
        frames, height, width = upscaled_grid((frames, height, width), facts)
    if job.mode == "sp":
        check_tokens(frames * height * width, settings.sp_max_tokens)
    else:
        tdp_tiling(job, (frames, height, width))


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


def check_decode(job: Decode, latent: Tensor, facts: ModelFacts) -> None:
    """Checks a latent to decode, and that its tiles fit."""
    decode_tiling(job, check_video_latent(latent, facts, None))


def decode_tiling(job: Decode, grid: tuple[int, int, int]) -> TileCountConfig:
    """Returns how a latent (F, H, W) is cut into tiles for decoding."""
    return parse_tiles(job.tiles, grid, job.overlap, max_cells=MAX_DECODE_CELLS)


def _check_finite(latent: Tensor, name: str) -> None:
    if not torch.isfinite(latent).all():
        raise ValueError(f"the {name} holds values that are not finite: an earlier stage went wrong, run it again")
