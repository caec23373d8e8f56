"""The command line end to end: a prompt becomes a playable file."""

from pathlib import Path

import av
import numpy as np
import pytest

from mgpu_runtime.cli import main
from tests.goldens import TOY


def test_generate_makes_a_clip_with_sound_that_shows_the_prompt(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = tmp_path / "clip.mp4"
    options = {
        "checkpoint": TOY / "ltx-toy-23.safetensors",
        "text-encoder": TOY / "gemma-toy",
        "upsampler": TOY / "ltx-toy-upsampler-x2.safetensors",
        "prompt": "a red ball moving right on a dark background",
        "height": 256,
        "width": 384,
        "frames": 17,
        "schedule": "distilled",
        "max-length": 128,
        "tiles": "1x2",
        "devices": "cpu:2",
        "output": output,
    }
    assert main(["generate", *(str(part) for name, value in options.items() for part in (f"--{name}", value))]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == str(output)
    assert "SP stage: 8 of 8" in printed.err and "TDP stage: 2 of 2" in printed.err
    with av.open(str(output)) as container:
        pictures = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        assert container.streams.video[0].average_rate == 24 and container.streams.audio[0].rate == 48000
    with av.open(str(output)) as container:
        seconds = sum(frame.samples for frame in container.decode(audio=0)) / 48000
    assert pictures.shape == (17, 256, 384, 3) and abs(seconds - 17 / 24) < 0.05
    red = np.clip(pictures[..., 0].astype(float) - pictures[..., 1:].max(-1), 0, None)
    columns = (red.sum(1) * np.arange(384)).sum(-1) / red.sum((1, 2))
    assert columns[-1] - columns[0] > 384 / 5
