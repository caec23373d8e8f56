"""What a stage tells while it runs: the first rank speaks for all."""

from torch import Tensor

from ..fleet import JobContext, RankInfo


class Progress:
    """Reports from the first rank; the cancel vote is taken by all."""

    def __init__(self, job: JobContext, info: RankInfo) -> None:
        self.job = job
        self.speaks = info.rank == 0

    def step(self, stage: str, step: int, of: int, sigma: float | None = None) -> None:
        """Tells that `step` of `of` steps of a stage are done."""
        if self.speaks:
            self.job.progress(stage, step, of, sigma)

    def log(self, text: str) -> None:
        """Says a line to the user."""
        if self.speaks:
            self.job.log(text)

    def loading(self, component: str) -> None:
        """Tells that a component is about to be loaded."""
        self.step(f"load {component}", 0, 1)

    def preview(self, image: Tensor) -> None:
        """Shows a uint8 picture (H, W, 3)."""
        if self.speaks:
            self.job.preview(image)

    def put(self, start: int, frames: Tensor) -> None:
        """Hands out finished frames (N, H, W, 3) float32 0..1, the first of which is number `start`."""
        self.job.frames(start, frames)

    def raise_if_cancelled(self) -> None:
        """Raises JobCancelled on all ranks or on none; every rank must call it at the same step."""
        self.job.raise_if_cancelled()
