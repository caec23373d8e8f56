"""Tiled data parallelism against the official tiles, and over world sizes."""

from dataclasses import replace

import pytest
import torch

from mgpu_runtime.models.streams import StreamInput
from mgpu_runtime.parallel.tiled_data_parallel import (
    TiledDataParallelBuilder,
    TiledDataParallelModelWrapper,
    tile_stream,
    tile_tokens,
)
from mgpu_runtime.sampling.positions import audio_positions, video_positions
from mgpu_runtime.tiling import DimensionTilingConfig, TileCountConfig
from tests.goldens import GOLDEN, golden, relative_error
from tests.spawn import run

GRID = (2, 6, 7)
TILINGS = {
    "2x2o2x1": TileCountConfig(height=DimensionTilingConfig(2, 2), width=DimensionTilingConfig(2, 1)),
    "1x3o2": TileCountConfig(width=DimensionTilingConfig(3, 2)),
}
FIVE = TileCountConfig.spatial(1, 5, 1)


def transformer():
    # imported here: the processes of the tests below would each load diffusers for nothing
    from mgpu_runtime.models.transformer_builder import build_transformer
    from mgpu_runtime.weights.registry import StateDictRegistry

    path = GOLDEN / "checkpoints" / "tiny_ltx23.safetensors"
    return build_transformer(path, registry=StateDictRegistry(), device="cpu", dtype=torch.float32)


def clean(stream: StreamInput, velocity: torch.Tensor) -> torch.Tensor:
    return stream.latent - stream.timesteps[:, :, None] * velocity


class TokenModel(torch.nn.Module):
    """Predicts each token from itself alone, so that any tiling must give the untiled result."""

    def predict(self, video, audio, perturbation=None):
        velocity = torch.sin(video.latent) + video.timesteps[:, :, None]
        return velocity, None if audio is None else torch.cos(audio.latent)


def streams(grid=GRID, *, batch: int = 2, num_conditioning: int = 0, conditioning_time: float = 0.1):
    num_tokens = grid[0] * grid[1] * grid[2] + num_conditioning
    generator = torch.Generator().manual_seed(1)
    positions = video_positions(grid, 24.0, batch=batch)
    extra = torch.tensor([[conditioning_time, conditioning_time + 1 / 24], [0, 32], [0, 32]]).view(1, 3, 1, 2)
    positions = torch.cat([positions, extra.expand(batch, 3, num_conditioning, 2)], dim=2)

    def stream(tokens, channels, where):
        return StreamInput(
            latent=torch.randn(batch, tokens, channels, generator=generator),
            timesteps=torch.rand(batch, tokens, generator=generator),
            sigma=torch.full((batch,), 0.6),
            positions=where,
            context=torch.zeros(batch, 1, 4),
        )

    return stream(num_tokens, 8, positions), stream(9, 4, audio_positions(9, batch=batch))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("grid_name", sorted(TILINGS))
@torch.no_grad()
def test_tiles_and_blend_equal_golden(grid_name, normalize):
    case = golden("tdp_23_plain")
    video, audio = case.stream("video"), case.stream("audio")
    tiling, prefix = TILINGS[grid_name], f"norm{int(normalize)}"
    for index, share in enumerate(tile_tokens(tiling.split(GRID), GRID, video.positions)):
        assert torch.equal(share.index, case[f"{grid_name}.tile{index}.keep_indices"])
        torch.testing.assert_close(
            share.weights, case[f"{grid_name}.tile{index}.blend_mask"].flatten(), rtol=0, atol=2e-7
        )
        tile = tile_stream(video, share, normalize_positions=normalize)
        assert torch.equal(tile.positions, case[f"{grid_name}.tile{index}.{prefix}.positions"])
    model = TiledDataParallelModelWrapper(transformer(), None, tiling, normalize_positions=normalize).for_grid(GRID)
    velocity, audio_velocity = model.predict(video, audio)
    expected = case[f"out.{grid_name}.{prefix}.video_denoised"]
    expected_audio = case[f"out.{grid_name}.{prefix}.audio_denoised_mean"]
    assert relative_error(clean(video, velocity), expected) < 1e-5
    assert relative_error(clean(audio, audio_velocity), expected_audio) < 1e-5


@pytest.mark.parametrize("tiling", [*TILINGS.values(), FIVE, TileCountConfig.spatial(3, 2, 3)])
def test_b41_a_per_token_model_gives_the_untiled_result(tiling):
    video, audio = streams(num_conditioning=3)
    model = TiledDataParallelModelWrapper(TokenModel(), None, tiling).for_grid(GRID)
    for tiled, whole in zip(model.predict(video, audio), TokenModel().predict(video, audio), strict=True):
        torch.testing.assert_close(tiled, whole, rtol=0, atol=2e-6)


def test_conditioning_tokens_go_where_they_overlap():
    video, _ = streams(num_conditioning=2)
    tiles = TILINGS["2x2o2x1"].split(GRID)
    num_generated = 2 * 6 * 7

    def members(positions):
        shares = tile_tokens(tiles, GRID, positions)
        return [share.weights[share.num_generated :].tolist() for share in shares]

    assert members(video.positions) == [[1.0, 1.0], [], [], []]  # pixel 0..32 lies in the first tile only
    before = video.positions.clone()
    before[:, 0, num_generated] = torch.tensor([-1.0, -0.9])
    assert members(before) == [[0.25, 1.0], [0.25], [0.25], [0.25]]  # before time 0: a reference for all
    centre = video.positions.clone()
    centre[:, 1:, num_generated] = torch.tensor([96.0, 128.0])  # cell (3, 3): rows 2..4 and columns 3..4 are shared
    assert members(centre) == [[0.25, 1.0], [0.25], [0.25], [0.25]]
    touching = video.positions.clone()
    touching[:, 1, num_generated] = torch.tensor([128.0, 160.0])  # touches the upper tiles' end, overlaps the lower
    assert members(touching) == [[1.0], [], [1.0], []]


def test_tokens_that_no_tile_sees_get_velocity_0():
    video, audio = streams(num_conditioning=2, conditioning_time=99.0)
    model = TiledDataParallelModelWrapper(TokenModel(), None, FIVE).for_grid(GRID)
    velocity, _ = model.predict(video, audio)
    assert torch.all(velocity[:, -2:] == 0) and torch.all(velocity[:, :-2] != 0)


def test_attention_masks_are_cut_on_both_sides():
    video, _ = streams(num_conditioning=2)
    num_tokens = video.num_tokens
    mask = torch.arange(num_tokens * num_tokens, dtype=torch.float32).view(1, num_tokens, num_tokens).expand(2, -1, -1)
    video = replace(video, attention_mask=mask / mask.max())
    share = tile_tokens(TILINGS["1x3o2"].split(GRID), GRID, video.positions)[1]
    tile = tile_stream(video, share, normalize_positions=True)
    assert torch.equal(tile.attention_mask, video.attention_mask[:, share.index[:, None], share.index])


def test_video_alone_and_bad_calls():
    video, audio = streams()
    model = TiledDataParallelBuilder(_Inner(), None, FIVE).build(torch.device("cpu"), torch.float32)
    velocity, nothing = model.for_grid(GRID).predict(video, None)
    assert velocity.shape == video.latent.shape and nothing is None
    with pytest.raises(ValueError, match="no video stream"):
        model.for_grid(GRID).predict(None, audio)
    with pytest.raises(ValueError, match="larger than the overlap"):
        model.for_grid((2, 6, 4))


class _Inner:
    def build(self, device, dtype):
        return TokenModel().to(device)


class MixingModel(torch.nn.Module):
    """Every token hears all tokens of its tile, their places and the sound, so that each tile's result is its own."""

    def predict(self, video, audio, perturbation=None):
        heard = torch.cos(video.latent * video.positions[..., 0].sum(1)[:, :, None]).mean(1, keepdim=True)
        velocity = torch.sin(video.latent + heard + audio.latent.mean())
        return velocity, torch.sin(audio.latent * heard.mean())


def _predict(rank: int, group, names: list[str]) -> dict[str, tuple]:
    video, audio = streams(num_conditioning=5, conditioning_time=-0.5)
    tilings = {**TILINGS, "1x1": TileCountConfig(), "five": FIVE}
    return {
        name: TiledDataParallelModelWrapper(MixingModel(), group, tilings[name]).for_grid(GRID).predict(video, audio)
        for name in names
    }


@pytest.mark.parametrize("world_size", [2, 4])
def test_b49_every_world_size_gives_the_same_on_every_rank(world_size):
    names = ["2x2o2x1", "1x3o2", "1x1", "five"]  # 1 tile on 4 ranks, 5 tiles on 4 ranks
    alone = _predict(0, None, names)
    for results in run(_predict, world_size, names):
        for name in names:
            for expected, actual in zip(alone[name], results[name], strict=True):
                assert torch.equal(actual, expected)
