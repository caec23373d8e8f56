"""Widgets that several nodes share, and what ComfyUI asks about their values."""

from __future__ import annotations

import hashlib

from mgpu_runtime.pipeline.jobs import MAX_SEED
from mgpu_runtime.tiling import read_tiles

from .comfy import io
from .guidance import BY_MODEL


def seed_input() -> io.Input:
    """Returns the seed widget of a sampling node."""
    return io.Int.Input(
        "seed",
        default=0,
        min=0,
        max=MAX_SEED,
        control_after_generate=True,
        tooltip="The same seed gives the same clip for every number of workers.",
    )


def fps_input(tooltip: str) -> io.Input:
    """Returns the widget of a clip's frame rate."""
    return io.Float.Input("fps", default=24.0, min=1.0, max=240.0, step=0.01, tooltip=tooltip)


def guidance_input(name: str, neutral: str, meaning: str, high: float = 30.0) -> io.Input:
    """Returns the widget of a guidance value that may be left to the model; `neutral` is the value without effect."""
    tooltip = f"{meaning} {neutral} switches it off, -1 takes the model's own value (off when distilled)."
    return io.Float.Input(name, default=BY_MODEL, min=BY_MODEL, max=high, step=0.05, tooltip=tooltip)


def fingerprint(stamps: object) -> str:
    """Returns a hash of files' paths, times and sizes.

    ComfyUI writes it into the files it saves, where nobody wants to find the paths of a disk.
    """
    return hashlib.sha256(repr(stamps).encode("utf-8", "surrogateescape")).hexdigest()


def tiles_sentence(tiles: str | None) -> bool | str:
    """Returns True for a tiles text that can be read, or the sentence to show at the widget."""
    try:
        if tiles is not None:  # a linked value is not known yet
            read_tiles(tiles)
    except ValueError as error:
        return str(error)
    return True
