"""Clips and pictures as files: what is written is what a player shows and plays."""

from pathlib import Path

import av
import numpy as np
import pytest
import torch

from mgpu_runtime.pipeline.jobs import Decoded
from mgpu_runtime.pipeline.media import write_mp4


@pytest.mark.parametrize("rate", [24000, 48000])
def test_sound_is_heard_where_it_was_and_ends_with_the_picture(rate: int, tmp_path: Path) -> None:
    seconds, fps = 1.0, 24.0
    waveform = torch.zeros(1, 2, round(1.2 * rate))
    click = rate // 2
    waveform[:, :, click : click + 8] = 1.0
    path = tmp_path / "clip.mp4"
    write_mp4(path, Decoded(torch.zeros(24, 64, 64, 3), waveform, rate), fps)
    with av.open(str(path)) as container:
        stream = container.streams.audio[0]
        assert abs(float(stream.duration * stream.time_base) - seconds) <= 1024 / rate
        heard: list[np.ndarray] = []
        starts: list[float] = []
        for frame in container.decode(stream):
            starts.append(float(frame.pts * frame.time_base))
            heard.append(np.abs(frame.to_ndarray()).max(0))
    loudest = int(np.concatenate(heard).argmax()) / rate + starts[0]
    assert abs(loudest - 0.5) < 0.002
