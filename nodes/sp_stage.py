"""SP Stage: samples a clip with its tokens spread over all workers, exactly as one worker would."""

from __future__ import annotations

from typing import Any

import torch

from mgpu_runtime.pipeline.checks import check_plan
from mgpu_runtime.pipeline.jobs import SCHEDULES, SPStage

from .comfy import LTX_MGPU, io, run_job
from .guidance import BY_MODEL, GuidanceWidgets
from .handle import LTXHandle
from .preflight import check_sp_stage
from .widgets import seed_input
from .wires import (
    Conditioning,
    Latent,
    read_context,
    read_latents,
    read_sigmas,
    write_audio_latent,
    write_latent,
)


class LTXMGPUSPStage(io.ComfyNode):
    """Sends one sampling pass to the fleet."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXMGPUSPStage",
            display_name="SP Stage",
            category="LTX MGPU",
            description="Makes video and sound with sequence parallelism: every worker holds a part of the tokens, and "
            "the clip is the one that a single GPU would have made.",
            inputs=[*_wires(), *_sampling_widgets(), *_guidance_widgets()],
            outputs=[
                io.Latent.Output("video_latent", display_name="video latent", tooltip="The picture."),
                io.Latent.Output("sound_latent", display_name="audio latent", tooltip="The sound."),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def check_lazy_status(
        cls,
        ltx: LTXHandle,
        latent: Latent,
        audio_latent: Latent | None = None,
        positive: Conditioning | None = None,
        **inputs: Any,
    ) -> list[str]:
        check_sp_stage(cls.hidden.prompt or {}, cls.hidden.unique_id, ltx, latent, audio_latent)
        connected, negative = "negative" in inputs, inputs.pop("negative", None)
        job = _job(ltx, **inputs)
        if not connected:
            check_plan(job, ltx.client.check(), None)
        prompts = {"positive": (True, positive), "negative": (connected, negative)}
        return [name for name, (wanted, prompt) in prompts.items() if wanted and prompt is None]

    @classmethod
    def execute(
        cls,
        ltx: LTXHandle,
        positive: Conditioning,
        latent: Latent,
        negative: Conditioning | None = None,
        audio_latent: Latent | None = None,
        **widgets: Any,
    ) -> io.NodeOutput:
        start = read_latents(latent, audio_latent)
        job = _job(ltx, **widgets)
        prompts = (read_context(positive, "positive"), None if negative is None else read_context(negative, "negative"))
        result = run_job(
            cls.hidden.unique_id,
            ltx.heading(start.video[0, 0].numel()),
            ltx.guard,
            lambda watch: ltx.client.sp_stage(
                job,
                *prompts,
                start.video,
                noise_mask=start.noise_mask,
                audio_latent=start.audio,
                watch=watch,
            ),
        )
        return io.NodeOutput(write_latent(latent, result.video, job.fps), write_audio_latent(result.audio, job.fps))


def _job(
    ltx: LTXHandle,
    fps: float,
    seed: int,
    schedule: str,
    steps: int,
    sigmas: torch.Tensor | None = None,
    **guidance: float,
) -> SPStage:
    job = SPStage(seed=seed, fps=fps, schedule=schedule, steps=steps, sigmas=read_sigmas(sigmas))
    return GuidanceWidgets(**guidance).guide(job, ltx.client.check())


def _wires() -> list[io.Input]:
    return [
        LTX_MGPU.Input("ltx", tooltip="From Load LTX MGPU."),
        io.Conditioning.Input("positive", lazy=True, tooltip="From Encode Prompt (LTX MGPU)."),
        io.Latent.Input(
            "latent",
            tooltip="Size and start of the clip: Empty LTXV Latent Video (width and height multiples of 32, length "
            "8 n + 1), or a latent with a noise mask that keeps some frames.",
        ),
        io.Conditioning.Input(
            "negative",
            optional=True,
            lazy=True,
            tooltip="From Encode Prompt (LTX MGPU); used only with guidance.",
        ),
        io.Latent.Input(
            "audio_latent",
            optional=True,
            tooltip="Sound to start from; normally left open, and the model makes the sound.",
        ),
        io.Sigmas.Input("sigmas", optional=True, tooltip="Noise levels to use unchanged instead of the schedule."),
    ]


def _sampling_widgets() -> list[io.Input]:
    return [
        io.Float.Input(
            "fps",
            default=24.0,
            min=1.0,
            max=240.0,
            step=0.01,
            tooltip="Frames a second; the following nodes read it from the latent. Give Create Video the same.",
        ),
        seed_input(),
        io.Combo.Input(
            "schedule",
            options=list(SCHEDULES),
            default="auto",
            tooltip="distilled: the 8 fixed steps of the distilled model, no guidance. ltx2: the schedule of the full "
            "model. auto: distilled if the checkpoint's file name says so, else ltx2.",
        ),
        io.Int.Input(
            "steps",
            default=0,
            min=0,
            max=1000,
            tooltip="Steps of the ltx2 schedule; 0 takes the model's own number. Leave it 0 with distilled or sigmas.",
        ),
    ]


def _guidance_widgets() -> list[io.Input]:
    def scale(name: str, neutral: str, meaning: str, high: float = 30.0) -> io.Input:
        tooltip = f"{meaning} {neutral} switches it off, -1 takes the model's own value (off when distilled)."
        return io.Float.Input(name, default=BY_MODEL, min=BY_MODEL, max=high, step=0.05, tooltip=tooltip)

    return [
        scale("video_cfg", "1", "How strongly the picture follows the prompt and avoids the negative prompt."),
        scale("audio_cfg", "1", "How strongly the sound follows the prompt and avoids the negative prompt."),
        scale("video_stg", "0", "Spatio-temporal guidance of the picture: steadier shapes and motion."),
        scale("audio_stg", "0", "Spatio-temporal guidance of the sound."),
        io.Int.Input(
            "stg_block",
            default=-1,
            min=-1,
            max=1000,
            tooltip="The block that spatio-temporal guidance disturbs; -1 takes the model's own.",
        ),
        scale("rescale", "0", "Pulls the contrast of the guided result back to normal.", high=1.0),
        scale("modality_scale", "1", "How strongly picture and sound follow each other."),
    ]
