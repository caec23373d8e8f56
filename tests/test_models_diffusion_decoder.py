"""LTX-2.5's diffusion video decoder: its file, its numbers against `diffusers`, its noise, its tiles."""

import json
import lzma
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mgpu_runtime.models.video_decoder import pixel_noise
from mgpu_runtime.models.video_decoder_attention import neighborhood_attention
from mgpu_runtime.models.video_vae import VideoVAE, VideoVAEBuilder, build_video_vae
from mgpu_runtime.parallel.distributed_decoder import DistributedDecoder
from mgpu_runtime.parallel.pixel_tiles import PixelLayout, VAEShape
from mgpu_runtime.tiling import DimensionTilingConfig, TileCountConfig, TilePlace, auto_tiles, parse_tiles
from mgpu_runtime.weights.bundle import Checkpoint
from mgpu_runtime.weights.checkpoint import CheckpointFile
from mgpu_runtime.weights.diffusion_vae import diffusion_decoder_kwargs
from mgpu_runtime.weights.facts import describe
from mgpu_runtime.weights.registry import StateDictRegistry
from tests.diffusion_files import DECODER, SMALL_DECODER, write_diffusion_vae
from tests.spawn import run
from tests.weights_files import TINY_23, read_all, write_header


def build(path: Path, dtype: torch.dtype = torch.float32) -> VideoVAE:
    return build_video_vae(path, registry=StateDictRegistry(), device="cpu", dtype=dtype)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("diffusion") / "vae.safetensors"
    write_diffusion_vae(path, SMALL_DECODER)
    return path


@pytest.fixture(scope="module")
def vae(path: Path) -> VideoVAE:
    return build(path)


def latents(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("output", "steps", "gated", "prefix"),
    [("x0", 1, False, "vae."), ("x0", 3, True, ""), ("v", 1, True, "vae."), ("v", 2, False, "")],
)
def test_the_decoder_is_diffusers_own(tmp_path: Path, output: str, steps: int, gated: bool, prefix: str) -> None:
    """The twin attends through FlexAttention, with the file's tensors written by another hand (diffusion_files)."""
    decoder = {**SMALL_DECODER, "default_num_inference_steps": steps}
    file = tmp_path / "vae.safetensors"
    twin = write_diffusion_vae(file, decoder, output=output, gated=gated, prefix=prefix)
    vae = build(file)
    latent = latents(1, 16, 3, 4, 6)  # just above the windows, so nothing is padded
    raw = latent * twin.latents_std.view(1, -1, 1, 1, 1) + twin.latents_mean.view(1, -1, 1, 1, 1)
    noise = pixel_noise(5, (3, 16, 24), frames=range(17), rows=slice(None), columns=slice(None), like=raw)
    with torch.no_grad():
        context = twin.decoder.forward_stage_4(twin.decoder.forward_stages_1_to_3(raw))
        expected = twin.decoder.denoise(context, noise, steps)
    assert vae.scale_factors == (8, 4, 4)
    torch.testing.assert_close(vae.decode(latent, seed=5), expected, rtol=0, atol=1e-5)
    assert expected.abs().max() > 0.1


@settings(max_examples=10, deadline=None)
@given(
    grid=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 9)),
    window=st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(1, 7)),
    batch=st.integers(1, 2),
)
def test_attention_is_that_of_each_token_to_its_window(grid: tuple, window: tuple, batch: int) -> None:
    query, key, value = (latents(batch, *grid, 2, 4, seed=seed) for seed in range(3))
    actual = neighborhood_attention(query, key, value, window)
    sides = [min(side, length) for side, length in zip(window, grid, strict=True)]
    for place in product(*(range(length) for length in grid)):
        starts = [min(max(p - k // 2, 0), n - k) for p, k, n in zip(place, sides, grid, strict=True)]
        window_of = (slice(None), *(slice(s, s + k) for s, k in zip(starts, sides, strict=True)))
        k, v = key[window_of].flatten(1, 3), value[window_of].flatten(1, 3)
        at = (slice(None), *place)
        weights = torch.einsum("bnd,bknd->bnk", query[at], k).softmax(-1)
        torch.testing.assert_close(actual[at], torch.einsum("bnk,bknd->bnd", weights, v), rtol=0, atol=1e-5)


def test_attention_gathers_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide grid is attended to in several groups of columns, with the same result."""
    query, key, value = (latents(1, 5, 6, 37, 2, 4, seed=seed) for seed in range(3))
    whole = neighborhood_attention(query, key, value, (3, 5, 5))
    monkeypatch.setattr("mgpu_runtime.models.video_decoder_attention.MAX_GATHERED", 1)
    assert torch.allclose(neighborhood_attention(query, key, value, (3, 5, 5)), whole, atol=1e-6)


def test_frames_do_not_depend_on_the_number_of_threads(vae: VideoVAE) -> None:
    latent, before = latents(1, 16, 3, 3, 5), torch.get_num_threads()
    expected = vae.decode(latent)
    torch.set_num_threads(1)
    try:
        assert torch.equal(vae.decode(latent), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 2, 5), (1, 4, 2)])
def test_clips_below_the_windows_are_padded_by_their_edges(vae: VideoVAE, grid: tuple[int, int, int]) -> None:
    """A whole clip may be smaller than the windows, (3, 3, 5) cells here: repeating its edges gives the same pixels."""
    latent = latents(1, 16, *grid)
    frames, rows, columns = grid
    missing = [max(0, 3 - rows), max(0, 5 - columns)]
    padded = latent.repeat(1, 1, 3, 1, 1)[:, :, : max(frames, 3)] if frames == 1 else latent
    padded = torch.cat([padded, padded[:, :, -1:]], dim=2) if frames == 2 else padded
    pad = (missing[1] // 2, missing[1] - missing[1] // 2, missing[0] // 2, missing[0] - missing[0] // 2, 0, 0)
    padded = torch.nn.functional.pad(padded, pad, mode="replicate")
    pixels, whole = vae.decode(latent, seed=2), vae.decode(padded, seed=2)
    assert pixels.shape == (1, 3, 8 * frames - 7, 4 * rows, 4 * columns)
    top, left = 4 * pad[2], 4 * pad[0]
    assert torch.equal(pixels, whole[:, :, : 8 * frames - 7, top : top + 4 * rows, left : left + 4 * columns])


def test_b37_b113_noise_is_the_clips_and_each_clip_has_its_own(vae: VideoVAE) -> None:
    whole = pixel_noise(7, (3, 64, 96), frames=range(9), rows=slice(None), columns=slice(None), like=torch.zeros(1))
    part = pixel_noise(
        7, (3, 64, 96), frames=range(4, 9), rows=slice(32, 64), columns=slice(0, 64), like=torch.zeros(1)
    )
    assert torch.equal(part, whole[:, :, 4:9, 32:64, :64])
    assert abs(float(whole.mean())) < 0.02 and abs(float(whole.std()) - 1) < 0.02
    latent = latents(1, 16, 1, 3, 5)
    both = vae.decode(latent.repeat(2, 1, 1, 1, 1), seed=4)
    assert torch.equal(both[:1], vae.decode(latent, seed=4)) and torch.equal(both[1:], vae.decode(latent, seed=5))
    assert not torch.equal(both[0], both[1])
    assert vae.decode(latent, seed=2**64 - 1, place=TilePlace(1, (0, 0, 0), (1, 3, 5))).isfinite().all()


class Frames:
    """A queue that keeps what it gets."""

    def __init__(self) -> None:
        self.items: list[Tensor] = []

    def put(self, start: int, frames: Tensor) -> None:
        self.items.append(frames.clone())


def tiled(vae: VideoVAE, latent: Tensor, tiling: TileCountConfig, group: Any = None) -> Tensor | None:
    queue = Frames()
    decoder = DistributedDecoder(
        lambda tile, place: vae.decode(tile, place=place, seed=9),
        VAEShape.of(vae),
        queue=queue,
        group=group,
        tiling=tiling,
    )
    decoder.decode(latent)
    return torch.cat(queue.items) if queue.items else None


def test_b51_one_tile_is_plain_decode(vae: VideoVAE) -> None:
    latent = latents(2, 16, 1, 3, 5)
    plain = (vae.decode(latent, seed=9) * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1).flatten(0, 1)
    assert torch.equal(tiled(vae, latent, TileCountConfig()), plain)


def _ranks(rank: int, group: Any, path: str) -> tuple[Tensor | None, Tensor]:
    vae, latent, tiling = build(Path(path)), latents(1, 16, 2, 3, 9), TileCountConfig.spatial(1, 3, 3)
    return tiled(vae, latent, tiling, group), tiled(vae, latent, tiling)


def test_b49_b51_b113_tiles_are_the_same_for_every_world_size(path: Path) -> None:
    """Three tiles on two ranks, each of which draws the noise for itself, and on one."""
    (together, alone), _ = run(_ranks, 2, str(path))
    assert together.shape == (9, 12, 36, 3) and torch.equal(together, alone)


def test_time_tiles_take_the_noise_of_their_frames(vae: VideoVAE) -> None:
    """Each time tile starts on the frame where the one before has its last latent, with that frame's noise."""
    latent = latents(1, 16, 5, 3, 5)
    layout = PixelLayout.of(TileCountConfig(frames=DimensionTilingConfig(2, 1)), (5, 3, 5), VAEShape.of(vae))
    places = [layout.place(group, 0, 0, (5, 3, 5)) for group in range(2)]
    later = places[1].first[0]
    assert places[0].first == (0, 0, 0) and later == layout.times[1].interval.start // 8 > 0
    drawn = vae.decode(latent[:, :, later:], place=places[1], seed=9)
    own = vae.decode(latent[:, :, later:], seed=9)
    assert drawn.shape[2] == layout.times[1].interval.length and not torch.equal(drawn, own)


def test_tiles_hold_the_attention_windows(vae: VideoVAE) -> None:
    shape = VAEShape.of(vae)
    assert shape == VAEShape(8, 4, 4, min_cells=5, pads_clips=True)
    PixelLayout.of(TileCountConfig.spatial(1, 2, 1), (1, 2, 9), shape)  # the uncut side is padded
    with pytest.raises(ValueError, match="at least 5 latent cells a side.*1x9 cells cut into 1x3 tiles has one of 3"):
        PixelLayout.of(TileCountConfig.spatial(1, 3, 1), (1, 1, 9), shape)
    assert auto_tiles((1, 4, 9), 1, min_cells=5) == (1, 2)
    assert auto_tiles((1, 4, 8), 1, min_cells=5) == (1, 1)  # two tiles of the longer side would be too small


@given(
    grid=st.tuples(st.integers(1, 40), st.integers(1, 80), st.integers(1, 80)),
    overlap=st.integers(0, 8),
    min_cells=st.integers(1, 9),
    max_cells=st.sampled_from([None, 64, 4096]),
)
def test_automatic_tiles_are_never_too_small(grid: tuple, overlap: int, min_cells: int, max_cells: int | None) -> None:
    tiling = parse_tiles("auto", grid, overlap, max_cells=max_cells, min_cells=min_cells)
    PixelLayout.of(tiling, grid, VAEShape(8, 32, 32, min_cells=min_cells, pads_clips=True))


def test_the_encoder_of_the_file_is_the_convolutional_one(tmp_path: Path) -> None:
    file = tmp_path / "vae.safetensors"
    write_diffusion_vae(file, DECODER)
    pixels = latents(1, 3, 9, 64, 32).clamp(-1, 1)
    vae = build(file)
    assert torch.equal(vae.encode(pixels), build(TINY_23).encode(pixels))
    assert vae.decode(latents(1, 16, 1, 1, 1)).shape == (1, 3, 1, 32, 32)
    with pytest.raises(ValueError, match="multiples of 32"):
        vae.encode(pixels[:, :, :, :60])


def test_b75_every_tensor_is_used_or_dropped_by_name(path: Path, tmp_path: Path) -> None:
    module = build(path)
    assert not [name for name, tensor in module.state_dict().items() if tensor.is_meta]
    registry = StateDictRegistry()
    assert registry.checkpoint(path).unclaimed == ()
    state = registry.get(path, "video_vae")
    arranged = VideoVAEBuilder(path, registry=registry).arrange(state)
    assert set(arranged) == set(module.state_dict())
    used = {tensor.untyped_storage().data_ptr() for tensor in arranged.values()}  # all are views of the file
    unused = {name for name, tensor in state.items() if tensor.untyped_storage().data_ptr() not in used}
    assert unused == {"decoder.type_emb", "decoder.coarse_head.weight"}


@pytest.mark.parametrize(
    ("drop", "extra", "named"),
    [
        ("vae.decoder.conv_in_x_t.bias", None, "1 missing .decoder.conv_in_x_t.bias"),
        ("vae.decoder.det_stages.0.0.attn.qkv.weight", None, "3 missing .decoder.det_stages.0.0.attn.to_k.weight"),
        ("", {"vae.decoder.diff_blocks.9.gate_msa": torch.ones(8)}, "1 unexpected .decoder.diff_blocks.9.gate_msa"),
        ("", {"vae.decoder.wings.weight": torch.ones(8)}, "1 unexpected .decoder.wings.weight"),
        ("", {"vae.decoder.diff_blocks.0.attn.qkv.bias": torch.ones(25)}, "decoder.diff_blocks.0.attn.qkv.bias"),
    ],
)
def test_b75_files_that_do_not_fit_are_named(tmp_path: Path, drop: str, extra: dict | None, named: str) -> None:
    file = tmp_path / "vae.safetensors"
    write_diffusion_vae(file, drop=drop, extra=extra)
    with pytest.raises(ValueError, match=named):
        VideoVAEBuilder(file, registry=StateDictRegistry()).check()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"stage_channels": [32, 16, 8, 4, 8]}, "8 channels reduced by 1 do not make a stage of 4"),
        ({"stage_depths": [1, 1]}, "5 stage_channels, 2 stage_depths and 4 upsamples"),
        ({"head_dim": 12}, "heads of 12 channels"),
        ({"stage5_channels": 64}, "stage5_channels is 64, but only 8"),
        ({"resampler_kind": "conv"}, "resampler_kind is 'conv'"),
        ({"in_channels": 8}, "latents of 16 channels, the decoder takes 8"),
    ],
)
def test_configs_that_contradict_themselves(tmp_path: Path, changes: dict, named: str) -> None:
    file = tmp_path / "vae.safetensors"
    write_diffusion_vae(file)
    tensors, metadata = read_all(file)
    config = json.loads(metadata["config"])
    config["vae"]["decoder"] |= changes
    write_header(file, {name: tuple(t.shape) for name, t in tensors.items()}, {"config": json.dumps(config)})
    with pytest.raises(ValueError, match=named):
        VideoVAEBuilder(file, registry=StateDictRegistry()).check()


def test_facts_of_a_checkpoint_with_a_diffusion_decoder(tmp_path: Path) -> None:
    file = tmp_path / "whole.safetensors"
    write_diffusion_vae(file, whole=TINY_23)
    facts = describe(file)
    assert facts.has_diffusion_decoder and facts.has_video_encoder
    assert (facts.scale_factors, facts.decode_min_cells) == ((8, 32, 32), 3)
    facts.require("video_vae")


PUBLISHED_DECODER = {
    "_class_name": "NADiffusionDecoder",
    "in_channels": 128,
    "out_channels": 3,
    "patch_size": 4,
    "head_dim": 64,
    "stage_channels": [2048, 1024, 512, 512, 256],
    "stage_depths": [4, 6, 4, 2, 8],
    "stage_kernels": [[3, 7, 7], [3, 7, 7], [3, 5, 5], [3, 5, 5], [11, 11, 11]],
    "upsamples": [[[1, 2, 2], 2], [[2, 1, 1], 2], [[2, 2, 2], 1], [[2, 2, 2], 2]],
    "spatial_padding_mode": "zeros",
    "resampler_kind": "linear",
    "stage5_kernel": [11, 11, 11],
    "timestep_scale_multiplier": 1000.0,
    "default_num_inference_steps": 1,
}


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Lists LTX-2.5's video VAE: the encoder of 2.3, and the decoder as public notes of its header describe it."""
    with lzma.open(Path(__file__).with_name("published_keys.json.xz"), "rt", encoding="utf-8") as file:
        table = json.load(file)["23"]
    shapes = {
        name.removeprefix("vae."): tuple(shape)
        for name, shape in table.items()
        if name.startswith(("vae.encoder.", "vae.per_channel_statistics.mean-of-means"))
        or name == "vae.per_channel_statistics.std-of-means"
    }

    def linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> None:
        shapes[f"decoder.{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"decoder.{name}.bias"] = (outputs,)

    def block(name: str, width: int, hidden: int) -> None:
        linear(f"{name}.attn.qkv", width, 3 * width)
        linear(f"{name}.attn.proj", width, width)
        linear(f"{name}.mlp.w_gate", width, hidden, bias=False)
        linear(f"{name}.mlp.w_up", width, hidden, bias=False)
        linear(f"{name}.mlp.w_down", hidden, width, bias=False)
        shapes.update({f"decoder.{name}.norm{n}.weight": (width,) for n in (1, 2)})
        shapes.update({f"decoder.{name}.attn.{n}_norm.weight": (64,) for n in "qk"})

    stages = [(2048, 4, 4 * 1024), (1024, 6, 2 * 512), (512, 4, 8 * 512), (512, 2, 8 * 256)]
    for stage, (width, depth, expanded) in enumerate(stages):
        linear(f"upsamples.{stage}.proj", width, expanded)
        for number in range(depth):
            block(f"det_stages.{stage}.{number}", width, 4 * width)
    for number in range(8):
        block(f"diff_blocks.{number}", 256, 1024)
        linear(f"diff_blocks.{number}.context_proj", 256, 256)
        shapes[f"decoder.diff_blocks.{number}.scale_shift_table"] = (7, 256)
    linear("conv_in", 128, 2048)
    linear("conv_in_x_t", 48, 256)
    linear("t_embedder.mlp.0", 256, 384)
    linear("t_embedder.mlp.2", 384, 384)
    linear("shared_adaln.proj", 384, 1792)
    linear("conv_out", 256, 48)
    return {**shapes, "decoder.norm_out.weight": (256,), "decoder.type_emb": (128,)}


def test_b75_the_published_decoder_loads_strictly(tmp_path: Path) -> None:
    """396 tensors, of which 310 are the decoder's and one, the mark of keyframe pictures, is not needed."""
    shapes = published_shapes()
    assert len(shapes) == 396 and sum(name.startswith("decoder.") for name in shapes) == 310
    with lzma.open(Path(__file__).with_name("published_keys.json.xz"), "rt", encoding="utf-8") as file:
        blocks = json.load(file)["23_config"]["vae"]["encoder_blocks"]
    encoder = {
        "dims": 3,
        "in_channels": 3,
        "out_channels": 128,
        "base_channels": 128,
        "blocks": blocks,
        "patch_size": 4,
        "latent_log_var": "constant",
        "latent_log_var_value": -7.824046010856292,
        "norm_layer": "pixel_norm",
        "spatial_padding_mode": "zeros",
    }
    section = {"_class_name": "CausalDiffusionVAE", "model_output_type": "x0", "encoder": encoder}
    config = {"transformer": None, "vae": {**section, "decoder": PUBLISHED_DECODER}}
    file = write_header(tmp_path / "ltx-2.5-video-vae-bf16.safetensors", shapes, {"config": json.dumps(config)})
    registry = StateDictRegistry()
    module = VideoVAEBuilder(file, registry=registry).check()
    assert module.scale_factors == (8, 32, 32) and module.min_cells == 7 and module._min_grid == (3, 7, 7)
    assert (
        len(module.state_dict()) == 396 - 1 + 2 * 2 * 24
    )  # less the mark; q, k and v of 24 blocks are one in the file
    assert Checkpoint([CheckpointFile(file)]).unclaimed == () and registry.files_read == 0


def test_what_an_absent_key_means(tmp_path: Path) -> None:
    file = tmp_path / "vae.safetensors"
    write_diffusion_vae(file)
    tensors, metadata = read_all(file)
    config = json.loads(metadata["config"])
    config["vae"] = {"_class_name": "CausalDiffusionVAE", "decoder": {}}
    write_header(file, {"vae.decoder.conv_in_x_t.weight": (8, 8)}, {"config": json.dumps(config)})
    kwargs = diffusion_decoder_kwargs(Checkpoint([CheckpointFile(file)]))
    assert (kwargs["decoder_num_inference_steps"], kwargs["decoder_model_output_type"]) == (2, "v")
    assert (kwargs["decoder_timestep_scale_multiplier"], kwargs["decoder_stage5_kernel"]) == (1.0, (3, 7, 7))
