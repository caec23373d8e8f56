"""Measures what is seen and heard in a saved clip."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np


@dataclass(frozen=True)
class Clip:
    """Holds frames (F, H, W, 3) uint8, a waveform (N,) float of the mixed channels, and its rate in Hz."""

    frames: np.ndarray
    waveform: np.ndarray
    sample_rate: int
    fps: float

    @property
    def seconds_of_sound(self) -> float:
        return len(self.waveform) / self.sample_rate

    def red_path(self) -> np.ndarray:
        """Returns where the red lies in each frame, as a share of the width (F,)."""
        red, green, blue = np.moveaxis(self.frames.astype(np.float64), -1, 0)
        weight = np.clip(red - np.maximum(green, blue), 0, None)
        columns = weight.sum(axis=1)
        assert (columns.sum(axis=1) > 0).all(), "a frame shows no red at all"
        places = (np.arange(columns.shape[1]) + 0.5) / columns.shape[1]
        return (columns * places).sum(axis=1) / columns.sum(axis=1)

    def pitch(self) -> float:
        """Returns the strongest frequency in Hz."""
        window = np.hanning(len(self.waveform))
        spectrum = np.abs(np.fft.rfft(self.waveform * window, n=8 * len(self.waveform)))
        return float(np.fft.rfftfreq(8 * len(self.waveform), 1 / self.sample_rate)[spectrum.argmax()])


def read_clip(path: Path) -> Clip:
    """Decodes a video file whole."""
    with av.open(str(path)) as container:
        fps = float(container.streams.video[0].average_rate)
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    with av.open(str(path)) as container:
        sound = container.streams.audio[0]
        rate = sound.rate
        parts = [frame.to_ndarray() for frame in container.decode(sound)]
    return Clip(frames, np.concatenate(parts, axis=1).mean(axis=0), rate, fps)
