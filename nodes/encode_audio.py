"""Encode Audio (LTX MGPU): sound to the latent that the stages and Reference Audio take."""

from __future__ import annotations

from typing import Any

from mgpu_runtime.sampling.sizes import pixel_frames

from .comfy import LTX_MGPU, io, run_job
from .handle import LTXHandle
from .widgets import fps_input
from .wires import FRAME_RATE, Latent, read_latent, write_audio_latent


class LTXMGPUEncodeAudio(io.ComfyNode):
    """Sends the sound to the fleet's audio autoencoder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXMGPUEncodeAudio",
            display_name="Encode Audio (LTX MGPU)",
            category="LTX MGPU",
            description="Encodes sound to an audio latent. For a clip that follows it (audio to video), fit it to the "
            "clip here, connect it to SP Stage with audio_mode keep, and give the original AUDIO, not the decoded "
            "one, to Create Video.",
            inputs=[
                LTX_MGPU.Input("ltx", tooltip="From Load LTX MGPU."),
                io.Audio.Input(
                    "audio",
                    tooltip="Sound at any rate. One channel becomes two; more than two are mixed down.",
                ),
                io.Int.Input(
                    "frames",
                    default=0,
                    min=0,
                    max=100_000,
                    tooltip="Frames of the clip that the sound is fitted to: it is cut, or followed by silence. 0 "
                    "keeps the sound's own length, or the video latent's where one is connected.",
                ),
                fps_input("Frames per second of that clip."),
                io.Latent.Input(
                    "video_latent",
                    optional=True,
                    tooltip="The clip that the sound is fitted to, in place of frames; a stage's latent brings its own "
                    "fps.",
                ),
            ],
            outputs=[io.Latent.Output("latent", display_name="audio latent", tooltip="The sound.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        ltx: LTXHandle,
        audio: dict[str, Any],
        frames: int = 0,
        fps: float = 24.0,
        video_latent: Latent | None = None,
    ) -> io.NodeOutput:
        if video_latent is not None:
            length = read_latent(video_latent, "video latent").shape[2]
            frames = frames or pixel_frames(length, ltx.client.check().scale_factors[0])
            fps = video_latent.get(FRAME_RATE, fps)
        waveform, rate = audio["waveform"], audio["sample_rate"]
        latent = run_job(
            cls.hidden.unique_id,
            ltx.heading(),
            ltx.guard,
            lambda watch: ltx.client.encode_audio(waveform, rate, num_frames=frames, fps=fps, watch=watch),
        )
        return io.NodeOutput(write_audio_latent(latent, fps))
