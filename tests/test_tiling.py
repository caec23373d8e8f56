"""Tile layouts and blend weights: golden lists, sums to 1 everywhere, clear refusals."""

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from mgpu_runtime.tiling import (
    DimensionTilingConfig,
    Interval,
    TileCountConfig,
    auto_tiles,
    balanced_tile_split,
    blend_weights,
    causal,
    finer,
    parse_tiles,
    scale_cells,
    scale_frames,
    split_by_count,
    split_by_size,
    trapezoid,
)

GOLDEN = Path(__file__).parent / "golden" / "golden"
TILINGS = json.loads((GOLDEN / "tilings.json").read_text(encoding="utf-8"))
MASKS = load_file(GOLDEN / "tiling_masks.safetensors")


def lists(intervals: list[Interval]) -> list[list[int]]:
    return [list(interval) for interval in intervals]


def test_intervals_equal_golden():
    for case in TILINGS["by_count"]:
        split = split_by_count(case["dim"], case["num_tiles"], case["overlap"])
        assert lists(split) == case["intervals[start,end,left_ramp,right_ramp]"]
    for case in TILINGS["by_count_temporal_causal"]:
        assert lists(causal(split_by_count(case["dim"], case["num_tiles"], case["overlap"]))) == case["intervals"]
    for case in TILINGS["by_size"]:
        assert lists(split_by_size(case["dim"], case["size"], case["overlap"])) == case["intervals"]
    for case in TILINGS["temporal_causal_by_size"]:
        assert lists(causal(split_by_size(case["dim"], case["size"], case["overlap"]))) == case["intervals"]


def test_balanced_split_equals_golden():
    assert [list(balanced_tile_split(n)) for n in range(1, 17)] == TILINGS["balanced_tile_split"]


@pytest.mark.parametrize("dim, num_tiles, overlap, verdict", TILINGS["by_count_errors[dim,num_tiles,overlap]"])
def test_refused_combinations_equal_golden(dim, num_tiles, overlap, verdict):
    if verdict == "accepted":
        assert len(split_by_count(dim, num_tiles, overlap)) == num_tiles
    else:
        with pytest.raises(ValueError, match=str(overlap)):
            split_by_count(dim, num_tiles, overlap)


@pytest.mark.parametrize("name", sorted(MASKS))
def test_masks_equal_golden(name):
    if name.startswith("mask."):
        dim, count, overlap, index = map(int, re.findall(r"\d+", name))
        mask = blend_weights(split_by_count(dim, count, overlap))[index]
    else:
        length, left, right, from_0 = map(int, re.fullmatch(r"\D+(\d+)l(\d+)r(\d+)from0(\d)", name).groups())
        mask = trapezoid(length, left, right, left_starts_from_0=bool(from_0)).float()
    torch.testing.assert_close(mask, MASKS[name], rtol=0, atol=2e-7)


def blended_constant(intervals: list[Interval], length: int, *, left_starts_from_0: bool = False) -> torch.Tensor:
    total = torch.zeros(length)
    for interval, weights in zip(
        intervals, blend_weights(intervals, left_starts_from_0=left_starts_from_0), strict=True
    ):
        total[interval.start : interval.stop] += 3.0 * weights
    return total


@pytest.mark.parametrize(
    "length, count, overlap", [(21, 2, 8), (34, 2, 6), (20, 4, 2), (10, 3, 4), (16, 3, 6), (12, 3, 8), (8, 4, 3)]
)
def test_b41_constant_in_constant_out(length, count, overlap):
    intervals = split_by_count(length, count, overlap)
    torch.testing.assert_close(blended_constant(intervals, length), torch.full((length,), 3.0), rtol=1e-6, atol=0)


def test_b41_masks_are_divided_only_where_the_sum_is_not_1():
    weights = blend_weights(split_by_count(10, 3, 4))  # [0,6) [2,8) [4,10): cells 4 and 5 lie in all three
    plain = trapezoid(6, 0, 4)
    torch.testing.assert_close(weights[0][:4].double(), plain[:4], rtol=0, atol=1e-7)
    assert torch.all(weights[0][4:] < plain[4:].float())


@given(st.integers(1, 80), st.integers(1, 12), st.integers(0, 20))
def test_b41_every_layout_blends_a_constant(length, count, overlap):
    assume(count == 1 or (length + (count - 1) * overlap) // count > overlap)
    intervals = split_by_count(length, count, overlap)
    assert intervals[0].start == 0 and intervals[-1].stop == length
    torch.testing.assert_close(blended_constant(intervals, length), torch.full((length,), 3.0), rtol=2e-6, atol=0)


@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 19), st.sampled_from([1, 8, 32]))
def test_b41_every_causal_time_layout_blends_a_constant_in_pixels(length, size, overlap, factor):
    assume(overlap < size)
    intervals = [scale_frames(interval, factor) for interval in causal(split_by_size(length, size, overlap))]
    num_frames = 1 + factor * (length - 1)
    assert intervals[0].start == 0 and intervals[-1].stop == num_frames
    total = blended_constant(intervals, num_frames, left_starts_from_0=True)
    torch.testing.assert_close(total, torch.full((num_frames,), 3.0), rtol=2e-6, atol=0)


@pytest.mark.parametrize("size, overlap", [(16, 16), (8, 9)])
def test_b42_overlap_not_smaller_than_tile_is_refused_with_both_numbers(size, overlap):
    with pytest.raises(ValueError, match=rf"{size} cells with overlap {overlap}"):
        split_by_size(64, size, overlap)
    with pytest.raises(ValueError, match="tiles of 6 cells.*overlap of 6"):
        split_by_count(6, 2, 6)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_b44_tile_larger_than_the_data_is_one_tile(length):
    assert split_by_size(length, 4096, 8) == [Interval(0, length)]
    (tile,) = TileCountConfig.spatial(1, 1, 5).split((length, 4, 5))  # an overlap without a neighbour is not used
    assert tile.shape == (length, 4, 5)
    assert torch.all(tile.mask() == 1)


def test_pixel_intervals():
    assert scale_cells(Interval(3, 5, 2, 1), 32) == Interval(96, 160, 64, 32)
    assert scale_frames(Interval(0, 3, 0, 1), 8) == Interval(0, 17, 0, 8)
    assert scale_frames(Interval(1, 6, 2, 0), 8) == Interval(8, 41, 9, 0)  # its first frame is latent 1's last one


def test_tiles_cover_the_volume_in_order():
    config = TileCountConfig(DimensionTilingConfig(2, 1), DimensionTilingConfig(2, 2), DimensionTilingConfig(3, 1))
    tiles = config.split((5, 6, 9))
    assert len(tiles) == config.num_tiles == 12
    total = torch.zeros(5, 6, 9)
    for tile in tiles:
        total[tile.slices] += tile.mask()
    torch.testing.assert_close(total, torch.ones(5, 6, 9), rtol=2e-6, atol=0)
    assert [tile.intervals[2].start for tile in tiles[:3]] == [0, 3, 6]  # width runs fastest


@pytest.mark.parametrize(
    "grid, tiles",
    [
        ((16, 34, 60), (2, 2)),  # 1920x1088: every tile within 32 cells before the overlap
        ((16, 16, 24), (1, 2)),
        ((16, 24, 16), (2, 1)),
        ((3, 8, 8), (1, 2)),
        ((3, 4, 6), (1, 1)),  # two tiles would not be larger than the overlap of 5
        ((1, 1, 1), (1, 1)),
    ],
)
def test_auto_tiles_by_size(grid, tiles):
    assert auto_tiles(grid, 5) == tiles


@given(st.integers(1, 64), st.integers(1, 150), st.integers(1, 150), st.integers(0, 40))
def test_auto_tiles_always_fit(frames, height, width, overlap):
    config = parse_tiles("auto", (frames, height, width), overlap)
    assert len(config.split((frames, height, width))) == config.num_tiles


def test_b53_auto_tiles_bound_the_cells_of_a_tile():
    grid = (64, 34, 60)
    rows, columns = auto_tiles(grid, 4, max_cells=16384)
    sizes = [tile.shape for tile in TileCountConfig.spatial(rows, columns, 4).split(grid)]
    assert max(f * h * w for f, h, w in sizes) <= 16384


def test_finer_cuts_the_longer_side_until_it_cannot():
    config = TileCountConfig.spatial(1, 2, 1)
    counts = []
    while config is not None:
        counts.append((config.height.num_tiles, config.width.num_tiles))
        config = finer(config, (3, 3, 4))
    assert counts == [(1, 2), (2, 2), (2, 3)]


def test_parse_tiles():
    assert parse_tiles(" 1x2 ", (3, 8, 8), 2) == TileCountConfig.spatial(1, 2, 2)
    assert parse_tiles("AUTO", (3, 8, 8), 2) == TileCountConfig.spatial(1, 2, 2)


@pytest.mark.parametrize("text", ["", "3", "2x", "0x2", "axb", "2x2x2", "-1x2", "1.5x2"])
def test_parse_tiles_refuses_other_words(text):
    with pytest.raises(ValueError, match="rows x columns"):
        parse_tiles(text, (3, 8, 8), 2)


def test_b42_parse_tiles_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="columns: 8 latent cells cut into 4 tiles.*of 5 cells.*overlap of 5"):
        parse_tiles("1x4", (3, 8, 8), 5)
    with pytest.raises(ValueError, match="at least 0"):
        parse_tiles("auto", (3, 8, 8), -1)
