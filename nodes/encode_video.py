"""Encode Video (LTX MGPU): pictures of a clip to the latent that the stages and Latent Condition take."""

from __future__ import annotations

from torch import Tensor

from .comfy import LTX_MGPU, io, run_job
from .handle import LTXHandle


class LTXMGPUEncodeVideo(io.ComfyNode):
    """Sends the clip to the fleet's video autoencoder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXMGPUEncodeVideo",
            display_name="Encode Video (LTX MGPU)",
            category="LTX MGPU",
            description="Encodes a clip, or one picture, to a video latent: a start for a stage (video to video), or a "
            "piece for Latent Condition.",
            inputs=[
                LTX_MGPU.Input("ltx", tooltip="From Load LTX MGPU."),
                io.Image.Input(
                    "images",
                    tooltip="8 n + 1 pictures in a row (1, 9, 17, ...); pictures beyond that are left out.",
                ),
                _side("width"),
                _side("height"),
            ],
            outputs=[
                io.Latent.Output("latent", display_name="video latent", tooltip="The clip, one cell for 32x32 pixels.")
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, ltx: LTXHandle, images: Tensor, width: int = 0, height: int = 0) -> io.NodeOutput:
        latent = run_job(
            cls.hidden.unique_id,
            ltx.heading(),
            ltx.guard,
            lambda watch: ltx.client.encode_video(images, height=height, width=width, watch=watch),
        )
        return io.NodeOutput({"samples": latent})


def _side(name: str) -> io.Input:
    return io.Int.Input(
        name,
        default=0,
        min=0,
        max=16384,
        step=32,
        tooltip=f"{name.capitalize()} in pixels, a multiple of 32: the clip is resized until it fills the size and "
        "cropped at its centre. 0 keeps the clip's own.",
    )
