"""The two sampling stages as every rank runs them, in lockstep.

Letters: B batch, C channels of a latent, F H W latent frames, rows and columns, T audio latent frames, M mel bins.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ..sampling.denoiser import GuidedDenoiser, VelocityModel
from ..sampling.loop import denoise_loop
from ..sampling.noise import item_generators
from ..sampling.patchify import audio_latent, video_latent
from ..sampling.sizes import ScaleFactors
from ..sampling.state import StreamState, add_noise, audio_state, video_state
from .checks import tdp_tiling
from .first_rank import on_first_rank
from .jobs import PromptContext, SPStage, TDPStage
from .models import LTXModels
from .plan import SamplingPlan, plan_sp_stage, plan_tdp_stage
from .preview import Preview
from .progress import Progress
from .tensors import num_audio_frames

Tensors = dict[str, Tensor | None]


def run_sp_stage(request: SPStage, tensors: Tensors, models: LTXModels, progress: Progress) -> Tensors:
    """Samples video and audio under sequence parallelism; returns {"video": (B, C, F, H, W), "audio": ... or None}."""
    facts = models.facts
    start = tensors["latent"]
    batch, _, frames = start.shape[:3]
    scale = ScaleFactors(*facts.scale_factors)
    video = video_state(start, request.fps, noise_mask=tensors["noise_mask"], scale=scale)
    audio = None
    if request.with_audio:
        given = tensors["audio_latent"]
        if given is None:
            length = num_audio_frames(frames, request.fps, facts)
            given = torch.zeros(batch, facts.audio_channels, length, facts.audio_mel_bins)
        audio = audio_state(given)
    if facts.is_distilled is False and request.schedule == "distilled":
        progress.log("a full model by its file name runs the distilled schedule; auto or ltx2 is its own")
    plan = plan_sp_stage(request, facts)
    sampler = _Sampler("SP stage", plan, request.seed, request.preview, models, progress)
    model = models.sequence_parallel()
    return sampler.run(model, video, audio, tensors, grid=tuple(start.shape[2:]))


def run_tdp_stage(request: TDPStage, tensors: Tensors, models: LTXModels, progress: Progress) -> Tensors:
    """Upscales and refines; returns {"video": (B, C, F, H, W), "audio": ... or None}.

    In "tdp" mode the sound is listened to, not changed, and comes back as it came.
    """
    follows = request.mode == "sp"
    start = tensors["latent"]
    if request.upscale:
        start = _upscaled(start, models, progress)
    grid = tuple(start.shape[2:])
    scale = ScaleFactors(*models.facts.scale_factors)
    video = video_state(start, request.fps, scale=scale)
    audio = None
    if tensors["audio_latent"] is not None:
        audio = audio_state(tensors["audio_latent"], frozen=not follows)
    if follows:
        model = models.sequence_parallel()
    else:
        tiling = tdp_tiling(request, grid)
        _say_tiles(tiling.num_tiles, models.info.world_size, progress)
        model = models.tiled(tiling, grid, normalize_positions=request.normalize_positions)
    name = "SP refine" if follows else "TDP stage"
    sampler = _Sampler(name, plan_tdp_stage(request), request.seed, request.preview, models, progress)
    result = sampler.run(model, video, audio, tensors, grid=grid)
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
    progress.step("upscale", 0, 1)
    larger = on_first_rank(info, lambda: models.upsample(latent.to(info.device)).float().contiguous())
    latent = latent if larger is None else larger
    shape = torch.tensor(latent.shape, device=info.device)
    if info.world_size > 1:
        dist.broadcast(shape, src=0, group=info.group)
        latent = latent if info.rank == 0 else torch.empty(shape.tolist(), device=info.device)
        dist.broadcast(latent, src=0, group=info.group)
    progress.step("upscale", 1, 1)
    return latent.cpu()


class _Sampler:
    """Runs one sampling pass: noise, loop, progress, preview, cancel."""

    def __init__(
        self, name: str, plan: SamplingPlan, seed: int, preview: bool, models: LTXModels, progress: Progress
    ) -> None:
        self.name = name
        self.plan = plan
        self.seed = seed
        self.preview = preview
        self.models = models
        self.progress = progress

    def run(
        self,
        model: VelocityModel,
        video: StreamState,
        audio: StreamState | None,
        tensors: Tensors,
        *,
        grid: tuple[int, int, int],
    ) -> Tensors:
        video, audio = self._noisy(video, audio, tensors)
        device = self.models.info.device
        denoiser = GuidedDenoiser(
            model,
            _context("positive", tensors),
            _context("negative", tensors),
            video=self.plan.video,
            audio=self.plan.audio,
            num_layers=self.models.facts.num_layers,
        )

        show = Preview(self.models, self.progress) if self.preview and self.models.info.rank == 0 else None

        def on_step(step: int, of: int, sigma: float, video_x0: Tensor, audio_x0: Tensor | None) -> None:
            self.progress.step(self.name, step, of, sigma)
            self.progress.raise_if_cancelled()  # before the preview, for which the other ranks do not wait
            if show is not None:
                show(video_latent(video_x0, grid))

        self.progress.step(self.name, 0, len(self.plan.sigmas) - 1, self.plan.sigmas[0])
        self.progress.raise_if_cancelled()
        video, audio = denoise_loop(
            video.to(device),
            None if audio is None else audio.to(device),
            self.plan.sigmas,
            denoiser,
            on_step=on_step,
        )
        sound = None if audio is None else audio_latent(audio.latent.cpu(), self.models.facts.audio_channels)
        return {"video": video_latent(video.latent.cpu(), grid), "audio": sound}

    def _noisy(
        self, video: StreamState, audio: StreamState | None, tensors: Tensors
    ) -> tuple[StreamState, StreamState | None]:
        """Mixes in the given noise, or noise drawn on the CPU for the whole latent: the same for every world size."""
        level = self.plan.sigmas[0]
        if tensors["video_noise"] is None:
            return add_noise(video, audio, item_generators(self.seed, video.batch), level)
        video = video.with_noise(tensors["video_noise"], level)
        if audio is not None and tensors["audio_noise"] is not None:
            audio = audio.with_noise(tensors["audio_noise"], level)
        return video, audio


def _context(name: str, tensors: Tensors) -> PromptContext | None:
    if tensors.get(f"{name}_video") is None:
        return None
    return PromptContext(tensors[f"{name}_video"], tensors[f"{name}_audio"], tensors[f"{name}_mask"])
