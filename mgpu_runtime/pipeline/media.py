"""Writes a decoded clip to an MP4 file: H.264 pictures, AAC sound."""

from fractions import Fraction
from pathlib import Path

import av
import torch
from torch import Tensor

from .jobs import Decoded


def write_mp4(path: Path, clip: Decoded, fps: float) -> None:
    """Writes frames (F, H, W, 3) 0..1 at `fps` and, where there is one, waveform (1, 2, N) cut to the picture's length.

    Raises OSError where the file cannot be written.
    """
    rate = Fraction(fps).limit_denominator(1001)
    with av.open(str(path), "w") as container:
        # both streams must exist before the first packet: it writes the header
        video = container.add_stream("libx264", rate=rate)
        video.height, video.width = clip.frames.shape[1:3]
        video.pix_fmt = "yuv420p"
        sound = None
        if clip.waveform is not None:
            sound = container.add_stream("aac", rate=clip.sample_rate, layout="stereo")
        for picture in clip.frames:
            frame = av.VideoFrame.from_ndarray(_to_bytes(picture).numpy(), format="rgb24")
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if sound is not None:
            num_samples = round(len(clip.frames) / fps * clip.sample_rate)
            waveform = clip.waveform[0, :, :num_samples].contiguous().float()
            frame = av.AudioFrame.from_ndarray(waveform.numpy(), format="fltp", layout="stereo")
            frame.sample_rate = clip.sample_rate
            container.mux(sound.encode(frame))
            container.mux(sound.encode(None))


def _to_bytes(picture: Tensor) -> Tensor:
    return (picture.clamp(0, 1) * 255).round().to(torch.uint8).contiguous()
