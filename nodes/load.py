"""Load LTX MGPU: chooses the files and the devices. Starts nothing."""

from __future__ import annotations

import hashlib
from typing import Any

from mgpu_runtime.fleet import parse_devices
from mgpu_runtime.pipeline.settings import DEFAULT_SP_MAX_TOKENS, PRECISIONS, LTXSettings

from .comfy import LTX_MGPU, io, model_names, model_path, text_encoder_names, text_encoder_path
from .handle import open_handle

_NO_UPSAMPLER = "none"


class LTXMGPULoad(io.ComfyNode):
    """Describes a fleet; the workers start with the first job."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXMGPULoad",
            display_name="Load LTX MGPU",
            category="LTX MGPU",
            description="Chooses an LTX-2 model and the GPUs that run it together. The workers start with the first "
            "job and stay warm; equal settings share them.",
            inputs=[
                io.Combo.Input(
                    "checkpoint",
                    options=model_names("checkpoints"),
                    tooltip="A Lightricks LTX-2 file (transformer, VAEs and vocoder in one) under models/checkpoints.",
                ),
                io.Combo.Input(
                    "text_encoder",
                    options=text_encoder_names(),
                    tooltip="The Gemma 3 folder (with config.json and tokenizer) under models/text_encoders.",
                ),
                io.Combo.Input(
                    "upsampler",
                    options=[_NO_UPSAMPLER, *model_names("latent_upscale_models")],
                    default=_NO_UPSAMPLER,
                    tooltip="The latent upsampler under models/latent_upscale_models; TDP Upscale Stage needs it to "
                    "enlarge a clip.",
                ),
                io.String.Input(
                    "devices",
                    default="auto",
                    tooltip="auto: all CUDA GPUs (one CPU worker where there is none). 0,1: these GPUs. cpu:2: two CPU "
                    "workers.",
                ),
                io.Combo.Input(
                    "precision",
                    options=list(PRECISIONS),
                    default="auto",
                    tooltip="auto: bf16 on GPUs, fp32 on the CPU.",
                ),
                io.Int.Input(
                    "sp_max_tokens",
                    default=DEFAULT_SP_MAX_TOKENS,
                    min=1,
                    max=1 << 20,
                    tooltip="The most video tokens (latent frames x height / 32 x width / 32) one SP Stage may have. "
                    "More needs more memory on every GPU.",
                ),
            ],
            outputs=[LTX_MGPU.Output("ltx", display_name="ltx", tooltip="To every other LTX MGPU node.")],
        )

    @classmethod
    def validate_inputs(cls, devices: str | None = None) -> bool | str:
        if devices is None:
            return True
        try:
            parse_devices(devices)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> Any:
        """Changes with the files' times, so that a replaced file is read again; an unknown name is left to execute."""
        try:
            stamps = _settings(**inputs).stamps()
        except (ValueError, TypeError, OSError):
            return None
        # ComfyUI writes this value into the files it saves, where nobody wants to find the paths of a disk
        return hashlib.sha256(repr(stamps).encode("utf-8")).hexdigest()

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        return io.NodeOutput(open_handle(_settings(**inputs)))


def _settings(
    checkpoint: str, text_encoder: str, upsampler: str, devices: str, precision: str, sp_max_tokens: int
) -> LTXSettings:
    return LTXSettings(
        checkpoint=model_path("checkpoints", checkpoint),
        text_encoder=text_encoder_path(text_encoder),
        upsampler=None if upsampler == _NO_UPSAMPLER else model_path("latent_upscale_models", upsampler),
        devices=devices,
        precision=precision,
        sp_max_tokens=sp_max_tokens,
    )
