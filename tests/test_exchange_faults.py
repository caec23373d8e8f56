"""What the other ranks see when one stops, dies or is slow: an error that names it, soon, and never a hang.

One group of processes for each world size goes through all of it, the killed rank last.
"""

import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from mgpu_runtime.exchange import All2All, ExchangeError, ExchangeTimeout, exchange_for
from tests.rank_group import RankGroup

TIMEOUT = 1.0
SLACK = 2.0  # seconds an error may come after the timeout
TRANSPORTS = ("csrc", "gloo")


Exchanges = dict[str, All2All]  # by transport


def set_up(rank: int, group: dist.ProcessGroup) -> Exchanges:
    return {}


def open_exchange(exchanges: Exchanges, transport: str, wait_while_busy: bool) -> str:
    """Opens an exchange over a group of its own: after a failure gloo's group is out of step."""
    try:
        exchanges[transport] = exchange_for(
            dist.new_group(), transport=transport, timeout=TIMEOUT, wait_while_busy=wait_while_busy
        )
    except ExchangeError as error:
        return str(error)
    return ""


def do_exchange(exchanges: Exchanges, transport: str, times: int = 1) -> tuple[str, str, tuple[int, ...], float]:
    """Exchanges; returns the error's class and text, the ranks it names as missing, and the seconds it took."""
    exchange, begin = exchanges[transport], time.monotonic()
    error: Exception | None = None
    try:
        for _ in range(times):
            exchange.send_recv_heads(torch.ones(1, 300, 4, 64))
    except ExchangeError as caught:
        error = caught
    seconds = time.monotonic() - begin
    return type(error).__name__ if error else "", str(error or ""), getattr(error, "missing", ()), seconds


def do_exchange_with_patience(exchanges: Exchanges, transport: str) -> tuple[str, str, tuple[int, ...], float]:
    """Exchanges as a forward does, which waits long for a rank that works elsewhere."""
    with exchanges[transport].patience(600.0):
        return do_exchange(exchanges, transport)


def work_then_exchange(exchanges: Exchanges, transport: str, seconds: float) -> tuple[str, str, tuple[int, ...], float]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.ones(1000).sum()
    return do_exchange(exchanges, transport)


def sleep_then_exchange(
    exchanges: Exchanges, transport: str, seconds: float
) -> tuple[str, str, tuple[int, ...], float]:
    time.sleep(seconds)
    return do_exchange(exchanges, transport)


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(request.param, set_up) as group:
        yield group


def opened(ranks: RankGroup, transport: str, wait_while_busy: bool = False) -> list[int]:
    """Opens a fresh exchange, tries it, and returns the ranks other than the last, which is the one that fails."""
    reason = ranks.ask(open_exchange, transport, wait_while_busy)[0]
    if reason:
        pytest.skip(reason)
    assert [answer[0] for answer in ranks.ask(do_exchange, transport, 3)] == [""] * ranks.world_size
    return list(range(ranks.world_size - 1))


def tell_all(ranks: RankGroup, others: list[int], transport: str, call: Callable = do_exchange) -> None:
    for rank in others:
        ranks.tell(rank, call, transport)


@pytest.mark.parametrize("call", [do_exchange, do_exchange_with_patience])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_rank_is_named_in_time(ranks: RankGroup, transport: str, call: Callable) -> None:
    others = opened(ranks, transport)
    last = ranks.world_size - 1
    ranks.stop(last)
    try:
        tell_all(ranks, others, transport, call)
        for kind, text, missing, seconds in ranks.hear_all(others):
            assert kind == ExchangeTimeout.__name__ and missing == (last,)
            assert f"rank {last}" in text and "1 s" in text and "stopped" in text and "send_recv_heads" in text
            assert TIMEOUT <= seconds < TIMEOUT + SLACK
        tell_all(ranks, others, transport)
        for kind, _, _, seconds in ranks.hear_all(others):  # what is broken says so at once
            assert kind == ExchangeError.__name__ and seconds < TIMEOUT / 2
    finally:
        ranks.resume(last)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_patience_is_for_a_rank_that_is_late(ranks: RankGroup, transport: str) -> None:
    others = opened(ranks, transport)
    last = ranks.world_size - 1
    ranks.tell(last, sleep_then_exchange, transport, 1.6 * TIMEOUT)
    tell_all(ranks, others, transport, do_exchange_with_patience)
    assert [answer[0] for answer in ranks.hear_all()] == [""] * ranks.world_size


def test_csrc_tells_a_late_rank_that_the_others_gave_up(ranks: RankGroup) -> None:
    others = opened(ranks, "csrc")
    ranks.tell(ranks.world_size - 1, sleep_then_exchange, "csrc", TIMEOUT + 0.5)
    tell_all(ranks, others, "csrc")
    assert {answer[0] for answer in ranks.hear_all(others)} == {ExchangeTimeout.__name__}
    late = ranks.hear(ranks.world_size - 1)  # its own exchange may be complete, for the others had sent their rows
    ranks.tell(ranks.world_size - 1, do_exchange, "csrc")
    kind, text, _, seconds = late if late[0] else ranks.hear(ranks.world_size - 1)
    assert kind == ExchangeError.__name__ and "on rank 0" in text and "waited 1 s" in text and seconds < TIMEOUT / 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_works_is_waited_for_and_one_that_sleeps_is_not(ranks: RankGroup, transport: str) -> None:
    others = opened(ranks, transport, True)
    last = ranks.world_size - 1
    ranks.tell(last, work_then_exchange, transport, 1.6 * TIMEOUT)
    tell_all(ranks, others, transport)
    assert [answer[0] for answer in ranks.hear_all()] == [""] * ranks.world_size
    ranks.tell(last, sleep_then_exchange, transport, 1.6 * TIMEOUT)
    tell_all(ranks, others, transport)
    for kind, _, missing, seconds in ranks.hear_all(others):
        assert kind == ExchangeTimeout.__name__ and missing == (last,) and seconds < TIMEOUT + SLACK
    ranks.hear(last)


def test_two_killed_ranks_are_both_named() -> None:
    with RankGroup(3, set_up) as ranks:
        opened(ranks, "csrc")
        for rank in (1, 2):
            ranks.kill(rank)
        ranks.tell(0, do_exchange, "csrc")
        kind, text, missing, seconds = ranks.hear(0)
        assert kind == "PeerGone" and missing == (1, 2) and "ranks 1 and 2" in text and seconds < TIMEOUT


def test_nobody_hangs_when_a_rank_is_killed(ranks: RankGroup) -> None:
    transports = [name for name in TRANSPORTS if not ranks.ask(open_exchange, name, True)[0]]
    if ranks.world_size == 3:  # each transport is once the first to meet the dead rank
        transports.reverse()
    last = ranks.world_size - 1
    others = opened(ranks, transports[0])
    tell_all(ranks, others, transports[0])
    time.sleep(0.1)  # they wait for the last rank by now
    ranks.kill(last)
    for kind, text, _, seconds in ranks.hear_all(others):
        assert kind in ("PeerGone", ExchangeError.__name__, ExchangeTimeout.__name__), text
        assert seconds < TIMEOUT + SLACK and f"rank {last}" in text
    for transport in transports:
        tell_all(ranks, others, transport)
        for kind, _, _, seconds in ranks.hear_all(others):
            assert kind and seconds < TIMEOUT + SLACK
