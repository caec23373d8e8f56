"""The two sampling stages as every rank runs them, in lockstep.

Letters: B batch, C channels of a latent, F H W latent frames, rows and columns, T audio latent frames, M mel bins.
"""

import torch
from torch import Tensor

from ..sampling.sizes import ScaleFactors
from ..sampling.state import StreamState, audio_state, video_state
from .checks import tdp_tiling, upscaled_grid
from .first_rank import share
from .jobs import SPStage, TDPStage
from .models import LTXModels
from .plan import plan_sp_stage, plan_tdp_stage
from .progress import Progress
from .sampler import Sampler, Tensors
from .states import add_conditions
from .tensors import num_audio_frames


def run_sp_stage(request: SPStage, tensors: Tensors, models: LTXModels, progress: Progress) -> Tensors:
    """Samples video and audio under sequence parallelism; returns {"video": (B, C, F, H, W), "audio": ... or None}."""
    facts = models.facts
    start = tensors["latent"]
    grid = tuple(start.shape[2:])
    video = video_state(start, request.fps, noise_mask=tensors["noise_mask"], scale=ScaleFactors(*facts.scale_factors))
    streams = add_conditions(
        (video, _sound(request, tensors, models)),
        request.conditions,
        tensors,
        models,
        progress,
        grid=grid,
        fps=request.fps,
    )
    if facts.is_distilled is False and request.schedule == "distilled":
        progress.log("a full model by its file name runs the distilled schedule; auto or ltx2 is its own")
    plan = plan_sp_stage(request, facts, grid[0] * grid[1] * grid[2])
    models.open_exchange()  # first: a transport that cannot work is said before weights are loaded
    models.make_room()
    models.use_loras(request.loras, progress.log)
    sampler = Sampler("SP stage", plan, request.seed, request.preview, models, progress)
    return sampler.run(models.sequence_parallel(), streams, tensors, grid=grid)


def _sound(request: SPStage, tensors: Tensors, models: LTXModels) -> StreamState | None:
    """Builds the audio stream a stage makes, or listens to, or does without."""
    if request.sound == "none":
        return None
    given, facts = tensors["audio_latent"], models.facts
    if given is None:
        batch, _, frames = tensors["latent"].shape[:3]
        length = num_audio_frames(frames, request.fps, facts)
        given = torch.zeros(batch, facts.audio_channels, length, facts.audio_mel_bins)
    return audio_state(given, frozen=request.sound == "keep", noise_mask=tensors["audio_mask"])


def run_tdp_stage(request: TDPStage, tensors: Tensors, models: LTXModels, progress: Progress) -> Tensors:
    """Upscales and refines; returns {"video": (B, C, F, H, W), "audio": ... or None}.

    In "tdp" mode the sound is listened to, not changed, and comes back as it came.
    """
    follows = request.mode == "sp"
    start = tensors["latent"]
    if request.upscale:
        start = _upscaled(start, models, progress)
    grid = tuple(start.shape[2:])
    video = video_state(start, request.fps, scale=ScaleFactors(*models.facts.scale_factors))
    audio = None
    if tensors["audio_latent"] is not None:
        audio = audio_state(tensors["audio_latent"], frozen=not follows)
    streams = add_conditions((video, audio), request.conditions, tensors, models, progress, grid=grid, fps=request.fps)
    if follows:
        models.open_exchange()
    models.make_room()
    models.use_loras(request.loras, progress.log)
    if follows:
        model = models.sequence_parallel()
    else:
        tiling = tdp_tiling(request, grid)
        _say_tiles(tiling.num_tiles, models.info.world_size, progress)
        model = models.tiled(tiling, grid, normalize_positions=request.normalize_positions)
    name = "SP refine" if follows else "TDP stage"
    sampler = Sampler(name, plan_tdp_stage(request), request.seed, request.preview, models, progress)
    result = sampler.run(model, streams, tensors, grid=grid)
    return result if follows else {**result, "audio": tensors["audio_latent"]}


def _say_tiles(num_tiles: int, num_workers: int, progress: Progress) -> None:
    """Tells how the tiles meet the workers: one that gets no tile idles, and only the user can change that."""
    idle = max(0, num_workers - num_tiles)
    note = f": {idle} without a tile; more tiles use them" if idle else ""
    tiles, workers = (f"{n} {word}{'s' if n > 1 else ''}" for n, word in ((num_tiles, "tile"), (num_workers, "worker")))
    progress.log(f"{tiles} on {workers}{note}")


def _upscaled(latent: Tensor, models: LTXModels, progress: Progress) -> Tensor:
    """Upscales on the first rank and shares the result: all ranks must refine the same numbers."""
    info = models.info
    shape = (*latent.shape[:2], *upscaled_grid(tuple(latent.shape[2:]), models.facts))
    progress.step("upscale", 0, 1)
    larger = share(info, lambda: models.upsample(latent.to(info.device)), shape)
    progress.step("upscale", 1, 1)
    return larger
