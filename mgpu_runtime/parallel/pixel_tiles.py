"""Where the tiles of a clip lie once decoded: intervals of frames, rows and columns in pixels, and their weights.

Letters: F H W latent frames, rows and columns, f h w the same in pixels, N frames of a piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from ..tiling import Grid, Interval, TileCountConfig, blend_weights, causal, scale_cells, scale_frames


@dataclass(frozen=True)
class VAEShape:
    """What tiling must know of an autoencoder: pixels per latent cell on each axis, and the smallest tile side."""

    frames: int
    height: int
    width: int
    min_cells: int = 1

    @classmethod
    def of(cls, vae: nn.Module) -> "VAEShape":
        """Reads the factors from a built autoencoder, never from a constant."""
        side = vae.spatial_compression_ratio
        reflects = vae.config.decoder_spatial_padding_mode == "reflect"  # which cannot pad a side of one cell
        return cls(vae.temporal_compression_ratio, side, side, min_cells=2 if reflects else 1)


@dataclass(frozen=True)
class PixelTime:
    """The frames of one time tile: where they lie, their weights, and from where on a later tile adds to them."""

    interval: Interval
    weights: Tensor
    final_before: int


@dataclass(frozen=True)
class PixelBox:
    """The pixels of one spatial tile and their weights per axis."""

    height: Interval
    width: Interval
    row_weights: Tensor
    column_weights: Tensor

    @property
    def slices(self) -> tuple[slice, slice]:
        """The box as slices of (h, w)."""
        return slice(self.height.start, self.height.stop), slice(self.width.start, self.width.stop)

    def weighted(self, pixels: Tensor, frames: slice, frame_weights: Tensor) -> Tensor:
        """Gives some frames of a decoded tile (3, f, h, w) as (3, N, h, w) float32: in 0..1, clamped, then weighted."""
        part = pixels[:, frames].to(torch.float32, copy=True).mul_(0.5).add_(0.5).clamp_(0.0, 1.0)
        part.mul_((self.row_weights[:, None] * self.column_weights).to(pixels.device))
        return part.mul_(frame_weights[frames, None, None].to(pixels.device))


@dataclass(frozen=True)
class PixelLayout:
    """Where the tiles of one clip lie, in latent cells and in pixels."""

    time_cells: Sequence[Interval]
    box_cells: Sequence[tuple[Interval, Interval]]
    times: Sequence[PixelTime]
    boxes: Sequence[PixelBox]
    size: tuple[int, int]

    @classmethod
    def of(cls, tiling: TileCountConfig, grid: Grid, shape: VAEShape) -> "PixelLayout":
        """Cuts a latent (F, H, W); time tiles are causal. Raises ValueError for tiles the decoder cannot take."""
        time_cells = causal(tiling.frames.split(grid[0]))
        rows, columns = tiling.height.split(grid[1]), tiling.width.split(grid[2])
        smallest = min(interval.length for interval in (*rows, *columns))
        if smallest < shape.min_cells:
            raise ValueError(
                f"The decoder pads by reflection and needs tiles of at least {shape.min_cells} latent cells a side, "
                f"but a latent of {grid[1]}x{grid[2]} cells cut into {len(rows)}x{len(columns)} tiles has one of "
                f"{smallest}. Use fewer tiles, more overlap or a larger picture."
            )
        boxes = [
            PixelBox(row, column, row_weights, column_weights)
            for (row, row_weights), (column, column_weights) in product(
                _pixels(rows, shape.height), _pixels(columns, shape.width)
            )
        ]
        return cls(
            time_cells=time_cells,
            box_cells=list(product(rows, columns)),
            times=_times(time_cells, shape.frames),
            boxes=boxes,
            size=(grid[1] * shape.height, grid[2] * shape.width),
        )

    def cells(self, group: int, index: int) -> tuple[slice, ...]:
        """The slices of a latent (1, C, F, H, W) that one tile decodes."""
        intervals = (self.time_cells[group], *self.box_cells[index])
        return (slice(None), slice(None), *(slice(i.start, i.stop) for i in intervals))

    def check_pixels(self, group: int, index: int, pixels: Tensor) -> None:
        """Raises ValueError where a decoded tile (3, f, h, w) has not the size that the factors promise."""
        box = self.boxes[index]
        expected = (self.times[group].interval.length, box.height.length, box.width.length)
        if tuple(pixels.shape[1:]) != expected:
            raise ValueError(
                f"The autoencoder decoded a tile to {tuple(pixels.shape[1:])} frames, rows and columns, but its "
                f"configuration promises {expected}. The checkpoint's autoencoder section does not fit its weights."
            )


def _pixels(cells: Sequence[Interval], factor: int) -> list[tuple[Interval, Tensor]]:
    intervals = [scale_cells(interval, factor) for interval in cells]
    return list(zip(intervals, blend_weights(intervals), strict=True))


def _times(cells: Sequence[Interval], factor: int) -> list[PixelTime]:
    """Gives the time tiles in frames; a later tile's first frame only served causality and weighs 0."""
    intervals = [scale_frames(interval, factor) for interval in cells]
    ends = [interval.start for interval in intervals[1:]] + [intervals[-1].stop]
    weights = blend_weights(intervals, left_starts_from_0=True)
    return [PixelTime(*item) for item in zip(intervals, weights, ends, strict=True)]
