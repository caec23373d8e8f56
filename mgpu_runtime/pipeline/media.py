"""Files that people make and watch: pictures in, MP4 clips with H.264 pictures and AAC sound out."""

from fractions import Fraction
from pathlib import Path

import av
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from .jobs import Decoded


def read_picture(path: Path) -> Tensor:
    """Reads a picture, turned as its EXIF data say, as (1, H, W, 3) float32 of 0..1.

    Raises ValueError for a file that is no picture.
    """
    try:
        with Image.open(path) as file:
            upright = ImageOps.exif_transpose(file).convert("RGB")
            pixels = torch.frombuffer(bytearray(upright.tobytes()), dtype=torch.uint8)
    except UnidentifiedImageError:
        raise ValueError(f"{path} is no picture that can be read: choose a PNG, JPEG or WebP file") from None
    return pixels.view(1, upright.height, upright.width, 3).float() / 255


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
            frame.pts = 0  # else the encoder's lead-in of 1024 samples delays the sound
            container.mux(sound.encode(frame))
            container.mux(sound.encode(None))


def _to_bytes(picture: Tensor) -> Tensor:
    return (picture.clamp(0, 1) * 255).round().to(torch.uint8).contiguous()
