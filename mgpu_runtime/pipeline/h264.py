"""Compresses pictures as frames of films are compressed. Letters: H W rows and columns of pixels."""

from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np
import torch
from torch import Tensor


def compress(colours_HWC: Tensor, crf: int) -> Tensor:
    """Returns a picture (H, W, 3) of 0..255 after H.264; an odd last row or column, which H.264 cannot hold, goes."""
    picture = colours_HWC.round().to(torch.uint8).numpy()
    packets = _encode(_even(picture), crf)
    decoder = av.CodecContext.create("h264", "r")
    (frame,) = [frame for packet in (*packets, None) for frame in decoder.decode(packet)]
    return torch.from_numpy(frame.to_ndarray(format="rgb24")).float()


def open_encoder(name: str = "libx264") -> av.VideoCodecContext:
    """Returns an encoder that was not set up yet; raises ValueError with one sentence where PyAV was built without."""
    try:
        return av.CodecContext.create(name, "w")
    except ValueError as error:
        raise ValueError(
            f"this PyAV has no {name}, which compresses pictures as the model was trained: install PyAV's own wheel "
            "(pip install av), or set the image's crf to 0"
        ) from error


def _encode(picture: np.ndarray, crf: int) -> Sequence[av.Packet]:
    """Encodes one picture (H, W, 3) of bytes, both sides even.

    On one thread: more of them cut the picture into slices, and then it would depend on the machine's cores.
    """
    encoder = open_encoder()
    encoder.height, encoder.width, encoder.pix_fmt = *picture.shape[:2], "yuv420p"
    encoder.framerate, encoder.time_base = Fraction(1), Fraction(1)
    encoder.options = {"crf": str(crf), "preset": "veryfast"}
    encoder.thread_count = 1
    frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="yuv420p")
    return [*encoder.encode(frame), *encoder.encode(None)]


def _even(picture: np.ndarray) -> np.ndarray:
    """Cuts an odd last row or column off; a side of one pixel is doubled instead."""
    rows, columns = (max(2, side // 2 * 2) for side in picture.shape[:2])
    padded = np.pad(picture, ((0, 1), (0, 1), (0, 0)), mode="edge")
    return np.ascontiguousarray(padded[:rows, :columns])
