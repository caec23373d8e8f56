"""Tiled data parallelism: the video is cut into overlapping tiles, each rank predicts its tiles, the results blend.

Letters: B batch, T tokens, G generated tokens (the latent's F*H*W cells), C channels, A position axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..models.loading import WeightTracker
from ..models.streams import StreamInput
from ..tiling import Grid, Tile, TileCountConfig
from ..weights.registry import StateDictRegistry

Pair = tuple[Tensor | None, Tensor | None]  # video, audio


class InnerBuilder(Protocol):
    """Builds the model that predicts a tile, with LTXTransformer.predict's call."""

    def with_sources(self, registry: StateDictRegistry | None, tracker: WeightTracker | None) -> "InnerBuilder":
        """Returns the builder with other sources of weights."""
        ...

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Returns the model on a device."""
        ...


@dataclass(frozen=True)
class TileTokens:
    """One tile's share of a token sequence.

    Attributes:
        index: the tokens of the sequence that the tile sees, generated ones first, (t,) int64.
        weights: their blend weights, which add up to 1 over all tiles, (t,) float32.
        num_generated: how many of them are generated ones.
    """

    index: Tensor
    weights: Tensor
    num_generated: int


class TiledDataParallelModelWrapper(nn.Module):
    """Predicts velocities tile by tile, tile i on rank i mod world size; same call as LTXTransformer.predict.

    Every rank calls predict with the same whole streams and gets the same whole result. Audio is given to every tile
    whole and averaged; that average is no sound track, so use the audio of another stage.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        tiling: TileCountConfig,
        *,
        grid: Grid | None = None,
        normalize_positions: bool = True,
    ) -> None:
        """Wraps a model that predicts one tile; `group` None means one process. See for_grid for `grid`."""
        super().__init__()
        self.model = model
        self.group = group
        self.tiling = tiling
        self.grid = grid
        self.normalize_positions = normalize_positions
        self._tiles: list[Tile] = [] if grid is None else tiling.split(grid)
        self._shares: tuple[Tensor, list[TileTokens]] | None = None

    def for_grid(self, grid: Grid, tiling: TileCountConfig | None = None) -> "TiledDataParallelModelWrapper":
        """Returns the wrapper (same inner model) for a latent (F, H, W), whose cells are the first F*H*W video tokens.

        Raises ValueError where the tiles do not fit the latent.
        """
        return TiledDataParallelModelWrapper(
            self.model,
            self.group,
            self.tiling if tiling is None else tiling,
            grid=grid,
            normalize_positions=self.normalize_positions,
        )

    @torch.no_grad()
    def predict(self, video: StreamInput | None, audio: StreamInput | None, perturbation: Tensor | None = None) -> Pair:
        """Returns the blended velocities (B, T, C) float32 of the whole streams, on every rank, after one all-reduce.

        A conditioning token that no tile sees gets velocity 0. Raises ValueError without a video stream.
        """
        if video is None:
            raise ValueError("Tiled data parallelism cuts the video into tiles, but there is no video stream.")
        assert self.grid is not None, "call for_grid with the latent's size first"
        rank = 0 if self.group is None else dist.get_rank(self.group)
        world_size = 1 if self.group is None else dist.get_world_size(self.group)
        shares = self._find_shares(video.positions)
        total = _Sum(video, audio)
        for share in shares[rank::world_size]:  # a rank without a tile still joins the all-reduce, with zeros
            tile = tile_stream(video, share, normalize_positions=self.normalize_positions)
            velocity, audio_velocity = self.model.predict(tile, audio, perturbation)
            total.add(share, velocity, audio_velocity, len(shares))
        if world_size > 1:
            dist.all_reduce(total.flat, group=self.group)
        return total.velocities()

    def _find_shares(self, positions: Tensor) -> list[TileTokens]:
        """Gives each tile's tokens, found once for the positions of a job: finding them waits for the GPU."""
        if self._shares is None or self._shares[0] is not positions:
            self._shares = positions, tile_tokens(self._tiles, self.grid, positions)
        return self._shares[1]


class _Sum:
    """Adds up weighted tiles of both streams in one flat buffer, so that one all-reduce does for both.

    It adds in float64: the order of a few tiles then makes no difference that survives rounding to float32, so every
    world size gives the same clip.
    """

    def __init__(self, video: StreamInput, audio: StreamInput | None) -> None:
        shapes = [video.latent.shape] if audio is None else [video.latent.shape, audio.latent.shape]
        sizes = [shape.numel() for shape in shapes]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float64, device=video.latent.device)
        self._parts = [part.view(shape) for part, shape in zip(self.flat.split(sizes), shapes, strict=True)]

    def add(self, share: TileTokens, velocity: Tensor, audio_velocity: Tensor | None, num_tiles: int) -> None:
        """Adds one tile's velocities (B, t, C), weighted; audio counts as 1/num_tiles."""
        self._parts[0].index_add_(1, share.index, velocity.double() * share.weights[:, None])
        if len(self._parts) > 1:
            self._parts[1].add_(audio_velocity.double(), alpha=1 / num_tiles)

    def velocities(self) -> Pair:
        """Gives the sums (B, T, C) in float32; None for an absent stream."""
        video, *audio = (part.float() for part in self._parts)
        return video, audio[0] if audio else None


def tile_tokens(tiles: Sequence[Tile], grid: Grid, positions: Tensor) -> list[TileTokens]:
    """Finds each tile's tokens in a sequence of F*H*W generated tokens followed by conditioning tokens.

    A conditioning token belongs to every tile whose box of positions (B, A, T, 2) it overlaps on all axes (touching is
    not overlapping), in any batch item; one that starts before time 0 belongs to all tiles. Its weight is shared
    evenly among its tiles.
    """
    device = positions.device
    num_generated = grid[0] * grid[1] * grid[2]
    cells = torch.arange(num_generated, device=device).view(grid)
    generated = [cells[tile.slices].flatten() for tile in tiles]
    conditioning = positions[:, :, num_generated:]  # (B, A, N, 2)
    members = torch.stack([_overlaps(conditioning, _box(positions[:, :, index])) for index in generated])
    share = 1.0 / members.sum(dim=0).clamp(min=1)  # (N,)
    result = []
    for tile, index, member in zip(tiles, generated, members, strict=True):
        kept = member.nonzero().squeeze(1)
        result.append(
            TileTokens(
                index=torch.cat([index, kept + num_generated]),
                weights=torch.cat([tile.mask().flatten().to(device), share[kept]]),
                num_generated=index.numel(),
            )
        )
    return result


def _box(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Gives the corners (B, A, 1) of the box that tokens (B, A, t, 2) fill."""
    return positions[..., 0].amin(dim=2, keepdim=True), positions[..., 1].amax(dim=2, keepdim=True)


def _overlaps(positions: Tensor, box: tuple[Tensor, Tensor]) -> Tensor:
    """Tells which tokens (B, A, N, 2) lie in a box, or before time 0; (N,) bool."""
    start, stop = positions.unbind(-1)
    inside = ((start < box[1]) & (stop > box[0])).all(dim=1)  # (B, N)
    return (inside | (start[:, 0] < 0)).any(dim=0)


def tile_stream(video: StreamInput, share: TileTokens, *, normalize_positions: bool) -> StreamInput:
    """Cuts the video stream to a tile's tokens.

    With normalize_positions all its positions are moved so that the generated tokens start at 0 on every axis, as in
    the small clips that the model was trained on.
    """
    tile = video.with_tokens(share.index)
    if not normalize_positions:
        return tile
    origin, _ = _box(tile.positions[:, :, : share.num_generated])
    return replace(tile, positions=tile.positions - origin[..., None])


class TiledDataParallelBuilder:
    """Builds a tiled model around an inner builder, on each rank of a group.

    `registry` and `tracker`, where given, take the place of the inner builder's.
    """

    def __init__(
        self,
        inner: InnerBuilder,
        group: dist.ProcessGroup | None,
        tiling: TileCountConfig,
        registry: StateDictRegistry | None = None,
        tracker: WeightTracker | None = None,
        normalize_positions: bool = True,
    ) -> None:
        self.inner = inner if registry is None and tracker is None else inner.with_sources(registry, tracker)
        self.group = group
        self.tiling = tiling
        self.normalize_positions = normalize_positions

    def build(self, device: torch.device, dtype: torch.dtype) -> TiledDataParallelModelWrapper:
        """Returns the wrapped model on `device` in `dtype`; bind it to a latent with for_grid before predict."""
        return TiledDataParallelModelWrapper(
            self.inner.build(device, dtype), self.group, self.tiling, normalize_positions=self.normalize_positions
        )
