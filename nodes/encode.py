"""Encode Prompt (LTX MGPU): text to the contexts that the transformer reads, one for video and one for sound."""

from __future__ import annotations

from mgpu_runtime.pipeline.jobs import TEXT_MODES, Encode

from .comfy import LTX_MGPU, io, run_job
from .handle import LTXHandle
from .wires import write_context


class LTXMGPUEncodePrompt(io.ComfyNode):
    """Sends both prompts to the fleet's text encoder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXMGPUEncodePrompt",
            display_name="Encode Prompt (LTX MGPU)",
            category="LTX MGPU",
            description="Encodes the prompts with Gemma and the model's own connectors. Only this node's conditioning "
            "carries the context for sound, so the stages take no other.",
            inputs=[
                LTX_MGPU.Input("ltx", tooltip="From Load LTX MGPU."),
                io.String.Input(
                    "prompt",
                    multiline=True,
                    dynamic_prompts=True,
                    default="",
                    tooltip="What is seen and heard.",
                ),
                io.String.Input(
                    "negative_prompt",
                    multiline=True,
                    dynamic_prompts=True,
                    default="",
                    tooltip="What to keep away from. Used only with guidance (schedule ltx2, or cfg above 1).",
                ),
                io.Int.Input(
                    "max_length",
                    default=1024,
                    min=128,
                    max=8192,
                    step=128,
                    tooltip="Text positions, a multiple of 128. The published models are made for 1024.",
                ),
                io.Combo.Input(
                    "mode",
                    options=list(TEXT_MODES),
                    default="auto",
                    optional=True,
                    tooltip="Which GPUs hold Gemma. first: the first one. sharded: its layers are spread over all, for "
                    "GPUs too small for the whole. replicated: each has a whole one and encodes a share of the "
                    "prompts. auto: the first where there is room, else sharded.",
                ),
                io.Boolean.Input(
                    "release_text_encoder",
                    default=False,
                    optional=True,
                    tooltip="Frees Gemma's memory after encoding (24 GB in bf16). Prompts seen before need no Gemma; a "
                    "new one loads it again.",
                ),
            ],
            outputs=[
                io.Conditioning.Output("positive", display_name="positive", tooltip="The prompt."),
                io.Conditioning.Output("negative", display_name="negative", tooltip="The negative prompt."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, max_length: int | None = None) -> bool | str:
        try:
            Encode(("",), 128 if max_length is None else max_length)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls,
        ltx: LTXHandle,
        prompt: str,
        negative_prompt: str,
        max_length: int,
        mode: str = "auto",
        release_text_encoder: bool = False,
    ) -> io.NodeOutput:
        options = {"mode": mode, "release": release_text_encoder, "loras": ltx.loras}
        positive, negative = run_job(
            cls.hidden.unique_id,
            ltx.heading(),
            ltx.guard,
            lambda watch: ltx.client.encode(prompt, negative_prompt, max_length, watch=watch, **options),
        )
        return io.NodeOutput(write_context(positive), write_context(negative))
