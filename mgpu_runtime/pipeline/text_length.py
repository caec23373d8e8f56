"""From the seconds that a prompt asks for to the frames of a clip."""

import math

from ..sampling.sizes import latent_frames, pixel_frames, round_frames_up


def clip_length(seconds: float, fps: float, max_seconds: float, factor: int = 8) -> int:
    """Returns the frames of a clip, 8k+1 rounded up, and at most as many as fit into `max_seconds`.

    `factor` is the pixel frames of a latent. Raises ValueError where a number is not positive.
    """
    for name, number in (("seconds", seconds), ("fps", fps), ("max_seconds", max_seconds)):
        if not (math.isfinite(number) and number > 0):
            raise ValueError(f"{name} must be above 0, got {number}")
    wanted = round_frames_up(max(1, round(min(seconds, max_seconds) * fps)), factor)
    most = max(1, round(max_seconds * fps))
    return min(wanted, pixel_frames(latent_frames(most, factor), factor))
