"""Pictures as the video autoencoder takes them: geometry against numpy, the compression against a file of PyAV."""

from __future__ import annotations

import io
import math

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_runtime.pipeline.h264 import open_encoder
from mgpu_runtime.pipeline.images import prepare

MODEL_CRF = 33


def _pictures(num: int, rows: int, columns: int, colours: int = 3) -> torch.Tensor:
    """Returns pictures of 8-bit values, as a file gives them: smooth colours with some noise."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    y, x = torch.meshgrid(torch.linspace(0, 3, rows), torch.linspace(0, 4, columns), indexing="ij")
    waves = [0.5 + 0.35 * torch.sin(x * (1 + k) + y * (3 - k)) for k in range(colours)]
    noise = 0.05 * torch.randn(num, rows, columns, colours, generator=generator)
    return ((torch.stack(waves, -1) + noise).clamp(0, 1) * 255).round() / 255


def _expected(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """Reads a picture (H, W, 3) at the centres of the pixels that fill the size: (3, height, width) of -1..1."""
    scale = max(height / picture.shape[0], width / picture.shape[1])
    lines = [np.moveaxis(picture * 255, 2, 0)]
    for axis, side in ((1, height), (2, width)):
        length = lines[-1].shape[axis]
        resized = math.ceil(length * scale)
        centres = (np.arange(side) + (resized - side) // 2 + 0.5) * length / resized - 0.5
        rows = np.moveaxis(lines[-1], axis, 2)
        read = np.stack([[np.interp(centres, np.arange(length), row) for row in plane] for plane in rows])
        lines.append(np.moveaxis(read, 2, axis))
    return lines[-1] / 127.5 - 1


@pytest.mark.parametrize(
    "source", [(64, 200), (200, 64), (40, 30), (64, 64), (33, 47), (1, 1), (129, 65), (640, 480)], ids=str
)
@pytest.mark.parametrize("size", [(64, 96), (96, 64)], ids=str)
def test_resize_fills_and_crops_the_centre(source: tuple[int, int], size: tuple[int, int]) -> None:
    picture = _pictures(1, *source)
    pixels = prepare(picture, *size, crf=0)
    assert pixels.shape == (1, 3, 1, *size) and pixels.dtype == torch.float32
    np.testing.assert_allclose(pixels[0, :, 0].numpy(), _expected(picture[0].double().numpy(), *size), atol=2e-5)


@settings(max_examples=60, deadline=None)
@given(*(st.integers(1, 80) for _ in range(2)), *(st.integers(1, 4).map(lambda n: 32 * n) for _ in range(2)))
def test_every_size_is_filled_without_distortion(rows: int, columns: int, height: int, width: int) -> None:
    """Reads coordinates back: along both axes one step in the result is the same step in the source."""
    y, x = torch.meshgrid((torch.arange(rows) + 0.5) / 80, (torch.arange(columns) + 0.5) / 80, indexing="ij")
    pixels = prepare(torch.stack([y, x, y * 0], -1)[None], height, width, crf=0)
    assert pixels.shape == (1, 3, 1, height, width)
    down, across = (pixels[0, :2, 0] + 1) * 127.5 / 255 * 80
    steps, pixel = [], max(1.0, min(rows / height, columns / width))
    for places, length in ((down[:, 0], rows), (across[0], columns)):
        inside = places[(places > 0.6) & (places < length - 0.6)].double()
        steps += [float(step) for step in [inside.diff().mean()] if len(inside) > 1]
        middle = (places[0] + places[-1]) / 2
        assert abs(float(middle) - length / 2) <= 0.5 + 0.52 * pixel, "not the centre"
    if len(steps) == 2:
        assert steps[0] == pytest.approx(steps[1], rel=0.04)  # the resized side is rounded up to whole pixels


@pytest.mark.parametrize("size", [(64, 96), (48, 80)], ids=str)
def test_crf_0_at_the_same_size_is_bit_exact(size: tuple[int, int]) -> None:
    levels = torch.arange(256, dtype=torch.float32).repeat(math.ceil(size[0] * size[1] * 3 / 256))
    levels = levels[: size[0] * size[1] * 3].view(1, *size, 3)
    pixels = prepare(levels / 255, *size, crf=0)
    assert torch.equal(pixels, (levels / 127.5 - 1).permute(3, 0, 1, 2)[None])


def test_values_outside_the_range_are_clipped() -> None:
    picture = torch.tensor([-0.5, 0.0, 1.0, 2.0]).view(1, 2, 2, 1)
    assert prepare(picture, 2, 2, crf=0)[0, 0, 0].tolist() == [[-1, -1], [1, 1]]


def test_grey_is_repeated_and_transparency_dropped() -> None:
    grey, colour, alpha = _pictures(2, 40, 50, 1), _pictures(2, 40, 50, 3), torch.rand(2, 40, 50, 1)
    assert torch.equal(prepare(grey, 32, 64, MODEL_CRF), prepare(grey.repeat(1, 1, 1, 3), 32, 64, MODEL_CRF))
    assert torch.equal(prepare(torch.cat([colour, alpha], -1), 32, 64, 33), prepare(colour, 32, 64, MODEL_CRF))


def _through_a_file(picture: np.ndarray, crf: int) -> np.ndarray:
    """Writes a picture of bytes as a film of one frame and reads it."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as film:
        stream = film.add_stream("libx264", rate=1, options={"crf": str(crf), "preset": "veryfast"})
        stream.height, stream.width, stream.pix_fmt = *picture.shape[:2], "yuv420p"
        stream.codec_context.thread_count = 1
        frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="yuv420p")
        film.mux([*stream.encode(frame), *stream.encode()])
    with av.open(io.BytesIO(file.getvalue())) as film:
        return next(film.decode(video=0)).to_ndarray(format="rgb24")


@pytest.mark.parametrize("crf", [18, MODEL_CRF])
def test_compression_is_that_of_a_film_of_one_frame(crf: int) -> None:
    picture = _pictures(1, 144, 192)
    film = _through_a_file((picture[0] * 255).round().byte().numpy(), crf)
    assert np.array_equal(
        prepare(picture, 144, 192, crf)[0, :, 0].numpy(), film.transpose(2, 0, 1) / np.float32(127.5) - 1
    )


def test_crf_loses_detail_in_measure_and_the_same_each_time() -> None:
    picture = _pictures(1, 144, 192)
    plain, *lossy = [prepare(picture, 144, 192, crf) for crf in (0, 18, MODEL_CRF, 51)]
    errors = [float((pixels - plain).abs().mean()) for pixels in lossy]
    assert 0.005 < errors[0] < errors[1] < errors[2] < 0.2 and errors[1] < 0.1, errors
    assert torch.equal(lossy[1], prepare(picture, 144, 192, MODEL_CRF))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    again = prepare(picture, 144, 192, MODEL_CRF)
    torch.set_num_threads(threads)
    assert torch.equal(lossy[1], again)


def test_each_picture_of_a_clip_is_compressed_alone() -> None:
    clip = torch.cat([_pictures(1, 64, 96), _pictures(1, 64, 96).flip(1), _pictures(1, 64, 96).flip(2)])
    together = prepare(clip, 64, 96, MODEL_CRF)
    assert together.shape == (1, 3, 3, 64, 96)
    for index in range(3):
        assert torch.equal(together[:, :, index : index + 1], prepare(clip[index : index + 1], 64, 96, MODEL_CRF))


def test_odd_sides_lose_their_last_pixels_in_compression_alone() -> None:
    picture = _pictures(1, 65, 97)
    assert torch.equal(prepare(picture, 64, 96, MODEL_CRF), prepare(picture[:, :64, :96], 64, 96, MODEL_CRF))
    assert not torch.equal(prepare(picture, 64, 96, 0), prepare(picture[:, :64, :96], 64, 96, 0))


@pytest.mark.parametrize("source", [(1, 1), (1, 40), (40, 1), (2, 3), (3, 3)], ids=str)
def test_the_smallest_pictures_are_compressed_too(source: tuple[int, int]) -> None:
    picture = torch.full((1, *source, 3), 0.5)
    assert (prepare(picture, 32, 64, MODEL_CRF) - 2 * 0.5 + 1).abs().max() < 0.06


def test_a_pyav_without_the_encoder_is_named_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"no libx264-absent.*crf to 0"):
        open_encoder("libx264-absent")


@pytest.mark.parametrize("shape", [(8, 8, 3), (1, 8, 8, 2), (0, 8, 8, 3), (1, 8, 0, 3), (1, 3, 8, 8)], ids=str)
def test_what_is_no_picture_is_refused_with_its_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"1, 3 or 4 colours.*\(" + ", ".join(map(str, shape))):
        prepare(torch.zeros(shape), 32, 32, 0)


def test_pictures_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        prepare(torch.full((1, 8, 8, 3), math.nan), 32, 32, 0)
