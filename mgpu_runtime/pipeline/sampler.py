"""One sampling pass as every rank runs it, in lockstep: noise, loop, progress, preview, cancel.

Letters: B batch, C channels of a latent, F H W latent frames, rows and columns, T audio latent frames, M mel bins.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ..sampling.denoiser import GuidedDenoiser, VelocityModel
from ..sampling.loop import OnStep, denoise_loop
from ..sampling.noise import item_generators
from ..sampling.patchify import audio_latent, video_latent
from ..sampling.res2s import FreshNoise, res2s_loop
from ..sampling.state import StreamState, add_noise
from ..sampling.steppers import AncestralStepper, EulerStepper
from .jobs import PromptContext
from .models import LTXModels
from .plan import SamplingPlan
from .preview import Preview
from .progress import Progress

Tensors = dict[str, Tensor | None]
Streams = tuple[StreamState, StreamState | None]  # video, audio


@dataclass(frozen=True)
class Sampler:
    """Runs one sampling pass of a stage, `name` as the user reads it."""

    name: str
    plan: SamplingPlan
    seed: int
    preview: bool
    models: LTXModels
    progress: Progress

    def run(self, model: VelocityModel, streams: Streams, tensors: Tensors, *, grid: tuple[int, int, int]) -> Tensors:
        """Samples both streams; returns {"video": (B, C, F, H, W), "audio": (B, C', T, M) or None} on the CPU.

        Tokens that conditions have appended are dropped: the latents hold the clip alone.
        """
        device = self.models.info.device
        video, audio = (stream and stream.to(device) for stream in self._noisy(*streams, tensors))
        on_step = self._on_step(grid)
        self.progress.step(self.name, 0, len(self.plan.sigmas) - 1, self.plan.sigmas[0])
        self.progress.raise_if_cancelled()
        video, audio = self._loop(video.batch)(
            video, audio, self.plan.sigmas, self._denoiser(model, tensors), on_step=on_step
        )
        sound = None if audio is None else self._sound(audio)
        picture = video_latent(video.latent.cpu(), grid)
        self.models.check_exchange()
        return {"video": picture, "audio": sound}

    def _denoiser(self, model: VelocityModel, tensors: Tensors) -> GuidedDenoiser:
        return GuidedDenoiser(
            model,
            _context("positive", tensors),
            _context("negative", tensors),
            video=self.plan.video,
            audio=self.plan.audio,
            video_by_sigma=self.plan.video_by_sigma,
            audio_by_sigma=self.plan.audio_by_sigma,
            num_layers=self.models.facts.num_layers,
            max_batch_size=self.plan.max_batch_size,
        )

    def _loop(self, batch: int) -> partial:
        """Returns the loop of the plan's sampler, ready to be called with the streams."""
        eta = self.plan.eta
        if self.plan.sampler == "res_2s":
            return partial(res2s_loop, noise=FreshNoise(self.seed, batch, eta=eta))
        ancestral = self.plan.sampler == "ancestral"
        return partial(
            denoise_loop, stepper=AncestralStepper(self.seed, batch, eta=eta) if ancestral else EulerStepper()
        )

    def _on_step(self, grid: tuple[int, int, int]) -> OnStep:
        show = Preview(self.models, self.progress) if self.preview and self.models.info.rank == 0 else None

        def on_step(step: int, of: int, sigma: float, video_x0: Tensor, audio_x0: Tensor | None) -> None:
            self.progress.step(self.name, step, of, sigma)
            self.progress.raise_if_cancelled()  # before the preview, for which the other ranks do not wait
            if show is not None:
                show(video_latent(video_x0, grid))

        return on_step

    def _sound(self, audio: StreamState) -> Tensor:
        return audio_latent(audio.latent[:, : audio.num_own].cpu(), self.models.facts.audio_channels)

    def _noisy(self, video: StreamState, audio: StreamState | None, tensors: Tensors) -> Streams:
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
