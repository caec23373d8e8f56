"""What runs inside a worker: the base class of runners, and what a job can say while it runs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .codec import pack
from .errors import FleetError, JobCancelled
from .records import Emit

if TYPE_CHECKING:
    from collections.abc import Callable

    from .frames import Frame


@dataclass(frozen=True)
class RankInfo:
    """Says which of the workers this one is."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup


class JobContext:
    """The way from a running job to whoever reads its stream; may be used from any thread of the worker."""

    def __init__(
        self, job_id: str, info: RankInfo, send: "Callable[[Frame], bool]", is_cancelled: "Callable[[], bool]"
    ) -> None:
        self.id = job_id
        self._info = info
        self._send = send
        self._is_cancelled = is_cancelled

    def progress(self, stage: str, step: int, of: int, sigma: float | None = None) -> None:
        """Tells that `step` of `of` steps of a stage are done."""
        self._emit("progress", {"stage": stage, "step": step, "of": of, "sigma": sigma})

    def preview(self, image: torch.Tensor) -> None:
        """Shows a uint8 picture of shape (H, W, 3); ValueError for anything else."""
        if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[-1] != 3:
            raise ValueError(
                f"A preview must be a uint8 tensor (H, W, 3), but this is {image.dtype} {tuple(image.shape)}."
            )
        self._emit("preview", {"image": image})

    def latent(self, name: str, tensor: torch.Tensor) -> None:
        """Hands out a latent of any shape and dtype under a name."""
        self._emit("latent", {"name": name, "tensor": tensor})

    def frames(self, start: int, tensor: torch.Tensor) -> None:
        """Hands out finished frames of shape (F, H, W, 3), float, the first of which is number `start`."""
        if not tensor.is_floating_point() or tensor.ndim != 4 or tensor.shape[-1] != 3:
            raise ValueError(
                f"Frames must be a float tensor (F, H, W, 3), but this is {tensor.dtype} {tuple(tensor.shape)}."
            )
        self._emit("frames", {"start": start, "tensor": tensor})

    def log(self, text: str) -> None:
        """Says a line to the user."""
        self._emit("log", {"text": text})

    def raise_if_cancelled(self) -> None:
        """Raises JobCancelled on all ranks or on none; a collective, so every rank must call it at the same step."""
        flag = torch.tensor([int(self._is_cancelled())], dtype=torch.int32, device=self._info.device)
        # A rank that acted on its own flag alone would leave its peers hanging in their next collective.
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._info.group)
        if flag.item():
            raise JobCancelled(f"Job {self.id} was cancelled.")

    def _emit(self, kind: str, data: dict) -> None:
        if not self._send(pack(Emit(self._info.rank, self.id, kind), data)):
            raise FleetError("The supervisor of this worker is gone.")


class MGPURunner:
    """The work of one rank; all ranks run the same calls in lockstep.

    `info` is set before `setup` is called. A runner class must be importable by its module's plain name.
    """

    info: RankInfo

    def setup(self, **kwargs: object) -> None:
        """Prepares the rank once, when the fleet starts; collectives are allowed."""

    def check(self, **kwargs: object) -> None:
        """Raises ValueError or RunnerError when this rank cannot do the job; collectives are not allowed.

        A refusal by any rank keeps all ranks out of the job and costs the fleet nothing.
        """

    def __call__(self, job: JobContext, **kwargs: object) -> object:
        """Does one job and returns its result; the one of rank 0 is handed to the caller."""
        raise TypeError(f"{type(self).__qualname__} does not define __call__(self, job, **kwargs).")
