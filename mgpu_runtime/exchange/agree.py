"""Lets the ranks of a group tell each other short texts before they agree on anything else."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from .errors import ExchangeError, ExchangeTimeout

WIDTH = 4096  # bytes a rank may say; longer texts are cut


def gather_texts(group: dist.ProcessGroup, text: str, *, timeout: float | None = None) -> list[str]:
    """Returns what each rank said, by rank. Collective; works on gloo and NCCL and unpickles nothing.

    `timeout` is in seconds; without it the group's own holds. Raises ExchangeTimeout when it is over, ExchangeError
    where a rank has left the group.
    """
    said = text.encode()[:WIDTH]
    device = device_of(group)
    mine = torch.tensor(list(said.ljust(WIDTH, b"\0")), dtype=torch.uint8).to(device)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        work = dist.all_gather(all_of_them, mine, group=group, async_op=True)
        if timeout is None:
            work.wait()
        else:
            wait_for(work, timeout, "the ranks' agreement on an exchange")
    except ExchangeError:
        raise
    except RuntimeError as error:
        raise ExchangeError(f"the ranks cannot agree on an exchange: {error}") from error
    return [bytes(texts.cpu().tolist()).rstrip(b"\0").decode(errors="ignore") for texts in all_of_them]


def wait_for(work: dist.Work, timeout: float, what: str) -> None:
    """Waits for a collective without giving it up to torch, which ends the whole group when its own wait runs out.

    Raises ExchangeTimeout, which cannot name the missing ranks, or torch's RuntimeError where a rank has left.
    """
    deadline = time.monotonic() + timeout
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise ExchangeTimeout(
                f"{what} did not end within {timeout:g} s, and the transport cannot tell which rank is missing. Look "
                "for an error of another rank, or raise the timeout"
            )
        time.sleep(0.0005)
    work.wait(timedelta(seconds=max(1.0, timeout)))  # raises what the collective met


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Returns where a group's collectives take their tensors: the CPU where it can, else this rank's GPU."""
    if torch.device("cpu") in group._device_types:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
