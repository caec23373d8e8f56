"""Predict Length (LTX MGPU): how long the shot of a prompt naturally is."""

from __future__ import annotations

from mgpu_runtime.pipeline.text_length import clip_length

from .comfy import LTX_MGPU, io, run_job
from .handle import LTXHandle
from .widgets import fps_input
from .wires import Conditioning, read_context


class LTXMGPUPredictLength(io.ComfyNode):
    """Asks the model's duration head."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXMGPUPredictLength",
            display_name="Predict Length (LTX MGPU)",
            category="LTX MGPU",
            description="Lets the prompt choose the length of the clip: LTX-2.5's duration head predicts how long the "
            "shot is. Connect the length to EmptyLTXVLatentVideo.",
            inputs=[
                LTX_MGPU.Input("ltx", tooltip="From Load LTX MGPU, with a duration_head file."),
                io.Conditioning.Input("positive", tooltip="The prompt, from Encode Prompt."),
                fps_input("Frames per second, as in SP Stage."),
                io.Float.Input(
                    "max_seconds",
                    default=20.0,
                    min=0.1,
                    max=600.0,
                    step=0.1,
                    tooltip="The clip is not made longer than this, whatever is predicted.",
                ),
            ],
            outputs=[
                io.Int.Output(
                    "length", display_name="length", tooltip="Frames of the clip: 8k+1, rounded up, within the limit."
                ),
                io.Float.Output("seconds", display_name="seconds", tooltip="The prediction itself, without the limit."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, ltx: LTXHandle, positive: Conditioning, fps: float, max_seconds: float) -> io.NodeOutput:
        context = read_context(positive, "positive")
        seconds = run_job(
            cls.hidden.unique_id,
            ltx.heading(),
            ltx.guard,
            lambda watch: ltx.client.predict_seconds(context, watch=watch),
        )
        factor = ltx.client.check().scale_factors[0]
        return io.NodeOutput(clip_length(seconds, fps, max_seconds, factor), seconds)
