"""Distributed decode: latent tiles are decoded on all ranks; one rank blends them and puts out frames in order.

Letters: B batch, C channels, F H W latent frames, rows and columns, f h w the same in pixels, N frames of a piece.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..tiling import TileCountConfig, TilePlace, finer
from ..weights.registry import StateDictRegistry
from .pixel_tiles import PixelLayout, PixelTime, VAEShape

log = logging.getLogger("mgpu")

PIECE_BYTES = 128 << 20  # frames are blended and sent in pieces of about this size, so that no rank holds the clip
MAX_RETRIES = 3  # each retry after running out of memory cuts the tiles once more

OnRound = Callable[[int, int], None]  # rounds done, rounds in all
# normalised latent (1, C, F, H, W) and where it lies -> pixels (1, 3, f, h, w), about -1..1
DecodeTile = Callable[[Tensor, TilePlace], Tensor]


class FrameQueue(Protocol):
    """Takes finished frames on the driver rank."""

    def put(self, start: int, frames: Tensor) -> None:
        """Takes frames (N, h, w, 3) float32 in 0..1 on the CPU; `start` counts from the first frame of the batch."""
        ...


class VAEBuilder(Protocol):
    """Builds the video autoencoder."""

    def with_sources(self, registry: StateDictRegistry) -> "VAEBuilder":
        """Returns the builder with another source of weights."""
        ...

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Returns a VideoVAE."""
        ...


class DistributedDecoder:
    """Decodes latents on all ranks of a group; the driver rank puts the frames out, in order.

    Every rank calls decode with the same whole latent. Tile i is decoded by rank i mod world size, mapped to 0..1 and
    clamped, then blended with ramps of overlap * factor pixels, in tile order: the frames do not depend on the number
    of ranks. A failure on one rank leaves the others waiting in a collective, so it must end the fleet.
    """

    def __init__(
        self,
        decode_tile: DecodeTile,
        shape: VAEShape,
        *,
        queue: FrameQueue,
        group: dist.ProcessGroup | None,
        tiling: TileCountConfig,
        driver_rank: int = 0,
    ) -> None:
        """Takes the decode of one tile; `group` None means one process, `driver_rank` counts in the group."""
        self._decode_tile = decode_tile
        self._shape = shape
        self._queue = queue
        self._tiling = tiling
        self._team = _Team(group, driver_rank)

    @torch.no_grad()
    def decode(self, latent_BCFHW: Tensor, *, on_round: OnRound | None = None) -> int:
        """Decodes a normalised latent and returns the number of frames put out by the driver, B * (8*(F-1)+1).

        `on_round` is called on every rank alike as (rounds done, rounds) after each round of one tile per rank, so it
        may hold a collective (a cancel vote). Tiles that do not fit into memory are cut finer, on all ranks alike.
        Raises ValueError where the tiles do not fit the latent.
        """
        batch, _, *grid = latent_BCFHW.shape
        frames_each = 1 + self._shape.frames * (grid[0] - 1)
        tiling = self._tiling
        for item in range(batch):
            sink = _FrameSink(self._queue, item * frames_each)
            tiling = self._decode_item(latent_BCFHW, item, tiling, sink, partial(_report, on_round, item, batch))
        return batch * frames_each

    def _decode_item(
        self,
        latent: Tensor,
        item: int,
        tiling: TileCountConfig,
        sink: "_FrameSink",
        on_round: OnRound,
    ) -> TileCountConfig:
        """Decodes one clip of a batch and returns the tiling that fitted into memory."""
        for retries_left in range(MAX_RETRIES, -1, -1):
            layout = PixelLayout.of(tiling, latent.shape[2:], self._shape)
            held = self._decode_group(latent, item, layout, 0, on_round)
            if held is not None:
                break
            tiling = self._finer_tiling(tiling, latent, retries_left)
        log.info("Decoding %d tiles on %d workers.", len(layout.times) * len(layout.boxes), self._team.world_size)
        for group, time in enumerate(layout.times):
            if group:
                held = self._decode_group(latent, item, layout, group, on_round)
                if held is None:
                    raise torch.OutOfMemoryError("a later time tile does not fit into memory, an earlier one did")
            self._blend(held, layout, time, sink)
            held.clear()  # before the next tiles need the memory
        return tiling

    def _finer_tiling(self, tiling: TileCountConfig, latent: Tensor, retries_left: int) -> TileCountConfig:
        cut = finer(tiling, tuple(latent.shape[2:]), min_cells=self._shape.min_cells) if retries_left else None
        if cut is None:
            raise torch.OutOfMemoryError(
                f"Decoding does not fit into memory with {tiling.height.num_tiles}x{tiling.width.num_tiles} tiles. "
                "Choose more tiles, or free memory."
            )
        log.warning("Decoding does not fit into memory: trying %dx%d tiles.", cut.height.num_tiles, cut.width.num_tiles)
        return cut

    def _decode_group(
        self, latent: Tensor, item: int, layout: PixelLayout, group: int, on_round: OnRound
    ) -> dict[int, Tensor] | None:
        """Decodes this rank's tiles of one time group; None, on every rank, if any rank ran out of memory."""
        num_boxes = len(layout.boxes)
        world_size = self._team.world_size
        rounds = -(-num_boxes // world_size)
        held: dict[int, Tensor] = {}
        fitted = True
        for number in range(rounds):
            index = number * world_size + self._team.rank
            if index < num_boxes and fitted:
                try:
                    place = layout.place(group, index, item, tuple(latent.shape[2:]))
                    held[index] = self._decode_tile(latent[item : item + 1][layout.cells(group, index)], place)[0]
                    layout.check_pixels(group, index, held[index])
                except torch.OutOfMemoryError:
                    held.clear()
                    torch.cuda.empty_cache()
                    fitted = False
            on_round(group * rounds + number + 1, len(layout.times) * rounds)
        return held if self._team.all_agree(fitted) else None

    def _blend(self, held: dict[int, Tensor], layout: PixelLayout, time: PixelTime, sink: "_FrameSink") -> None:
        """Blends one time group piece by piece; the driver gets the other ranks' weighted boxes one at a time."""
        height, width = layout.size
        piece = max(1, PIECE_BYTES // (height * width * 3 * 4))
        for first in range(0, time.interval.length, piece):
            frames = slice(first, min(first + piece, time.interval.length))
            num_frames = frames.stop - frames.start
            total = None
            for index, box in enumerate(layout.boxes):
                owner = index % self._team.world_size
                part = box.weighted(held[index], frames, time.weights) if index in held else None
                part = self._team.to_driver(part, owner, (3, num_frames, box.height.length, box.width.length))
                if part is None:
                    continue
                if total is None:
                    total = part.new_zeros(3, num_frames, height, width)
                total[:, :, *box.slices] += part.to(total.device)
            if total is not None:
                pixels = total.permute(1, 2, 3, 0).contiguous()
                sink.add(time.interval.start + first, pixels, final_before=time.final_before)


def _report(on_round: OnRound | None, item: int, batch: int, done: int, of: int) -> None:
    """Counts the rounds of one clip among those of the whole batch."""
    if on_round is not None:
        on_round(item * of + done, batch * of)


class _Team:
    """The ranks of a group, or one process, as far as decoding needs them to talk."""

    def __init__(self, group: dist.ProcessGroup | None, driver_rank: int) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self._driver = driver_rank
        if not 0 <= driver_rank < self.world_size:
            raise ValueError(f"driver_rank must be 0 to {self.world_size - 1}, got {driver_rank}")
        on_cpu = group is None or dist.get_backend(group) == "gloo"
        self._device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def all_agree(self, yes: bool) -> bool:
        """Tells every rank whether all ranks said yes; collective."""
        if self.world_size == 1:
            return yes
        flag = torch.tensor([int(yes)], device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group)
        return bool(flag.item())

    def to_driver(self, part: Tensor | None, owner: int, shape: tuple[int, ...]) -> Tensor | None:
        """Hands a float32 tensor from its owner to the driver, which gets it back; the other ranks get None.

        Owner and driver must both call it, in the same order for all tensors.
        """
        if owner == self._driver or self.world_size == 1:
            return part
        if self.rank == owner:
            dist.send(part.to(self._device).contiguous(), group=self._group, group_dst=self._driver)
        if self.rank == self._driver:
            received = torch.empty(shape, device=self._device)
            dist.recv(received, group=self._group, group_src=owner)
            return received
        return None


class _FrameSink:
    """Puts frames out in order; frames that a later time tile adds to wait here."""

    def __init__(self, queue: FrameQueue, offset: int) -> None:
        self._queue = queue
        self._offset = offset
        self._waiting: dict[int, Tensor] = {}  # frame number of the clip -> sum so far (h, w, 3)

    def add(self, start: int, frames: Tensor, *, final_before: int) -> None:
        """Adds weighted frames (N, h, w, 3) from frame `start` on, and puts out those before `final_before`."""
        frames = frames.cpu()
        for index in range(frames.shape[0]):
            earlier = self._waiting.pop(start + index, None)
            if earlier is not None:
                frames[index] += earlier
        num_final = min(max(final_before - start, 0), frames.shape[0])
        for index in range(num_final, frames.shape[0]):
            self._waiting[start + index] = frames[index].clone()
        if num_final:
            # weights add up to 1 only but for rounding
            self._queue.put(self._offset + start, frames[:num_final].clamp_(max=1.0))


class DistributedDecoderBuilder:
    """Builds a distributed decoder around the autoencoder's builder, on each rank of a group.

    `registry`, where given, takes the place of the inner builder's.
    """

    def __init__(
        self,
        inner: VAEBuilder,
        queue: FrameQueue,
        vae_group: dist.ProcessGroup | None,
        vae_tiling: TileCountConfig,
        driver_rank: int = 0,
        registry: StateDictRegistry | None = None,
    ) -> None:
        self.inner = inner if registry is None else inner.with_sources(registry)
        self.queue = queue
        self.vae_group = vae_group
        self.vae_tiling = vae_tiling
        self.driver_rank = driver_rank

    def build(self, device: torch.device, dtype: torch.dtype) -> DistributedDecoder:
        """Returns the decoder with its autoencoder on `device` in `dtype`; noise, where it draws any, has seed 0."""
        vae = self.inner.build(device, dtype)
        return DistributedDecoder(
            lambda latent, place: vae.decode(latent, place=place),
            VAEShape.of(vae),
            queue=self.queue,
            group=self.vae_group,
            tiling=self.vae_tiling,
            driver_rank=self.driver_rank,
        )
