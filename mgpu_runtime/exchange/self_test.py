"""A tiny exchange with known values: whether a transport that could be opened also works."""

import time

import torch
from torch import Tensor

from .all2all import All2All
from .errors import ExchangeError
from .layout import deal, starts
from .stream_order import mark

SECONDS = 20.0  # for a first use, which may load or compile things
_BATCH, _CHANNELS = 2, 8
_VALUES = 251  # exact in bfloat16; a prime, so that no misplaced row looks right


def self_test(exchange: All2All, device: torch.device) -> None:
    """Moves known tensors through an exchange among two ranks or more. Collective.

    Raises ExchangeError for wrong values, after all has been moved, so that ranks that got right ones do not wait for
    this one; also where it does not end in time. A failing device may raise other RuntimeErrors.
    """
    wrong: list[str] = []
    with exchange.patience(SECONDS), torch.no_grad():
        world_size = exchange.world_size
        uneven, even = tuple(range(1, world_size + 1)), (2,) * world_size  # some transports treat these differently
        if device.type == "cuda":
            even = (4096,) * world_size  # megabytes, as a faulty path may carry a few bytes well
        for dtype in (torch.float32, torch.bfloat16):
            for tokens, num_heads in ((uneven, world_size + 1), (even, 2 * world_size)):
                wrong += _test(exchange, device, dtype, tokens, deal(num_heads, world_size))
    if wrong:
        raise ExchangeError(f"its self test got wrong values from {wrong[0]}")


def _test(
    exchange: All2All, device: torch.device, dtype: torch.dtype, tokens: tuple[int, ...], heads: tuple[int, ...]
) -> list[str]:
    rank = exchange.rank
    whole = torch.arange(_BATCH * sum(tokens) * sum(heads) * _CHANNELS, dtype=torch.float32).remainder(_VALUES)
    whole = whole.view(_BATCH, sum(tokens), sum(heads), _CHANNELS).to(device, dtype)
    local = whole.narrow(1, starts(tokens)[rank], tokens[rank])
    share = whole.narrow(2, starts(heads)[rank], heads[rank])
    pending = (
        exchange.start_send_recv_heads(local, tokens),
        exchange.start_gather_heads(share, tokens, sum(heads)),
        exchange.start_allgather(local, tokens),
    )
    results = [one.wait() for one in pending]
    _wait_for_device(device)
    names, wanted = ("send_recv_heads", "gather_heads", "allgather"), (share, local, whole)
    return [
        f"{name} in {dtype}" for name, got, want in zip(names, results, wanted, strict=True) if not _equal(got, want)
    ]


def _wait_for_device(device: torch.device) -> None:
    """Waits for a GPU by asking, since a call that waits would never return from a faulty path between two GPUs."""
    if device.type != "cuda":
        return
    done, deadline = mark(device), time.monotonic() + SECONDS
    while not done.query():
        if time.monotonic() > deadline:
            raise ExchangeError(
                f"its self test did not end within {SECONDS:g} s: the direct path between the GPUs may be faulty"
            )
        time.sleep(0.001)


def _equal(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and got.dtype == want.dtype and torch.equal(got, want)
