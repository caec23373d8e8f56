"""Load LTX MGPU: chooses the files and the devices. Starts nothing."""

from __future__ import annotations

from typing import Any

from mgpu_runtime.exchange.choice import TRANSPORTS
from mgpu_runtime.fleet import parse_devices
from mgpu_runtime.pipeline.settings import DEFAULT_SP_MAX_TOKENS, PRECISIONS, LTXSettings, default_exchange_timeout

from .comfy import (
    LTX_MGPU,
    io,
    model_names,
    model_path,
    text_encoder_files,
    text_encoder_names,
    text_encoder_path,
)
from .handle import open_handle
from .widgets import fingerprint

_NONE = "none"
_CHECKPOINTS = ("checkpoints", "diffusion_models")  # whole models, then transformers alone

# Input for a part in a file of its own -> its model folder, and what the tooltip says of it.
_PARTS = {
    "video_vae": ("vae", "The file with the video autoencoder, for a checkpoint without one or to replace its own."),
    "audio_vae": ("vae", "The file with audio autoencoder and vocoder, for a checkpoint without them."),
    "text_projection": (
        "text_encoders",
        "The file with the text projection (for LTX-2.0 the connectors too), where neither the checkpoint nor the text "
        "encoder file holds it.",
    ),
    "duration_head": ("model_patches", "LTX-2.5's duration head, to let the prompt choose the length of the clip."),
}


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
                    options=model_names(*_CHECKPOINTS),
                    tooltip="An LTX-2 file: a whole model under models/checkpoints, or a transformer alone under "
                    "models/diffusion_models, whose other parts are chosen below.",
                ),
                io.Combo.Input(
                    "text_encoder",
                    options=text_encoder_names(),
                    tooltip="Gemma 3 for LTX-2.0 and 2.3, LTX's Gemma 4 for 2.5: a Hugging Face folder or a single "
                    "file under models/text_encoders.",
                ),
                io.Combo.Input(
                    "upsampler",
                    options=[_NONE, *model_names("latent_upscale_models")],
                    default=_NONE,
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
                    tooltip="What is computed in. auto: bf16 on GPUs, fp32 on the CPU. fp8: as auto, with the "
                    "transformer's big weights rounded to 8 bit, half the memory. fp8 and nvfp4 files stay so in all.",
                ),
                io.Int.Input(
                    "sp_max_tokens",
                    default=DEFAULT_SP_MAX_TOKENS,
                    min=1,
                    max=1 << 20,
                    tooltip="The most video tokens (latent frames x height / 32 x width / 32) one SP Stage may have. "
                    "More needs more memory on every GPU.",
                ),
                *(_part_input(name) for name in _PARTS),
                _transport_input(),
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
        return fingerprint(stamps)

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        return io.NodeOutput(open_handle(_settings(**inputs)))


def _part_input(name: str) -> io.Combo.Input:
    """Makes the input for a part's own file; optional, so that graphs saved before it existed still run."""
    folder, tooltip = _PARTS[name]
    files = text_encoder_files() if folder == "text_encoders" else model_names(folder)
    return io.Combo.Input(
        name, options=[_NONE, *files], default=_NONE, optional=True, tooltip=f"{tooltip} Under models/{folder}."
    )


def _transport_input() -> io.Combo.Input:
    return io.Combo.Input(
        "transport",
        options=list(TRANSPORTS),
        default="auto",
        optional=True,
        tooltip="How the workers exchange tensors in sequence parallelism. auto: the fastest that works on this "
        "machine; the log names it. Choose one only to compare, or when auto makes trouble.",
    )


def _settings(
    checkpoint: str,
    text_encoder: str,
    upsampler: str,
    devices: str,
    precision: str,
    sp_max_tokens: int,
    transport: str = "auto",
    **parts: str | None,
) -> LTXSettings:
    chosen = {name: file for name, file in parts.items() if file not in (None, _NONE)}
    return LTXSettings(
        checkpoint=model_path(_CHECKPOINTS, checkpoint),
        text_encoder=text_encoder_path(text_encoder),
        upsampler=None if upsampler == _NONE else model_path("latent_upscale_models", upsampler),
        devices=devices,
        precision=precision,
        sp_max_tokens=sp_max_tokens,
        transport=transport,
        exchange_timeout=default_exchange_timeout(),
        **{name: model_path(_PARTS[name][0], file) for name, file in chosen.items()},
    )
