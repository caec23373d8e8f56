"""Distributed Decode: latents to pictures and sound, every worker decoding tiles."""

from __future__ import annotations

from mgpu_runtime.pipeline.jobs import Decode

from .comfy import LTX_MGPU, io, run_job
from .handle import LTXHandle
from .widgets import tiles_sentence
from .wires import Latent, read_latents, write_audio


class LTXMGPUDistributedDecode(io.ComfyNode):
    """Sends the decode to the fleet."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXMGPUDistributedDecode",
            display_name="Distributed Decode",
            category="LTX MGPU",
            description="Decodes the video latent in tiles on all workers, and the audio latent to sound.",
            inputs=[
                LTX_MGPU.Input("ltx", tooltip="From Load LTX MGPU."),
                io.Latent.Input("latent", tooltip="The video latent of a stage."),
                io.Latent.Input("audio_latent", optional=True, tooltip="The audio latent of a stage."),
                io.String.Input(
                    "tiles",
                    default="auto",
                    tooltip="Rows x columns of tiles, such as 2x2; auto chooses by the size of the clip.",
                ),
                io.Int.Input(
                    "overlap", default=4, min=0, max=64, tooltip="Latent cells (32 pixels each) that tiles share."
                ),
            ],
            outputs=[
                io.Image.Output("images", display_name="images", tooltip="The frames, for Create Video."),
                io.Audio.Output("audio", display_name="audio", tooltip="The sound, for Create Video."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, tiles: str | None = None) -> bool | str:
        return tiles_sentence(tiles)

    @classmethod
    def execute(
        cls, ltx: LTXHandle, latent: Latent, tiles: str, overlap: int, audio_latent: Latent | None = None
    ) -> io.NodeOutput:
        start = read_latents(latent, audio_latent)
        clip = run_job(
            cls.hidden.unique_id,
            ltx.heading(start.video[0, 0].numel()),
            ltx.guard,
            lambda watch: ltx.client.decode(Decode(tiles, overlap), start.video, audio_latent=start.audio, watch=watch),
        )
        return io.NodeOutput(clip.frames, write_audio(clip.waveform, clip.sample_rate))
