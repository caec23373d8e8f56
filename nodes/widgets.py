"""Widgets that several nodes share."""

from __future__ import annotations

from mgpu_runtime.pipeline.jobs import MAX_SEED
from mgpu_runtime.tiling import read_tiles

from .comfy import io


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


def tiles_sentence(tiles: str | None) -> bool | str:
    """Returns True for a tiles text that can be read, or the sentence to show at the widget."""
    try:
        if tiles is not None:  # a linked value is not known yet
            read_tiles(tiles)
    except ValueError as error:
        return str(error)
    return True
