"""Cuts a latent volume into overlapping tiles and gives the weights that blend the tiles back together.

Axes are (frames, height, width), lengths are in latent cells. Nothing here depends on the number of workers:
the same latent is cut in the same way on every machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

TRAINED_CELLS = 32  # latent cells a side (1024 pixels) that the models were trained for, about
_SUM_TOLERANCE = 1e-6  # a summed weight this near to 1 is 1 but for rounding, and its masks stay as they are

Grid = tuple[int, int, int]


class TilePlace(NamedTuple):
    """Where a tile lies: which clip of a batch, its first frame, row and column, and the whole latent's (F, H, W)."""

    item: int
    first: Grid
    grid: Grid


class Interval(NamedTuple):
    """One tile along one axis: the cells [start, stop), faded in over left_ramp and out over right_ramp cells."""

    start: int
    stop: int
    left_ramp: int = 0
    right_ramp: int = 0

    @property
    def length(self) -> int:
        """The number of cells."""
        return self.stop - self.start


def split_by_count(length: int, num_tiles: int, overlap: int) -> list[Interval]:
    """Cuts an axis into num_tiles tiles as equal as possible (larger ones first), neighbours sharing overlap cells.

    A single tile has no neighbour, so its overlap is not used. Raises ValueError for non-positive counts, for a
    negative overlap and where the smallest tile would not be larger than the overlap.
    """
    if length < 1 or num_tiles < 1 or overlap < 0:
        raise ValueError(
            f"Cannot cut {length} cells into {num_tiles} tiles with overlap {overlap}: "
            "length and tile count must be at least 1, the overlap at least 0."
        )
    if num_tiles == 1:
        return [Interval(0, length)]
    smallest, num_larger = divmod(length + (num_tiles - 1) * overlap, num_tiles)
    if smallest <= overlap:
        most = max(1, length - overlap)
        smaller = f", or an overlap of at most {length - num_tiles}" if length >= num_tiles else ""
        raise ValueError(
            f"{length} latent cells cut into {num_tiles} tiles gives tiles of {smallest} cells, not larger than the "
            f"overlap of {overlap}. "
            f"Use {'1 tile' if most == 1 else f'at most {most} tiles'}{smaller}."
        )
    intervals = []
    start = 0
    for index in range(num_tiles):
        stop = start + smallest + (index < num_larger)
        intervals.append(_with_ramps(index, num_tiles, start, stop, overlap))
        start = stop - overlap
    return intervals


def split_by_size(length: int, size: int, overlap: int) -> list[Interval]:
    """Cuts an axis into tiles of size cells, neighbours sharing overlap cells; the last tile may be shorter.

    An axis no longer than size is one tile. Raises ValueError where overlap >= size, which would never advance.
    """
    if length < 1 or overlap < 0 or overlap >= size:
        raise ValueError(
            f"Cannot cut {length} cells into tiles of {size} cells with overlap {overlap}: the length must be at "
            "least 1 and the tile larger than the overlap."
        )
    if length <= size:
        return [Interval(0, length)]
    num_tiles = math.ceil((length - overlap) / (size - overlap))
    starts = [index * (size - overlap) for index in range(num_tiles)]
    return [
        _with_ramps(index, num_tiles, start, min(start + size, length), overlap) for index, start in enumerate(starts)
    ]


def _with_ramps(index: int, num_tiles: int, start: int, stop: int, overlap: int) -> Interval:
    return Interval(start, stop, overlap if index > 0 else 0, overlap if index < num_tiles - 1 else 0)


def causal(intervals: Sequence[Interval]) -> list[Interval]:
    """Starts every later tile one latent frame earlier, as a causal decoder needs a frame before the first kept one.

    The extra frame decodes to a single pixel frame that gets weight 0 (see pixel_frames).
    """
    first, *later = intervals
    return [first, *(Interval(i.start - 1, i.stop, i.left_ramp + 1, i.right_ramp) for i in later)]


def scale_cells(interval: Interval, factor: int) -> Interval:
    """Maps an interval of latent rows or columns to pixels; ramps scale with it."""
    return Interval(*(value * factor for value in interval))


def scale_frames(interval: Interval, factor: int) -> Interval:
    """Maps a causal interval of latent frames to pixel frames, where latent frame 0 is one frame and each other factor.

    A tile that starts at latent frame s > 0 decodes to 1 + factor*(length-1) frames; its first one falls on pixel
    frame factor*s, the last frame of latent s.
    """
    left_ramp = 1 + factor * (interval.left_ramp - 1) if interval.left_ramp else 0
    return Interval(factor * interval.start, 1 + factor * (interval.stop - 1), left_ramp, factor * interval.right_ramp)


def trapezoid(length: int, left_ramp: int, right_ramp: int, *, left_starts_from_0: bool = False) -> Tensor:
    """Gives the weight of each cell of a tile (length,), float64: a rise, a plateau of 1 and a fall.

    The rise is k/(left_ramp+1) for k = 1.., or k/left_ramp for k = 0.. where it starts from 0; the fall mirrors the
    first form. Ramps that meet are multiplied.
    """
    weights = torch.ones(length, dtype=torch.float64)
    if left_ramp:
        first, steps = (0, left_ramp) if left_starts_from_0 else (1, left_ramp + 1)
        weights[:left_ramp] *= torch.arange(first, first + left_ramp, dtype=torch.float64)[:length] / steps
    if right_ramp:
        fall = torch.arange(right_ramp, 0, -1, dtype=torch.float64) / (right_ramp + 1)
        weights[-right_ramp:] *= fall[-length:]
    return weights


def blend_weights(intervals: Sequence[Interval], *, left_starts_from_0: bool = False) -> list[Tensor]:
    """Gives one float32 weight vector per interval; at every cell the weights of all tiles add up to 1.

    Plain trapezoids add up to 1 only where two tiles meet; where more meet they are divided by their sum.
    Weights of a volume are products of its axes' weights, so they add up to 1 as well.
    """
    raw = [trapezoid(i.length, i.left_ramp, i.right_ramp, left_starts_from_0=left_starts_from_0) for i in intervals]
    total = torch.zeros(max(i.stop for i in intervals), dtype=torch.float64)
    for interval, weights in zip(intervals, raw, strict=True):
        total[interval.start : interval.stop] += weights
    total[(total - 1).abs() < _SUM_TOLERANCE] = 1.0
    return [(weights / total[i.start : i.stop]).float() for i, weights in zip(intervals, raw, strict=True)]


@dataclass(frozen=True)
class DimensionTilingConfig:
    """How one axis is cut: the number of tiles and the cells that neighbours share."""

    num_tiles: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.num_tiles < 1 or self.overlap < 0:
            raise ValueError(
                f"A tile count must be at least 1 and an overlap at least 0, got {self.num_tiles} and {self.overlap}."
            )

    def split(self, length: int) -> list[Interval]:
        """Cuts an axis of this length; raises ValueError where the tiles do not fit (see split_by_count)."""
        return split_by_count(length, self.num_tiles, self.overlap)


@dataclass(frozen=True)
class Tile:
    """One box of a latent volume: an interval and a weight vector per axis (frames, height, width)."""

    intervals: tuple[Interval, Interval, Interval]
    weights: tuple[Tensor, Tensor, Tensor]

    @property
    def slices(self) -> tuple[slice, slice, slice]:
        """The box as slices of (F, H, W)."""
        frames, height, width = (slice(i.start, i.stop) for i in self.intervals)
        return frames, height, width

    @property
    def shape(self) -> Grid:
        """The box's size (f, h, w)."""
        frames, height, width = (i.length for i in self.intervals)
        return frames, height, width

    def mask(self) -> Tensor:
        """Gives the box's blend weights (f, h, w), float32."""
        frames, height, width = self.weights
        return frames[:, None, None] * height[:, None] * width


@dataclass(frozen=True)
class TileCountConfig:
    """How a latent volume is cut, by the number of tiles per axis."""

    frames: DimensionTilingConfig = DimensionTilingConfig()
    height: DimensionTilingConfig = DimensionTilingConfig()
    width: DimensionTilingConfig = DimensionTilingConfig()

    @classmethod
    def spatial(cls, rows: int, columns: int, overlap: int) -> "TileCountConfig":
        """Cuts height into rows and width into columns with the same overlap, and leaves time whole."""
        return cls(height=DimensionTilingConfig(rows, overlap), width=DimensionTilingConfig(columns, overlap))

    @property
    def num_tiles(self) -> int:
        """The number of tiles of the volume."""
        return self.frames.num_tiles * self.height.num_tiles * self.width.num_tiles

    def split(self, grid: Grid) -> list[Tile]:
        """Cuts a volume (F, H, W) into tiles, ordered frames first, then rows, then columns."""
        axes = []
        for config, length in zip((self.frames, self.height, self.width), grid, strict=True):
            intervals = config.split(length)
            axes.append(list(zip(intervals, blend_weights(intervals), strict=True)))
        return [Tile((f[0], h[0], w[0]), (f[1], h[1], w[1])) for f, h, w in product(*axes)]


def balanced_tile_split(num_tiles: int) -> tuple[int, int]:
    """Factors a tile count into (rows, columns) as near to a square as possible, with rows <= columns."""
    if num_tiles < 1:
        raise ValueError(f"A tile count must be at least 1, got {num_tiles}.")
    rows = next(r for r in range(math.isqrt(num_tiles), 0, -1) if num_tiles % r == 0)
    return rows, num_tiles // rows


def auto_tiles(grid: Grid, overlap: int, *, max_cells: int | None = None, min_cells: int = 1) -> tuple[int, int]:
    """Chooses (rows, columns) for a latent (F, H, W) from its size alone, never from the number of workers.

    Each side gets ceil(side / 32) tiles, so that a tile stays near the size the models were trained for; the longer
    side (the width if both are equal) gets at least two. With max_cells, tiles are cut on their longer side until
    one tile of all F frames holds no more than that. A side stays whole where two tiles would not be larger than the
    overlap, or smaller than min_cells.
    """
    frames, *sides = grid
    limits = [_most_tiles(side, overlap, min_cells) for side in sides]
    counts = [min(math.ceil(side / TRAINED_CELLS), limit) for side, limit in zip(sides, limits, strict=True)]
    longer = 0 if sides[0] > sides[1] else 1
    counts[longer] = min(max(2, counts[longer]), limits[longer])
    while max_cells is not None and frames * math.prod(_largest_tile(sides, counts, overlap)) > max_cells:
        cut = _cut_once(sides, counts, overlap, min_cells)
        if cut is None:
            break
        counts = cut
    return counts[0], counts[1]


def finer(config: TileCountConfig, grid: Grid, *, min_cells: int = 1) -> TileCountConfig | None:
    """Cuts a latent's (F, H, W) tiles once more on their longer side; None where they cannot get smaller."""
    overlap = max(config.height.overlap, config.width.overlap)
    counts = _cut_once(grid[1:], [config.height.num_tiles, config.width.num_tiles], overlap, min_cells)
    if counts is None:
        return None
    return replace(TileCountConfig.spatial(counts[0], counts[1], overlap), frames=config.frames)


def _largest_tile(sides: Sequence[int], counts: Sequence[int], overlap: int) -> list[int]:
    return [math.ceil((side + (count - 1) * overlap) / count) for side, count in zip(sides, counts, strict=True)]


def _most_tiles(side: int, overlap: int, min_cells: int) -> int:
    """Gives the largest number of tiles of a side that are all larger than the overlap and hold min_cells."""
    smallest = max(min_cells, overlap + 1)
    return max(1, (side - overlap) // (smallest - overlap))


def _cut_once(sides: Sequence[int], counts: Sequence[int], overlap: int, min_cells: int) -> list[int] | None:
    """Adds a tile on the axis where tiles are longest, among those that can be cut; None if none can."""
    tile = _largest_tile(sides, counts, overlap)
    cuttable = [axis for axis in (0, 1) if counts[axis] < _most_tiles(sides[axis], overlap, min_cells)]
    if not cuttable:
        return None
    chosen = max(cuttable, key=lambda axis: tile[axis])
    return [count + (axis == chosen) for axis, count in enumerate(counts)]


def read_tiles(text: str) -> tuple[int, int] | None:
    """Reads rows x columns such as "2x3", or None for "auto"; raises ValueError for other texts."""
    word = text.strip().lower() if isinstance(text, str) else ""
    if word == "auto":
        return None
    parts = word.split("x")
    if len(parts) != 2 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f'Tiles must be "auto" or rows x columns such as "2x3", got {text!r}.')
    return int(parts[0]), int(parts[1])


def parse_tiles(
    text: str, grid: Grid, overlap: int, *, max_cells: int | None = None, min_cells: int = 1
) -> TileCountConfig:
    """Reads "auto" or rows x columns such as "2x3" and checks that it fits a latent (F, H, W).

    Raises ValueError for other texts, and for tiles not larger than the overlap. Only "auto" heeds the two limits.
    """
    if overlap < 0:
        raise ValueError(f"The tile overlap must be at least 0 latent cells, got {overlap}.")
    counts = read_tiles(text)
    if counts is None:
        return TileCountConfig.spatial(*auto_tiles(grid, overlap, max_cells=max_cells, min_cells=min_cells), overlap)
    config = TileCountConfig.spatial(*counts, overlap)
    for name, axis, length in (("rows", config.height, grid[1]), ("columns", config.width, grid[2])):
        try:
            axis.split(length)
        except ValueError as error:
            raise ValueError(f"Tiles {text!r} do not fit, {name}: {error}") from None
    return config
