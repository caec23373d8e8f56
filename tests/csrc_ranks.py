"""Ranks that exchange through shared memory: what the tests of csrc have in common."""

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from mgpu_runtime.exchange import ExchangeError, exchange_for, native
from mgpu_runtime.exchange.shared_memory import SharedMemory
from tests.rank_group import RankGroup


def set_up(rank: int, group: dist.ProcessGroup) -> dist.ProcessGroup:
    return group


def opened(copy_out: bool = False, timeout: float = 30.0) -> SharedMemory:
    exchange = exchange_for(None if not dist.is_initialized() else dist.group.WORLD, transport="csrc", timeout=timeout)
    assert isinstance(exchange, SharedMemory)
    exchange.copy_out = copy_out
    return exchange


def do(ranks: RankGroup, fn: Callable, *args: object) -> None:
    """Runs a function on every rank; each returns a list of what was wrong."""
    assert ranks.ask(fn, *args) == [[]] * ranks.world_size


@pytest.fixture(scope="module")
def pair() -> Iterator[RankGroup]:
    """Gives two ranks to a module that imports this."""
    try:
        native.cpu_library()
    except ExchangeError as error:
        pytest.skip(str(error))
    with RankGroup(2, set_up) as group:
        yield group
