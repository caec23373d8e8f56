"""Distributed Decode: latents to pictures and sound, every worker decoding tiles."""

from __future__ import annotations

import logging

from mgpu_runtime.pipeline.jobs import Decode

from .comfy import LTX_MGPU, io, run_job
from .handle import LTXHandle
from .preflight import DECODE_NODE
from .widgets import tiles_sentence
from .wires import FRAME_RATE, Latent, is_sound, read_latents, read_sound_latent, write_audio

log = logging.getLogger("mgpu")

_SOUND_ALONE = "sound alone: there are no frames"


class LTXMGPUDistributedDecode(io.ComfyNode):
    """Sends the decode to the fleet."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id=DECODE_NODE,
            display_name="Distributed Decode",
            category="LTX MGPU",
            description="Decodes the video latent in tiles on all workers, and the audio latent to sound as long as "
            "the picture. Where a given sound drove the clip (audio to video), give that AUDIO to Create Video.",
            inputs=[
                LTX_MGPU.Input("ltx", tooltip="From Load LTX MGPU."),
                io.Latent.Input(
                    "latent", tooltip="The video latent of a stage. An audio latent alone is decoded to sound."
                ),
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
        job = Decode(tiles, overlap, fps=latent.get(FRAME_RATE))
        if audio_latent is None and is_sound(latent):
            video, sound = None, read_sound_latent(latent, "latent")
            log.warning("Distributed Decode decodes %s, so nothing that takes images can follow.", _SOUND_ALONE)
        else:
            start = read_latents(latent, audio_latent)
            video, sound = start.video, start.audio
        clip = run_job(
            cls.hidden.unique_id,
            f"{ltx.heading()} · {_SOUND_ALONE}" if video is None else ltx.heading(video[0, 0].numel()),
            ltx.guard,
            lambda watch: ltx.client.decode(job, video, audio_latent=sound, watch=watch),
        )
        frames = None if video is None else clip.frames
        return io.NodeOutput(frames, write_audio(clip.waveform, clip.sample_rate))
