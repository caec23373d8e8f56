"""Distributed decode: equal to plain decode where it must be, the same on every world size, frames in order."""

from itertools import product

import pytest
import torch

from mgpu_runtime.parallel.distributed_decoder import DecodeTile, DistributedDecoder, DistributedDecoderBuilder
from mgpu_runtime.parallel.pixel_tiles import VAEShape
from mgpu_runtime.tiling import DimensionTilingConfig, TileCountConfig, TilePlace
from tests.goldens import GOLDEN, golden, relative_error
from tests.spawn import run

SHAPE = VAEShape(frames=8, height=4, width=4)
SPATIAL = [(1, 1, 0), (2, 2, 1), (1, 3, 0), (3, 2, 2)]


class Frames:
    """A queue that keeps what it gets."""

    def __init__(self) -> None:
        self.items: list[tuple[int, torch.Tensor]] = []

    def put(self, start: int, frames: torch.Tensor) -> None:
        assert frames.dtype == torch.float32 and frames.device.type == "cpu"
        self.items.append((start, frames.clone()))

    def clip(self) -> torch.Tensor:
        """Joins the pieces after checking that they came in order and without a gap."""
        expected = 0
        for start, frames in self.items:
            assert start == expected
            expected += frames.shape[0]
        return torch.cat([frames for _, frames in self.items])


def causal_decode(latent: torch.Tensor, place: TilePlace | None = None) -> torch.Tensor:
    """Decodes as a causal autoencoder without spatial context: each frame sees its latent and the one before.

    The first latent of a clip has none before it, so the first frame of a tile is wrong unless the clip starts there.
    """
    before = torch.cat([latent[:, :, :1] * 0, latent[:, :, :-1]], dim=2)
    steps = torch.linspace(0.125, 1, 8).view(1, 1, 1, 8, 1, 1)
    mixed = latent[:, :3, :, None] * steps + before[:, :3, :, None] * (1 - steps) * 0.7
    frames = mixed.flatten(2, 3)[:, :, 7:]
    return frames.repeat_interleave(4, 3).repeat_interleave(4, 4)


def spatial_decode(latent: torch.Tensor, place: TilePlace) -> torch.Tensor:
    """Adds context in space: each tile's result is its own."""
    return causal_decode(latent) + latent.mean()


def decode(latent, tiling, *, group=None, tile=causal_decode, driver_rank=0, shape=SHAPE, on_round=None) -> Frames:
    queue = Frames()
    decoder = DistributedDecoder(tile, shape, queue=queue, group=group, tiling=tiling, driver_rank=driver_rank)
    num_frames = decoder.decode(latent, on_round=on_round)
    assert num_frames == latent.shape[0] * (1 + 8 * (latent.shape[2] - 1))
    return queue


def as_frames(pixels: torch.Tensor) -> torch.Tensor:
    return (pixels / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1).flatten(0, 1)


def latents(batch: int, frames: int, height: int = 5, width: int = 7) -> torch.Tensor:
    return torch.randn(batch, 4, frames, height, width, generator=torch.Generator().manual_seed(frames))


@pytest.mark.parametrize("frames, batch", [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("rows, columns, overlap", SPATIAL)
def test_b41_b44_any_spatial_tiling_of_a_local_decoder_is_plain_decode(frames, batch, rows, columns, overlap):
    latent = latents(batch, frames)
    result = decode(latent, TileCountConfig.spatial(rows, columns, overlap)).clip()
    expected = as_frames(causal_decode(latent))
    if rows == columns == 1:
        assert torch.equal(result, expected)
    torch.testing.assert_close(result, expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize("num_tiles, overlap", [(2, 0), (2, 1), (3, 1), (3, 3), (7, 0)])
def test_b47_time_tiles_drop_their_causal_lead_frame(num_tiles, overlap):
    latent = latents(1, 7)
    tiling = TileCountConfig(DimensionTilingConfig(num_tiles, overlap), width=DimensionTilingConfig(2, 1))
    queue = decode(latent, tiling)
    torch.testing.assert_close(queue.clip(), as_frames(causal_decode(latent)), rtol=0, atol=5e-7)
    assert len(queue.items) >= num_tiles - 1  # frames come out while later ones are still to be decoded


def test_clamping_comes_before_blending():
    latent = torch.full((1, 4, 1, 4, 4), 3.0)

    def tile(cells: torch.Tensor, place: TilePlace) -> torch.Tensor:
        left = cells[:, :, :, :, :1].mean() == 3.0
        return causal_decode(cells) * 0 + (3.0 if left else 0.0)

    latent[:, :, :, :, 1:] = 1.0
    result = decode(latent, TileCountConfig.spatial(1, 2, 2), tile=tile).clip()
    ramp = torch.arange(8, 0, -1) / 9  # left tile 0..1 is clamped to 1, right one is 0.5
    torch.testing.assert_close(result[0, 0, 4:12, 0], ramp * 1.0 + (1 - ramp) * 0.5)


def test_pieces_are_small_and_in_order(monkeypatch):
    monkeypatch.setattr("mgpu_runtime.parallel.distributed_decoder.PIECE_BYTES", 20 * 28 * 3 * 4 * 3)
    queue = decode(latents(2, 3), TileCountConfig.spatial(2, 2, 1))
    assert [frames.shape[0] for _, frames in queue.items] == [3, 3, 3, 3, 3, 2] * 2
    torch.testing.assert_close(queue.clip(), as_frames(causal_decode(latents(2, 3))), rtol=0, atol=5e-7)


def test_rounds_count_over_the_batch():
    rounds = []
    decode(latents(2, 1), TileCountConfig.spatial(1, 2, 1), on_round=lambda *round: rounds.append(round))
    assert rounds == [(1, 4), (2, 4), (3, 4), (4, 4)]


def _world(rank: int, group, driver_rank: int) -> tuple[list[torch.Tensor], list[int]]:
    clips, rounds = [], []
    tilings = [TileCountConfig.spatial(*tiling) for tiling in SPATIAL]
    tilings.append(TileCountConfig(DimensionTilingConfig(2, 1), width=DimensionTilingConfig(2, 1)))
    for tiling, frames in product(tilings, (1, 3)):
        if tiling.frames.num_tiles > frames:
            continue
        queue = decode(
            latents(1, frames),
            tiling,
            group=group,
            tile=spatial_decode,
            driver_rank=driver_rank,
            on_round=lambda done, of: rounds.append(of - done),
        )
        assert bool(queue.items) == (rank == driver_rank)
        if rank == driver_rank:
            clips.append(queue.clip())
    return clips, rounds


@pytest.mark.parametrize("world_size, driver_rank", [(2, 0), (3, 2)])
def test_b49_b51_frames_are_the_same_for_every_world_size(world_size, driver_rank):
    alone, _ = _world(0, None, 0)
    results = run(_world, world_size, driver_rank)
    clips = results[driver_rank][0]
    assert len(clips) == len(alone)
    for expected, actual in zip(alone, clips, strict=True):
        assert torch.equal(actual, expected)
    assert all(rounds == results[0][1] and rounds[-1] == 0 for _, rounds in results)  # ranks without a tile join too


def limited(max_cells: int, limited_rank: int | None = None, rank: int = 0) -> DecodeTile:
    def tile(latent: torch.Tensor, place: TilePlace) -> torch.Tensor:
        if rank == (rank if limited_rank is None else limited_rank) and latent[0, 0, 0].numel() > max_cells:
            raise torch.OutOfMemoryError
        return causal_decode(latent)

    return tile


def test_b46_out_of_memory_cuts_finer_a_bounded_number_of_times():
    latent = latents(2, 2)
    result = decode(latent, TileCountConfig.spatial(1, 1, 1), tile=limited(16)).clip()
    torch.testing.assert_close(result, as_frames(causal_decode(latent)), rtol=0, atol=5e-7)
    with pytest.raises(torch.OutOfMemoryError, match="with 2x3 tiles. Choose more tiles"):
        decode(latent, TileCountConfig.spatial(1, 1, 1), tile=limited(1))


def _one_rank_is_short(rank: int, group) -> list[torch.Tensor]:
    tile = limited(20, limited_rank=1, rank=rank)
    queue = decode(latents(1, 2), TileCountConfig.spatial(1, 2, 1), group=group, tile=tile)
    return [frames for _, frames in queue.items]


def test_b46_all_ranks_cut_finer_together():
    clip = torch.cat(run(_one_rank_is_short, 2)[0])
    torch.testing.assert_close(clip, as_frames(causal_decode(latents(1, 2))), rtol=0, atol=5e-7)


def test_b48_factors_that_do_not_fit_the_weights_are_named():
    with pytest.raises(ValueError, match=r"\(9, 20, 28\).*promises \(9, 40, 56\)"):
        decode(latents(1, 2), TileCountConfig(), shape=VAEShape(8, 8, 8))


def test_tiles_too_small_for_reflection_are_refused():
    with pytest.raises(ValueError, match="at least 2 latent cells.*5x7.*1x7"):
        decode(latents(1, 2), TileCountConfig.spatial(1, 7, 0), shape=VAEShape(8, 4, 4, min_cells=2))


def test_driver_must_be_a_rank():
    with pytest.raises(ValueError, match="0 to 0, got 1"):
        decode(latents(1, 1), TileCountConfig(), driver_rank=1)


@pytest.mark.parametrize("tiles", [(1, 1), (2, 1)])
def test_b51_a_real_autoencoder_built_through_the_builder(tiles):
    from mgpu_runtime.models.video_vae import VideoVAEBuilder
    from mgpu_runtime.weights.registry import StateDictRegistry

    case = golden("vae_20_decode")
    inner = VideoVAEBuilder(GOLDEN / "checkpoints" / "tiny_ltx20.safetensors", registry=StateDictRegistry())
    queue = Frames()
    latent = case["latent"] if tiles == (1, 1) else case["latent"].repeat(1, 1, 1, 2, 1)
    tiling = TileCountConfig.spatial(*tiles, 1)
    decoder = DistributedDecoderBuilder(inner, queue, None, tiling).build(torch.device("cpu"), torch.float32)
    decoder.decode(latent)
    if tiles == (1, 1):
        assert relative_error(queue.clip(), as_frames(case["out.pixels"])) < 1e-5
    else:
        assert queue.clip().shape == (9, 128, 64, 3)
