"""SP Stage: samples a clip with its tokens spread over all workers, exactly as one worker would."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from mgpu_runtime.pipeline.checks import check_plan
from mgpu_runtime.pipeline.conditions import Conditions
from mgpu_runtime.pipeline.jobs import AUDIO_MODES, SAMPLERS, SCHEDULE_TOKENS, SCHEDULES, SPStage

from .comfy import LTX_MGPU, LTX_MGPU_CONDITIONS, LTX_MGPU_GUIDANCE, io, run_job
from .guidance import GuidanceSet, GuidanceWidgets
from .handle import LTXHandle
from .preflight import check_sp_stage
from .widgets import fps_input, guidance_input, seed_input
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
            inputs=[*_wires(), *_sampling_widgets(), *_guidance_widgets(), *_later_inputs()],
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
        connected, negative = "negative" in inputs, inputs.pop("negative", None)
        conditions = inputs.pop("conditions", ())
        job = _job(ltx, **inputs)
        graph, node_id = cls.hidden.prompt or {}, cls.hidden.unique_id
        check_sp_stage(graph, node_id, ltx, latent, audio_latent, job, conditions)
        check_plan(job, ltx.client.check(), has_negative=connected)
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
        conditions: Conditions = (),
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
                audio_mask=start.audio_mask,
                conditions=conditions,
                watch=watch,
            ),
        )
        return io.NodeOutput(write_latent(latent, result.video, job.fps), write_audio_latent(result.audio, job.fps))


def _job(
    ltx: LTXHandle,
    *,
    sigmas: torch.Tensor | None = None,
    guidance: tuple[GuidanceSet, ...] = (),
    **widgets: Any,
) -> SPStage:
    """Builds the job of some widgets; those that a graph of an earlier version lacks keep their defaults."""
    guiding = {field.name: widgets.pop(field.name) for field in fields(GuidanceWidgets) if field.name in widgets}
    job = SPStage(sigmas=read_sigmas(sigmas), loras=ltx.loras, **widgets)
    return GuidanceWidgets(**guiding).guide(job, ltx.client.check(), guidance)


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
            tooltip="Sound to start from, or to keep (audio_mode); normally left open, and the model makes the sound.",
        ),
        io.Sigmas.Input("sigmas", optional=True, tooltip="Noise levels to use unchanged instead of the schedule."),
    ]


def _sampling_widgets() -> list[io.Input]:
    return [
        fps_input("Frames a second; the following nodes read it from the latent. Give Create Video the same."),
        seed_input(),
        io.Combo.Input(
            "schedule",
            options=list(SCHEDULES),
            default="auto",
            tooltip="distilled: the 8 fixed steps of the distilled model, no guidance. ltx2: the schedule of the full "
            "model. hq: the high-quality preset, 15 steps of res_2s. linear_quadratic, beta: other ways to space the "
            "steps. auto: distilled if the checkpoint's file name says so, else ltx2.",
        ),
        io.Int.Input(
            "steps",
            default=0,
            min=0,
            max=1000,
            tooltip="Steps of the schedule; 0 takes the model's own number. Leave it 0 with distilled or sigmas.",
        ),
    ]


def _guidance_widgets() -> list[io.Input]:
    return [
        guidance_input("video_cfg", "1", "How strongly the picture follows the prompt and avoids the negative prompt."),
        guidance_input("audio_cfg", "1", "How strongly the sound follows the prompt and avoids the negative prompt."),
        guidance_input("video_stg", "0", "Spatio-temporal guidance of the picture: steadier shapes and motion."),
        guidance_input("audio_stg", "0", "Spatio-temporal guidance of the sound."),
        io.Int.Input(
            "stg_block",
            default=-1,
            min=-1,
            max=1000,
            tooltip="The block that spatio-temporal guidance disturbs; -1 takes the model's own.",
        ),
        guidance_input("rescale", "0", "Pulls the contrast of the guided result back to normal.", high=1.0),
        guidance_input("modality_scale", "1", "How strongly picture and sound follow each other."),
    ]


def _later_inputs() -> list[io.Input]:
    """Inputs that came after the first release: optional, so that a graph without them runs as before."""
    return [
        io.Combo.Input(
            "sampler",
            options=list(SAMPLERS),
            default="auto",
            optional=True,
            tooltip="euler: one evaluation a step. ancestral: the same with fresh noise. res_2s: two evaluations a "
            "step, more exact, with fresh noise. auto: what the model and the schedule are made for.",
        ),
        io.Int.Input(
            "max_batch_size",
            default=0,
            min=0,
            max=1024,
            optional=True,
            tooltip="Guidance runs up to four passes a step; this is how many go through the model at once. 1 needs "
            "the least memory, 0 sets no limit. The clip is the same up to rounding.",
        ),
        io.Combo.Input(
            "audio_mode",
            options=list(AUDIO_MODES),
            default="generate",
            optional=True,
            tooltip="generate: make sound with the picture. keep: leave the audio latent as it is and let the picture "
            "follow it. none: a picture without sound.",
        ),
        io.Combo.Input(
            "schedule_tokens",
            options=list(SCHEDULE_TOKENS),
            default="auto",
            optional=True,
            tooltip="What the ltx2 schedule is shifted by: anchor, the same for every size, or the clip's own number "
            "of tokens. auto: the clip for hq, else anchor.",
        ),
        LTX_MGPU_CONDITIONS.Input(
            "conditions", optional=True, tooltip="Pictures, clips and sound to follow, from the condition nodes."
        ),
        LTX_MGPU_GUIDANCE.Input(
            "guidance", optional=True, tooltip="From Guidance (LTX MGPU), in place of the guidance widgets here."
        ),
    ]
