"""LoRA (LTX MGPU): adds a LoRA to the model of the stages behind it. Starts nothing, restarts nothing."""

from __future__ import annotations

from typing import Any

from mgpu_runtime.pipeline.jobs import LoRASpec
from mgpu_runtime.weights.header import content_key
from mgpu_runtime.weights.lora import LoRAFile

from .comfy import LTX_MGPU, io, model_names, model_path
from .graph import LORA_NODE
from .handle import LTXHandle
from .widgets import fingerprint

FOLDER = "loras"


def check_lora_inputs(ltx: LTXHandle, inputs: dict[str, Any]) -> None:
    """Checks a LoRA node of a later stage by its widgets; a linked one is checked when it runs."""
    name = inputs.get("lora")
    if isinstance(name, str):
        try:
            ltx.client.check_loras([LoRASpec(model_path(FOLDER, name))])
        except ValueError as error:  # it is shown on the stage that is about to run
            raise ValueError(f"LoRA (LTX MGPU): {error}") from error


class LTXMGPULoRA(io.ComfyNode):
    """Appends a LoRA to a handle; the stages send it with their jobs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id=LORA_NODE,
            display_name="LoRA (LTX MGPU)",
            category="LTX MGPU",
            description="Adds a LoRA to the model. Chain several for several LoRAs. Only what is connected behind this "
            "node uses it, so each stage can have LoRAs of its own; the workers stay warm whatever you change here.",
            inputs=[
                LTX_MGPU.Input("ltx", tooltip="From Load LTX MGPU, or from another LoRA (LTX MGPU)."),
                io.Combo.Input(
                    "lora",
                    options=model_names(FOLDER),
                    tooltip="A LoRA for LTX-2 under models/loras, in any of the usual key styles.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-10.0,
                    max=10.0,
                    step=0.05,
                    tooltip="How strongly the LoRA changes the model: 1 as trained, 0 not at all, below 0 in reverse.",
                ),
            ],
            outputs=[
                LTX_MGPU.Output("ltx_out", display_name="ltx", tooltip="The model with the LoRA, to the stages."),
            ],
        )

    @classmethod
    def validate_inputs(cls, lora: str | None = None) -> bool | str:
        if lora is None:  # a linked value is not known yet
            return True
        try:
            LoRAFile(model_path(FOLDER, lora))
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, lora: str, **inputs: Any) -> Any:
        """Changes with the file's time, so that a replaced file is read again; an unknown name is left to execute."""
        try:
            stamp = content_key(model_path(FOLDER, lora))
        except (ValueError, TypeError):
            return None
        return fingerprint(stamp)

    @classmethod
    def execute(cls, ltx: LTXHandle, lora: str, strength: float) -> io.NodeOutput:
        spec = LoRASpec(model_path(FOLDER, lora), strength)
        ltx.client.check_loras([spec])
        return io.NodeOutput(ltx.with_lora(spec))
