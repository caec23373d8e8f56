"""Where the tiles of a clip lie once decoded: intervals of frames, rows and columns in pixels, and their weights.

Letters: F H W latent frames, rows and columns, f h w the same in pixels, N frames of a piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from ..tiling import Grid, Interval, TileCountConfig, TilePlace, blend_weights, causal, scale_cells, scale_frames


@dataclass(frozen=True)
class VAEShape:
    """What tiling must know of an autoencoder: pixels per latent cell on each axis, and the smallest tile side.

    `pads_clips` tells of a decoder that takes a smaller clip whole, though no smaller tiles of a larger one.
    """

    frames: int
    height: int
    width: int
    min_cells: int = 1
    pads_clips: bool = False

    @classmethod
    def of(cls, vae: nn.Module) -> "VAEShape":
        """Reads the factors from a built VideoVAE, never from a constant."""
        return cls(*vae.scale_factors, min_cells=vae.min_cells, pads_clips=vae.pads_clips)

    def check(self, rows: Sequence[Interval], columns: Sequence[Interval], grid: Grid) -> None:
        """Raises ValueError for tiles of a latent (F, H, W) that the decoder cannot take."""
        checked = [tiles for tiles in (rows, columns) if len(tiles) > 1 or not self.pads_clips]
        smallest = min((interval.length for tiles in checked for interval in tiles), default=self.min_cells)
        if smallest < self.min_cells:
            raise ValueError(
                f"The decoder looks at its neighbourhood and needs tiles of at least {self.min_cells} latent cells a "
                f"side, but a latent of {grid[1]}x{grid[2]} cells cut into {len(rows)}x{len(columns)} tiles has one "
                f"of {smallest}. Use fewer tiles, more overlap or a larger picture."
            )


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
        shape.check(rows, columns, grid)
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

    def place(self, group: int, index: int, item: int, grid: Grid) -> TilePlace:
        """Says where one tile lies in clip `item` of a batch of latents (F, H, W)."""
        intervals = (self.time_cells[group], *self.box_cells[index])
        return TilePlace(item, tuple(interval.start for interval in intervals), grid)

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
