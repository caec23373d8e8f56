"""Work that one rank does for all, without letting its failure drive the ranks apart."""

from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

from ..fleet import RankInfo, RunnerError

T = TypeVar("T")


def on_first_rank(info: RankInfo, work: Callable[[], T]) -> T | None:
    """Runs `work` on rank 0 and returns its result there, None on the others; collective.

    What goes wrong on rank 0 is raised as RunnerError on every rank alike: all leave the job in step, the fleet stays
    warm. `work` must not enter a collective.
    """
    result, failure = None, _Failure()
    if info.rank == 0:
        with failure:
            result = work()
    if info.world_size > 1:
        told = [failure.text]
        dist.broadcast_object_list(told, src=0, group=info.group, device=info.device)
        failure.text = told[0]
    if failure.text is not None:
        raise RunnerError(failure.text)
    return result


class _Failure:
    """Keeps what a block raised as text, so that it can be told to the other ranks."""

    def __init__(self) -> None:
        self.text: str | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            self.text = f"GPU 0 is out of memory: {error}. Choose a lower precision or a smaller clip."
        else:
            self.text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return True
