"""Work of one rank or of each, without letting a failure drive the ranks apart."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..fleet import RankInfo, RunnerError

T = TypeVar("T")


def on_first_rank(info: RankInfo, work: Callable[[], T]) -> T | None:
    """Runs `work` on rank 0 and returns its result there, None on the others; collective.

    What goes wrong on rank 0 is raised as RunnerError on every rank alike: all leave the job in step, the fleet stays
    warm. `work` must not enter a collective; it runs on all cores, since the other ranks wait.
    """
    result, failure = None, _Failure(info)
    if info.rank == 0:
        with failure, _all_cores():
            result = work()
        failure.clean_up()
    if info.world_size > 1:
        told = [failure.text]
        dist.broadcast_object_list(told, src=0, group=info.group, device=info.device)
        failure.text = told[0]
    if failure.text is not None:
        raise RunnerError(failure.text)
    return result


def share(info: RankInfo, work: Callable[[], Tensor], shape: tuple[int, ...]) -> Tensor:
    """Runs `work` on the first rank and returns its float32 result of a known shape on every rank's CPU; collective."""
    made = on_first_rank(info, lambda: work().to(info.device, torch.float32).contiguous())
    assert made is None or tuple(made.shape) == shape, f"{tuple(made.shape)} in place of {shape}"
    if info.world_size == 1:
        return made.cpu()
    shared = torch.empty(shape, device=info.device) if made is None else made
    dist.broadcast(shared, src=0, group=info.group)
    return shared.cpu()


def on_every_rank(info: RankInfo, work: Callable[[], T]) -> list[T]:
    """Runs `work` on every rank and returns what each made, by rank; collective.

    What goes wrong on some rank is raised as RunnerError on every rank alike: all leave the job in step, the fleet
    stays warm. `work` must not enter a collective, and returns plain values.
    """
    result, failure = None, _Failure(info)
    with failure:
        result = work()
    failure.clean_up()
    answers: list[tuple[T | None, str | None]] = [(result, failure.text)]
    if info.world_size > 1:
        answers = answers * info.world_size
        dist.all_gather_object(answers, (result, failure.text), group=info.group)
    texts = {rank: text for rank, (_, text) in enumerate(answers) if text is not None}
    if len(texts) == info.world_size and len(set(texts.values())) == 1:
        raise RunnerError(texts[0])
    if texts:
        raise RunnerError("\n".join(f"Rank {rank}: {text}" for rank, text in texts.items()))
    return [made for made, _ in answers]


@contextmanager
def _all_cores() -> Iterator[None]:
    """Gives a block every core of the machine: the other ranks wait, and the last bits of what it makes then do not
    depend on how many ranks share the cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Failure:
    """Keeps what a block raised as text, so that it can be told to the other ranks."""

    def __init__(self, info: RankInfo) -> None:
        self.text: str | None = None
        self._device = info.device

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        if isinstance(error, torch.OutOfMemoryError):
            self.text = f"{self._device} is out of memory: {error}. Choose a lower precision or a smaller clip."
        else:
            is_sentence = isinstance(error, ValueError | RunnerError)
            self.text = str(error) if is_sentence else f"{type(error).__name__}: {error}"
        return True

    def clean_up(self) -> None:
        """Frees what failed work held; inside the block its traceback would still hold it."""
        if self.text is not None:
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
