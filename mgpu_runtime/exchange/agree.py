"""Lets the ranks of a group tell each other short texts before they agree on anything else."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .errors import AgreementLost, ExchangeError, GaveUp
from .roll_call import RollCall
from .waiting import Wait

if TYPE_CHECKING:
    from .processes import Processes  # which asks for texts itself

WIDTH = 4096  # bytes a rank may say; longer texts are cut
FIRST_SECONDS = 60.0  # for a first agreement, before anything is known of the others
PATIENCE = 10.0  # seconds
_WHAT = "the ranks' agreement on an exchange"
_GAVE_UP = "\x18"  # begins what a rank says that has left the steps of an opening
_FAILED = "\x15"  # begins what a rank says that has failed in the step all ranks are in


@dataclass(frozen=True)
class _Watch:
    group: dist.ProcessGroup
    processes: "Processes"
    patience: float


_watch: ContextVar[_Watch | None] = ContextVar("_watch", default=None)  # of this thread: openings do not share it


@contextmanager
def watching(group: dist.ProcessGroup, processes: "Processes", patience: float) -> Iterator[None]:
    """Has all agreements of a group inside know its processes, also those of transports that do not know them yet."""
    token = _watch.set(_Watch(group, processes, patience))
    try:
        yield
    finally:
        _watch.reset(token)


def gather_texts(
    group: dist.ProcessGroup,
    text: str,
    *,
    timeout: float = FIRST_SECONDS,
    processes: "Processes | None" = None,
    patience: float = PATIENCE,
) -> list[str]:
    """Returns what each rank said, by rank. Collective; works on gloo and NCCL and unpickles nothing.

    `timeout` is in seconds. Where `processes` are known (see also `watching`), one that has ended or been stopped for
    `patience` seconds is not waited for that long. Raises ExchangeTimeout when the time is over or a rank is stopped,
    PeerGone or AgreementLost where one has left the group, GaveUp where one has failed and is in `agree_on` by now.
    """
    said = _gather(group, text, timeout, processes, patience)
    failure = _failure(said, _GAVE_UP)
    if failure:
        raise GaveUp(failure)
    return said


def gather_or_fail(
    group: dist.ProcessGroup, failure: str, text: str = "", *, timeout: float = FIRST_SECONDS
) -> list[str]:
    """Returns what each rank said, by rank, where none has failed. Collective.

    `failure` is why this rank has, or empty. Raises ExchangeError with it on every rank alike, and as `gather_texts`.
    """
    said = gather_texts(group, f"{_FAILED}{failure}" if failure else text, timeout=timeout)
    failure = _failure(said, _FAILED)
    if failure:
        raise ExchangeError(failure)
    return said


def agree_on(group: dist.ProcessGroup, failure: str, *, timeout: float) -> str:
    """Returns why some rank has failed in what all ranks did until now, or nothing where none has. Collective.

    `failure` is this rank's reason, or empty. A rank that failed may call this while the others are in `gather_texts`,
    which raises GaveUp there: the ranks have agreed by that, and the others do not call this. Raises as `gather_texts`.
    """
    return _failure(_gather(group, f"{_GAVE_UP}{failure}" if failure else "", timeout, None, PATIENCE), _GAVE_UP)


def wait_for(work: dist.Work, wait: Wait) -> None:
    """Waits for a collective without giving it up to torch, which ends the whole group when its own wait runs out.

    Raises ExchangeTimeout or PeerGone, or torch's RuntimeError where a rank has left and `wait` cannot tell which.
    """
    while not work.is_completed():
        wait.check()
        time.sleep(0.0005)
    try:
        work.wait(timedelta(seconds=1))  # raises what the collective met
    except RuntimeError:
        wait.check_gone()
        raise


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Returns where a group's collectives take their tensors: the CPU where it can, else this rank's GPU."""
    if torch.device("cpu") in group._device_types:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def global_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Returns the ranks of a group's members in the world; nothing where those are the ranks in the group."""
    numbers = tuple(dist.get_process_group_ranks(group))
    return () if numbers == tuple(range(len(numbers))) else numbers


def _gather(
    group: dist.ProcessGroup, text: str, timeout: float, processes: "Processes | None", patience: float
) -> list[str]:
    said = text.encode()[:WIDTH]
    mine = torch.tensor(list(said.ljust(WIDTH, b"\0")), dtype=torch.uint8).to(device_of(group))
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    watch = _watch.get()
    if processes is None and watch is not None and watch.group is group:
        processes, patience = watch.processes, watch.patience
    # Where nothing is known of the others' processes, their words in the store tell who has not come.
    roll = RollCall(group, "opening", "here") if processes is None else None
    wait = Wait(
        dist.get_rank(group),
        _WHAT,
        timeout,
        lambda: () if roll is None else roll.missing,
        processes=processes,
        stopped_after=patience,
        global_ranks=global_ranks(group),
    )
    try:
        try:
            work = dist.all_gather(all_of_them, mine, group=group, async_op=True)
        except RuntimeError:
            wait.check_gone()
            raise
        wait_for(work, wait)
    except ExchangeError:
        raise
    except RuntimeError as error:
        raise AgreementLost(f"the ranks cannot agree on an exchange: {error}") from error
    finally:
        if roll is not None:
            roll.close()
    return [bytes(texts.cpu().tolist()).rstrip(b"\0").decode(errors="ignore") for texts in all_of_them]


def _failure(said: list[str], sign: str) -> str:
    """Returns the first failure among what the ranks said, or nothing. One of all ranks counts as nobody's own."""
    failed = {rank: text.removeprefix(sign) for rank, text in enumerate(said) if text.startswith(sign)}
    if not failed:
        return ""
    rank, text = next(iter(failed.items()))
    return text if len(failed) == len(said) else f"on rank {rank}: {text}"
