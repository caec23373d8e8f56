"""Conformance checks of everything that is cut into tiles: layouts, masks, tiled sampling, tiled decode."""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from mgpu_runtime import tiling
from mgpu_runtime.models.streams import StreamInput
from mgpu_runtime.parallel.distributed_decoder import DistributedDecoder
from mgpu_runtime.parallel.pixel_tiles import VAEShape
from mgpu_runtime.parallel.tiled_data_parallel import tile_stream, tile_tokens
from tests.conformance_bench import Bench, Triple
from tests.goldens import Case


class _Frames:
    """Keeps what a distributed decoder puts out on the driver rank."""

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []

    def put(self, start: int, frames: Tensor) -> None:
        self.pieces.append(frames)


def check_vae_distributed(case: Case, bench: Bench) -> Iterator[Triple]:
    rows, columns, overlap = (int(n) for n in re.search(r"(\d+)x(\d+)_overlap(\d+)", case.name).groups())
    vae, queue = bench.vae(case.facts["style"]), _Frames()
    decoder = DistributedDecoder(
        lambda latent, place: vae.decode(latent, place=place),
        VAEShape.of(vae),
        queue=queue,
        group=bench.group,
        tiling=tiling.TileCountConfig.spatial(rows, columns, overlap),
    )
    decoder.decode(case["latent"])
    # frames are pixels / 2 + 0.5, clamped to 0..1: the clamp hides how large the forward's values are, and rounding
    # errors follow those (the golden itself is 1.7e-4 away from the same decode in float64)
    largest = float(vae.decode(case["latent"]).abs().max()) / 2
    if queue.pieces:  # on the driver only
        yield "distributed decode", torch.cat(queue.pieces), case["out.frames"], largest


def check_vae_tiled(case: Case, bench: Bench) -> Iterator[Triple]:
    """Blends tiles cut by size before anything is clamped, as one process of the official code does."""
    vae = bench.vae(case.facts["style"])
    shape = VAEShape.of(vae)
    latent, text = case["latent"], case.facts["what"]
    frames, height, width = latent.shape[2:]
    box = re.search(r"tile (\d+)x(\d+) px, overlap (\d+) px", text)
    time = re.search(r"frames (\d+)/(\d+)", text) or re.search(r"tile (\d+) frames, overlap (\d+) frames", text)
    whole = (10**6, 0)
    side = shape.height
    row, column = ((int(box[i]) // side, int(box[3]) // side) for i in (1, 2)) if box else (whole, whole)
    size, overlap = (int(time[1]) // shape.frames, int(time[2]) // shape.frames) if time else whole
    times = tiling.causal(tiling.split_by_size(frames, size, overlap))
    rows, columns = tiling.split_by_size(height, *row), tiling.split_by_size(width, *column)
    pixel_times = [tiling.scale_frames(interval, shape.frames) for interval in times]
    pixel_rows = [tiling.scale_cells(interval, shape.height) for interval in rows]
    pixel_columns = [tiling.scale_cells(interval, shape.width) for interval in columns]
    total = torch.zeros_like(case["out.tiled"])
    weights = [
        tiling.blend_weights(pixel_times, left_starts_from_0=True),
        tiling.blend_weights(pixel_rows),
        tiling.blend_weights(pixel_columns),
    ]
    for t, time_cells in enumerate(times):
        for r, row_cells in enumerate(rows):
            for c, column_cells in enumerate(columns):
                cells = tuple(slice(i.start, i.stop) for i in (time_cells, row_cells, column_cells))
                pixels = vae.decode(latent[(slice(None), slice(None), *cells)])
                mask = weights[0][t][:, None, None] * weights[1][r][:, None] * weights[2][c]
                spot = tuple(slice(i.start, i.stop) for i in (pixel_times[t], pixel_rows[r], pixel_columns[c]))
                total[(slice(None), slice(None), *spot)] += pixels * mask
    yield "untiled decode", vae.decode(latent), case["out.untiled"]
    yield "tiled decode", total, case["out.tiled"]


def check_tiling_masks(case: Case, bench: Bench) -> Iterator[Triple]:
    for name, expected in case.tensors.items():
        trapezoid = re.fullmatch(r"trapezoid\.len(\d+)l(\d+)r(\d+)from0([01])", name)
        if trapezoid:
            length, left, right, from_0 = (int(n) for n in trapezoid.groups())
            actual = tiling.trapezoid(length, left, right, left_starts_from_0=bool(from_0))
            yield "trapezoid", actual, expected
            continue
        length, count, overlap, index = (
            int(n) for n in re.fullmatch(r"mask\.dim(\d+)n(\d+)o(\d+)\.tile(\d+)", name).groups()
        )
        weights = tiling.blend_weights(tiling.split_by_count(length, count, overlap))
        yield "blend mask", weights[index], expected


def check_tdp(case: Case, bench: Bench) -> Iterator[Triple]:
    video, audio, grid = case.stream("video"), case.stream("audio"), tuple(case.facts["latent"])
    grids = sorted({found[1] for name in case.tensors if (found := re.match(r"out\.(\d+x\d+o[\dx]+)\.", name))})
    for name in grids:
        rows, columns, overlaps = re.fullmatch(r"(\d+)x(\d+)o([\dx]+)", name).groups()
        row_overlap, column_overlap = (int(n) for n in (overlaps.split("x") * 2)[:2])
        config = tiling.TileCountConfig(
            height=tiling.DimensionTilingConfig(int(rows), row_overlap),
            width=tiling.DimensionTilingConfig(int(columns), column_overlap),
        )
        for normalize in (False, True):
            prefix = f"norm{int(normalize)}"
            for index, share in enumerate(tile_tokens(config.split(grid), grid, video.positions)):
                tile = tile_stream(video, share, normalize_positions=normalize)
                yield "tile tokens", share.index, case[f"{name}.tile{index}.keep_indices"]
                yield "tile positions", tile.positions, case[f"{name}.tile{index}.{prefix}.positions"]
                mask = case[f"{name}.tile{index}.blend_mask"].flatten()
                yield "tile blend mask", share.weights[: share.num_generated], mask
            velocity, audio_velocity = bench.tiled(case.facts["style"], config, grid, normalize).predict(video, audio)
            out = f"out.{name}.{prefix}"
            yield "tiled video", _clean(video, velocity), case[f"{out}.video_denoised"]
            yield "tiled audio mean", _clean(audio, audio_velocity), case[f"{out}.audio_denoised_mean"]


def _clean(stream: StreamInput, velocity: Tensor) -> Tensor:
    return stream.latent - stream.timesteps[:, :, None] * velocity


def check_tilings(table: dict) -> Iterator[Triple]:
    for key, entries in table.items():
        if key == "balanced_tile_split":
            actual = [list(tiling.balanced_tile_split(n)) for n in range(1, len(entries) + 1)]
            yield key, torch.tensor(actual), torch.tensor(entries)
        elif key.startswith("by_count_errors"):
            for *arguments, outcome in entries:
                yield key.split("[")[0], torch.tensor(_is_refused(*arguments)), torch.tensor(outcome == "ValueError")
        else:
            for entry in entries:
                expected = next(value for name, value in entry.items() if name.startswith("intervals"))
                intervals = (
                    tiling.split_by_count(entry["dim"], entry["num_tiles"], entry["overlap"])
                    if "by_count" in key
                    else tiling.split_by_size(entry["dim"], entry["size"], entry["overlap"])
                )
                actual = tiling.causal(intervals) if "causal" in key else intervals
                yield key, torch.tensor(actual), torch.tensor(expected)


def _is_refused(length: int, num_tiles: int, overlap: int) -> bool:
    try:
        tiling.split_by_count(length, num_tiles, overlap)
    except ValueError:
        return True
    return False
