"""Ranks of csrc that do not make the same calls, and calls that end before their time: errors, never wrong values."""

import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mgpu_runtime.exchange import ExchangeError, exchange_for, shared_memory
from mgpu_runtime.exchange.segment import Segment
from mgpu_runtime.exchange.shared_memory import SharedMemory
from tests.csrc_ranks import do, opened, pair
from tests.rank_group import RankGroup

__all__ = ["pair"]

open_of_peer = Segment.of_peer


def forget_to_wait(exchange: SharedMemory) -> None:
    pending = exchange.start_allgather(torch.ones(1, 2))
    if exchange.rank == 0:
        pending.wait()
    exchange.allgather(torch.ones(1, 2))


def interleave(exchange: SharedMemory) -> None:
    if exchange.rank == 0:
        exchange.allgather(torch.ones(1, 2))
        exchange.allgather(torch.ones(1, 2))
    else:
        for pending in [exchange.start_allgather(torch.ones(1, 2)) for _ in range(2)]:
            pending.wait()


def differ_in_tokens(exchange: SharedMemory) -> None:
    exchange.allgather(torch.ones(1, 2 + exchange.rank))


def differ_in_batch(exchange: SharedMemory) -> None:
    exchange.allgather(torch.ones(1 + exchange.rank, 2))


def differ_in_heads(exchange: SharedMemory) -> None:
    exchange.send_recv_heads(torch.ones(1, 2, 2 + 2 * exchange.rank, 4))


def differ_in_dtype(exchange: SharedMemory) -> None:
    exchange.allgather(torch.ones(1, 2, dtype=(torch.float32, torch.bfloat16)[exchange.rank]))


def differ_in_dtype_of_one_size(exchange: SharedMemory) -> None:
    exchange.allgather(torch.ones(1, 2, dtype=(torch.float16, torch.bfloat16)[exchange.rank]))


def differ_in_move(exchange: SharedMemory) -> None:
    x = torch.ones(1, 2, 2, 4)
    exchange.gather_heads(x) if exchange.rank else exchange.send_recv_heads(x)


def be_refused_on_one_rank(exchange: SharedMemory) -> None:
    x = torch.ones(1, 2, 2, 4)
    if exchange.rank == 0:
        with pytest.raises(ValueError):
            exchange.send_recv_heads(x[0])
    exchange.send_recv_heads(x)


def be_refused_in_pieces_on_one_rank(exchange: SharedMemory) -> None:
    x = torch.ones(1, 4, 2, 4)
    if exchange.rank == 0:
        with pytest.raises(ValueError):  # heads that are not its share
            exchange.start_gather_heads_of(lambda first, count: x.narrow(1, first, count), (2, 2), 5)
    exchange.gather_heads(x)


STEPS = (
    forget_to_wait,
    interleave,
    differ_in_tokens,
    differ_in_batch,
    differ_in_heads,
    differ_in_dtype,
    differ_in_dtype_of_one_size,
    differ_in_move,
    be_refused_on_one_rank,
    be_refused_in_pieces_on_one_rank,
)


def be_out_of_step(group: dist.ProcessGroup) -> list[str]:
    wrong = []
    for step in STEPS:
        exchange = opened(copy_out=True)
        begin = time.monotonic()
        try:
            step(exchange)
            wrong.append(step.__name__)
        except ExchangeError as error:
            if f"rank {1 - exchange.rank} is out of step" not in str(error) or time.monotonic() - begin > 5:
                wrong.append(f"{step.__name__}: {error}")
        try:
            exchange.allgather(torch.ones(1, 2))
            wrong.append(f"{step.__name__}, and then it works")
        except ExchangeError:
            pass
        exchange.close()
    return wrong


def test_ranks_out_of_step_are_told_and_get_no_wrong_values(pair: RankGroup) -> None:
    do(pair, be_out_of_step)


def be_alike(group: dist.ProcessGroup) -> list[str]:
    """Starts more at once than the ring of hashes holds, and has calls refused, on every rank alike."""
    exchange, wrong = opened(copy_out=True), []
    for count in (1, 7, 8, 9, 30):
        pending = [exchange.start_allgather(torch.full((1, 1), 1.0 * n)) for n in range(count)]
        time.sleep(0.01 * exchange.rank)
        if [one.wait().tolist() for one in pending] != [[[1.0 * n, 1.0 * n]] for n in range(count)]:
            wrong.append(str(count))
        with pytest.raises(ValueError):
            exchange.allgather(torch.ones(3))
    exchange.close()
    return wrong


def test_many_outstanding_exchanges_and_refusals_on_all_ranks_are_in_step(pair: RankGroup) -> None:
    do(pair, be_alike)


def close_in_a_wait(group: dist.ProcessGroup) -> list[str]:
    exchange, wrong = opened(), []
    if exchange.rank == 1:
        dist.barrier(group)
        exchange.close()
        return wrong
    thread = threading.Timer(0.3, exchange.close)
    thread.start()
    try:
        exchange.allgather(torch.ones(1, 2))
        wrong.append("no error")
    except ExchangeError as error:
        if "closed" not in str(error):
            wrong.append(str(error))
    thread.join()
    dist.barrier(group)
    return wrong


def test_closing_from_another_thread_ends_a_wait(pair: RankGroup) -> None:
    do(pair, close_in_a_wait)


def fail_to_allocate(group: dist.ProcessGroup) -> list[str]:
    exchange, errors = opened(copy_out=True), []
    with mock.patch.object(shared_memory, "with_whole_rows", wraps=shared_memory.with_whole_rows) as rows:
        if exchange.rank == 0:
            rows.side_effect = RuntimeError("cannot allocate memory")
        try:
            exchange.allgather(torch.ones(1, 2))
        except RuntimeError as error:
            errors.append(str(error))
    exchange.close()
    return errors


def test_an_allocation_that_fails_is_told_to_the_others(pair: RankGroup) -> None:
    (first,), (second,) = pair.ask(fail_to_allocate)
    assert first == "cannot allocate memory"
    assert "on rank 0, allgather could not be started: cannot allocate memory" in second


def open_where_one_cannot_map(group: dist.ProcessGroup) -> list[str]:
    with mock.patch.object(Segment, "of_peer", wraps=Segment.of_peer) as of_peer:
        if dist.get_rank(group) == 0:
            of_peer.side_effect = PermissionError("not allowed to look")
        else:
            of_peer.side_effect = lambda *args: (time.sleep(0.2), open_of_peer(*args))[1]
        try:
            exchange_for(group, transport="csrc")
        except ExchangeError as error:
            return [str(error)]
    return ["no error"]


def test_why_a_rank_cannot_open_is_told_by_all(pair: RankGroup) -> None:
    for (text,) in pair.ask(open_where_one_cannot_map):
        assert "rank 0: the memory of rank 1" in text and "not allowed to look" in text
