"""TDP Upscale Stage: enlarges the latent and refines it, every worker taking tiles of the picture."""

from __future__ import annotations

import logging
from typing import Any

import torch

from mgpu_runtime.pipeline.conditions import Conditions
from mgpu_runtime.pipeline.jobs import SAMPLERS

from .comfy import LTX_MGPU, LTX_MGPU_CONDITIONS, io, run_job
from .handle import LTXHandle
from .preflight import FPS_OF_LATENT, TDP_MODES, TDP_NODE, check_tdp_stage, tdp_job
from .widgets import seed_input, tiles_sentence
from .wires import (
    FRAME_RATE,
    Conditioning,
    Latent,
    read_context,
    read_latents,
    write_audio_latent,
    write_latent,
)

log = logging.getLogger("mgpu")


class LTXMGPUTDPUpscaleStage(io.ComfyNode):
    """Sends the second stage to the fleet."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id=TDP_NODE,
            display_name="TDP Upscale Stage",
            category="LTX MGPU",
            description="Enlarges a clip with the latent upsampler and refines it. In tdp mode the picture is cut into "
            "overlapping tiles that the workers share; the sound of the first stage passes through.",
            inputs=[*_wires(), *_widgets(), *_later_inputs()],
            outputs=[
                io.Latent.Output("video_latent", display_name="video latent", tooltip="The refined picture."),
                io.Latent.Output(
                    "sound_latent",
                    display_name="audio latent",
                    tooltip="The sound: passed through in tdp mode, refined in sp mode.",
                ),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def validate_inputs(cls, tiles: str | None = None) -> bool | str:
        return tiles_sentence(tiles)

    @classmethod
    def check_lazy_status(cls, ltx: LTXHandle, latent: Latent, **inputs: Any) -> list[str]:
        positive, audio_latent = inputs.pop("positive", None), inputs.pop("audio_latent", None)
        conditions = inputs.pop("conditions", ())
        job = tdp_job(latent.get(FRAME_RATE), loras=ltx.loras, **inputs)
        graph, node_id = cls.hidden.prompt or {}, cls.hidden.unique_id
        check_tdp_stage(graph, node_id, ltx, latent, audio_latent, job, conditions)
        return ["positive"] if positive is None else []

    @classmethod
    def execute(
        cls,
        ltx: LTXHandle,
        positive: Conditioning,
        latent: Latent,
        audio_latent: Latent | None = None,
        conditions: Conditions = (),
        **widgets: Any,
    ) -> io.NodeOutput:
        start = read_latents(latent, audio_latent)
        job = tdp_job(latent.get(FRAME_RATE), loras=ltx.loras, **widgets)
        prompt = read_context(positive, "positive")
        if start.noise_mask is not None or start.audio_mask is not None:
            log.warning("TDP Upscale Stage refines the whole clip: the latent's noise mask is not used here.")
        result = run_job(
            cls.hidden.unique_id,
            ltx.heading(_num_tokens(start.video, ltx.client.check().upsample_scale if job.upscale else 1)),
            ltx.guard,
            lambda watch: ltx.client.tdp_stage(
                job, prompt, start.video, audio_latent=start.audio, conditions=conditions, watch=watch
            ),
        )
        return io.NodeOutput(write_latent(latent, result.video, job.fps), write_audio_latent(result.audio, job.fps))


def _num_tokens(video: torch.Tensor, scale: float) -> int:
    """Counts the tokens of a latent (B, C, F, H, W) after an upscale."""
    frames, height, width = video.shape[2:]
    return frames * int(height * scale) * int(width * scale)


def _wires() -> list[io.Input]:
    return [
        LTX_MGPU.Input("ltx", tooltip="From Load LTX MGPU; it needs an upsampler when upscale is on."),
        io.Conditioning.Input("positive", lazy=True, tooltip="From Encode Prompt (LTX MGPU)."),
        io.Latent.Input("latent", tooltip="The video latent of SP Stage."),
        io.Latent.Input("audio_latent", optional=True, tooltip="The audio latent of SP Stage."),
        io.Sigmas.Input(
            "sigmas",
            optional=True,
            tooltip="Noise levels of the refinement. Left open: 0.625, 0.4, 0 in tdp mode; 0.909375, 0.725, 0.421875, "
            "0 in sp mode.",
        ),
    ]


def _widgets() -> list[io.Input]:
    return [
        seed_input(),
        io.Boolean.Input(
            "upscale", default=True, tooltip="Enlarge with the latent upsampler first; off refines at the same size."
        ),
        io.Combo.Input(
            "mode",
            options=list(TDP_MODES),
            default=next(iter(TDP_MODES)),
            tooltip="tdp: tiles shared by the workers, an approximation; the sound of the first stage is kept. sp: the "
            "whole picture spread over the workers, exact, and the sound is refined with it.",
        ),
        io.String.Input(
            "tiles",
            default="auto",
            tooltip="Rows x columns of tiles in tdp mode, such as 1x2; auto chooses by the size of the clip.",
        ),
        io.Int.Input(
            "overlap",
            default=5,
            min=0,
            max=64,
            tooltip="Latent cells (32 pixels each) that neighbouring tiles share. More hides seams and costs time.",
        ),
        io.Boolean.Input(
            "normalize_positions",
            default=True,
            tooltip="Let each tile's positions start at zero, where the model is at home.",
        ),
        io.Float.Input(
            "fps",
            default=FPS_OF_LATENT,
            min=FPS_OF_LATENT,
            max=240.0,
            step=0.01,
            tooltip="Frames a second; 0 takes the latent's own, which SP Stage has written there.",
        ),
    ]


def _later_inputs() -> list[io.Input]:
    """Inputs that came after the first release: optional, so that a graph without them runs as before."""
    return [
        io.Combo.Input(
            "sampler",
            options=list(SAMPLERS),
            default="auto",
            optional=True,
            tooltip="As in SP Stage; auto is euler. The high-quality preset refines with res_2s too.",
        ),
        LTX_MGPU_CONDITIONS.Input(
            "conditions",
            optional=True,
            tooltip="Pictures, clips and sound to follow: connect the same as in SP Stage; they are fitted to the "
            "larger picture.",
        ),
    ]
