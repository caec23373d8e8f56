"""Prepares pictures for the video autoencoder in the way the model saw them in training.

Light: the library that compresses is loaded where a picture is compressed. Letters: N pictures, H W rows and columns of
pixels, C colours.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

MAX_BYTE = 255.0


def prepare(pictures_NHWC: Tensor, height: int, width: int, crf: int) -> Tensor:
    """Returns pictures (N, H, W, C) of 0..1 as pixels (1, 3, N, height, width) of -1..1, float32.

    Each picture is compressed with H.264 at `crf` and decoded again (0 leaves it as it is), resized until it fills the
    size, cropped at its centre, and mapped by x / 127.5 - 1: the official order, filter and encoder settings. Grey is
    repeated for all three colours, transparency is dropped. Raises ValueError for another shape.
    """
    check_pictures(pictures_NHWC)
    pixels = torch.empty(1, 3, pictures_NHWC.shape[0], height, width)
    for index, picture_HWC in enumerate(pictures_NHWC):  # one after the other: a clip in float32 is large
        colours_HWC = _colours(picture_HWC).cpu().float().clamp(0, 1) * MAX_BYTE
        if crf:
            from .h264 import compress  # here, so that the host's process can prepare a clip without PyAV

            colours_HWC = compress(colours_HWC, crf)
        pixels[0, :, index] = _fill(colours_HWC, height, width) / (MAX_BYTE / 2) - 1
    return pixels


def check_pictures(pictures: Tensor, name: str = "pictures") -> None:
    """Raises ValueError unless a tensor holds pictures (N, H, W, C) of 1, 3 or 4 colours and finite values."""
    shape = tuple(pictures.shape)
    if len(shape) != 4 or shape[3] not in (1, 3, 4) or 0 in shape:
        raise ValueError(
            f"the {name} must be (pictures, rows, columns, colours) with 1, 3 or 4 colours, as Load Image gives it; "
            f"got {shape}"
        )
    if not torch.isfinite(pictures).all():
        raise ValueError(f"the {name} holds values that are not finite: the node before went wrong, run it again")


def _colours(picture_HWC: Tensor) -> Tensor:
    """Returns the three colours of a picture: grey is repeated, transparency is dropped."""
    return picture_HWC.expand(-1, -1, 3) if picture_HWC.shape[2] == 1 else picture_HWC[..., :3]


def _fill(colours_HWC: Tensor, height: int, width: int) -> Tensor:
    """Resizes a picture until it covers the size and cuts out its centre: (3, height, width)."""
    rows, columns = colours_HWC.shape[:2]
    scale = max(height / rows, width / columns)
    size = (math.ceil(rows * scale), math.ceil(columns * scale))
    colours_NCHW = colours_HWC.permute(2, 0, 1)[None]
    resized = functional.interpolate(colours_NCHW, size=size, mode="bilinear", align_corners=False)[0]
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return resized[:, top : top + height, left : left + width]
