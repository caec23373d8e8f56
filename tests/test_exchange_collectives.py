"""The exchange over torch.distributed's collectives, and what it waits with."""

import errno
import os
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mgpu_runtime.exchange import ExchangeError, ExchangeTimeout, board, first_calls, processes, roll_call
from mgpu_runtime.exchange.agree import gather_texts
from mgpu_runtime.exchange.board import Board
from mgpu_runtime.exchange.collectives import Collectives
from mgpu_runtime.exchange.errors import PeerGone
from mgpu_runtime.exchange.layout import Geometry, Move, deal, starts
from mgpu_runtime.exchange.posting import Scratch
from mgpu_runtime.exchange.processes import Processes
from mgpu_runtime.exchange.roll_call import RollCall
from mgpu_runtime.exchange.stream_order import StreamOrder
from mgpu_runtime.exchange.waiting import Wait
from tests.boards import two_boards
from tests.spawn import run

CPU = torch.device("cpu")
D = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool)


def _same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.shape == want.shape and got.dtype == want.dtype and torch.equal(got.float(), want.float())


def _wrong(exchange: Collectives, batch: int, tokens: tuple[int, ...], num_heads: int, dtype: torch.dtype) -> list[str]:
    """Compares the three moves, in flight together, with slices of the whole tensor. Returns what is wrong."""
    rank, heads = exchange.rank, deal(num_heads, exchange.world_size)
    count = batch * sum(tokens) * num_heads * D
    whole = torch.arange(count).remainder(200).view(batch, sum(tokens), num_heads, D).float().to(dtype)
    local = whole.narrow(1, starts(tokens)[rank], tokens[rank])
    share = whole.narrow(2, starts(heads)[rank], heads[rank])
    strided = local.transpose(0, 1).contiguous().transpose(0, 1)
    pending = {
        "send_recv_heads": (exchange.start_send_recv_heads(local, tokens), share),
        "a strided input": (exchange.start_send_recv_heads(strided, tokens), share),
        "gather_heads": (exchange.start_gather_heads(share, tokens, num_heads), local),
        "allgather": (exchange.start_allgather(local, tokens), whole),
        "allgather of one dim more": (exchange.start_allgather(local[..., 0, 0], tokens), whole[..., 0, 0]),
    }
    results = {name: (one.wait(), want) for name, (one, want) in pending.items()}
    return [
        f"{name}: {batch} {tokens} {num_heads} {dtype}"
        for name, (got, want) in results.items()
        if not _same(got, want) or not got.is_contiguous()
    ]


def _moves(rank: int, group: dist.ProcessGroup) -> list[str]:
    wrong, world_size = [], group.size()
    with pytest.MonkeyPatch.context() as patch:
        with_all_to_all = Collectives.open(group, CPU)
        patch.setattr(dist, "all_to_all_single", _no_all_to_all)
        without = Collectives.open(group, CPU)
    if without._has_all_to_all or not with_all_to_all._has_all_to_all:
        wrong.append("the all-to-all that is there, or not there, was not noticed")
    for exchange in (with_all_to_all, without):
        for tokens in ((3,) * world_size, tuple(2 * r for r in range(world_size)), (0,) * world_size):
            for batch, num_heads in ((1, 4), (2, 5), (1, 1)):
                for dtype in DTYPES:
                    wrong += _wrong(exchange, batch, tokens, num_heads, dtype)
        with torch.inference_mode():
            wrong += _wrong(exchange, 2, (3,) * world_size, 4, torch.float32)
        wrong += _wrong(exchange, 2, (3,) * world_size, 4, torch.float32)  # buffers are used in both modes
        number = torch.complex(torch.full((1, world_size, 4, D), 1.0 + rank), torch.ones(1, world_size, 4, D)).conj()
        for x in (number, number.imag):  # torch notes that they are conjugate and negative, and leaves the bytes
            if not torch.equal(exchange.gather_heads(exchange.send_recv_heads(x), None, 4), x):
                wrong.append(f"a tensor whose bytes are another number's: {x.dtype}")
        exchange.close()
        exchange.close()
    return wrong


def _no_all_to_all(*arguments, **keywords) -> None:
    raise RuntimeError("Backend gloo does not support alltoall_base")


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_b12_b13_uneven_empty_strided_and_a_gloo_without_all_to_all(world_size: int) -> None:
    assert run(_moves, world_size) == [[]] * world_size


def _late(rank: int, group: dist.ProcessGroup) -> dict[str, object]:
    x, seen = torch.ones(1, 2, 4, 8), {}
    patient = Collectives.open(group, CPU, timeout=0.8, wait_while_busy=True)
    if rank == 1:
        end = time.monotonic() + 2.0
        while time.monotonic() < end:  # at work, not asleep
            pass
    seen["patient"] = patient.send_recv_heads(x).shape
    strict, blind = Collectives.open(group, CPU, timeout=0.4), Collectives(group, timeout=0.4)
    for name, exchange in (("strict", strict), ("blind", blind)):
        gather_texts(group, name)
        if rank == 1:
            time.sleep(1.0)
            exchange.timeout = 10.0
        began = time.monotonic()
        try:
            exchange.send_recv_heads(x)
        except ExchangeTimeout as error:
            seen[name] = (str(error), error.missing, time.monotonic() - began)
            with pytest.raises(ExchangeError, match="cannot be used any more: rank 0 waited 0.4 s"):
                exchange.send_recv_heads(x)
    halves, words = (torch.float16, torch.bfloat16), (torch.float32, torch.int32)
    for name, x_at_odds in (
        ("at odds", torch.ones(1, 2 + rank, 4, 8)),
        ("halves", x.to(halves[rank])),
        ("words", x.to(words[rank])),
    ):
        at_odds = Collectives.open(dist.new_group(), CPU, timeout=5.0)  # a group that is out of step afterwards
        if rank == 1:
            time.sleep(0.3)  # by then the other has posted its own, and would be ended by gloo
        began = time.monotonic()
        with pytest.raises(ExchangeError) as caught:
            at_odds.send_recv_heads(x_at_odds)
        seen[name] = (str(caught.value), time.monotonic() - began)
    with pytest.raises(ValueError, match="got one on meta"):
        patient.send_recv_heads(x.to("meta"))
    seen["texts"] = gather_texts(group, "é" * rank)
    return seen


def test_a_late_rank_is_named_and_a_busy_one_waited_for() -> None:
    first, second = run(_late, 2)
    assert first["patient"] == second["patient"] == (1, 4, 2, 8)
    text, missing, seconds = first["strict"]
    assert missing == (1,) and "for rank 1" in text and "send_recv_heads" in text and 0.4 <= seconds < 2.0
    text, missing, _ = first["blind"]
    assert missing == () and "cannot tell" in text
    assert "strict" not in second and first["texts"] == ["", "é"]
    for rank, seen in enumerate((first, second)):
        text, seconds = seen["at odds"]
        assert f"rank {1 - rank} called another method there, or one with other sizes" in text and seconds < 2.0
        for name, own, other in (("halves", "float16", "bfloat16"), ("words", "float32", "int32")):
            text, seconds = seen[name]
            own, other = (own, other) if rank == 0 else (other, own)
            assert f"this rank gives torch.{own} there, rank {1 - rank} torch.{other}. All ranks must" in text
            assert "sizes" not in text and seconds < 2.0


def _on_hosts_of_their_own(rank: int, group: dist.ProcessGroup) -> dict[str, str]:
    """Makes unlike calls where the ranks share no memory; returns what each raised."""
    seen = {}
    x = torch.ones(1, 2, 4, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Board, "of", lambda *arguments, **keywords: None)
        for name, calls in {
            "sizes": (lambda one: one.send_recv_heads(torch.ones(1, 2000 * (1 + rank), 4, 8)),) * 2,
            "methods": (lambda one: one.allgather(x), lambda one: one.send_recv_heads(x)),
            "dtypes": (lambda one: one.allgather(x), lambda one: one.allgather(x.int())),
            "one stays away": (lambda one: one.allgather(x), lambda one: time.sleep(1.5)),
        }.items():
            exchange = Collectives.open(dist.new_group(), CPU, timeout=1.0)
            for _ in range(3):
                exchange.gather_heads(exchange.send_recv_heads(x.double()))
            with pytest.MonkeyPatch.context() as counted:
                counted.setattr(first_calls, "RollCall", None)  # what was compared once is not compared again
                exchange.send_recv_heads(x.double())
            try:
                calls[rank](exchange)
            except ExchangeError as error:
                seen[name] = str(error)
    return seen


def test_ranks_on_several_hosts_compare_each_kind_of_call_before_the_first() -> None:
    for rank, seen in enumerate(run(_on_hosts_of_their_own, 2)):
        assert f"rank {1 - rank} called another method there, or one with other sizes. All ranks" in seen["sizes"]
        assert f"rank {1 - rank} called another method there" in seen["methods"]
        assert f"rank {1 - rank} torch.{('int32', 'float32')[rank]}" in seen["dtypes"]
        if rank == 0:
            assert "waited 1 s in allgather number 8 over gloo for rank 1" in seen["one stays away"]


class _Silent:
    """A store whose process stands still."""

    def add(self, key: str, number: int) -> int:
        time.sleep(2.0)
        raise RuntimeError("Broken pipe")


def test_a_store_that_does_not_answer_keeps_nobody(monkeypatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(roll_call, "_CLOSE_SECONDS", 0.1)
    began = time.monotonic()
    with RollCall(mock.Mock(get_group_store=_Silent), "name", "word") as roll:
        assert (roll.words, roll.missing, roll.failure) == (None, (), "")
    assert time.monotonic() - began < 1.0
    roll._thread.join()
    assert "does not answer: Broken pipe" in roll.failure
    with RollCall(mock.Mock(spec=[]), "name", "word") as roll:  # as before torch told it
        assert roll.failure == "the group has no store"


class _Life(Processes):
    """Two ranks, of which the other is as the test says."""

    def __init__(self, *, gone: bool = False, busy: bool = False, stopped: bool = False) -> None:
        self._pids = [1, 2]
        self._gone, self._busy, self._stopped = gone, busy, stopped

    def is_gone(self, rank: int) -> bool:
        return self._gone

    def was_busy(self, rank: int) -> bool:
        return self._busy

    def is_stopped(self, rank: int) -> bool:
        return self._stopped


def _unlike(one: Board, number: int) -> str:
    try:
        one.refuse_unlike(number, "this")
    except ExchangeError as error:
        return str(error)
    return ""


def test_the_board_tells_who_is_at_odds_and_says_nothing_of_what_is_over() -> None:
    mine, other = two_boards()
    usual, odd = (Geometry(Move.SEND_RECV_HEADS, 1, (2, n), (2, 2), 8) for n in (2, 3))
    mine.started(1, usual, torch.float16)
    assert not _unlike(mine, 1)  # the other has not come to it
    other.started(1, odd, torch.bfloat16)
    assert _unlike(mine, 1).startswith("rank 0 cannot do this: rank 1 called another method there, or one with other")
    assert "sizes, and this rank gives torch.float16 there, rank 1 torch.bfloat16. All" in _unlike(mine, 1)
    assert _unlike(other, 1).startswith("rank 1 cannot do this: rank 0 called another")
    for number in range(2, 40):
        other.started(number, odd, torch.bfloat16)
    assert not _unlike(mine, 1) and mine.missing(2) == [0]
    mine.close()


def test_the_board_tells_when_all_have_left() -> None:
    mine, other = two_boards()
    mine.leave()
    assert not mine.wait_until_all_left(0.05, _Life())
    assert mine.wait_until_all_left(5.0, _Life(gone=True))  # who has ended writes to nobody
    other.leave()
    assert mine.wait_until_all_left(5.0, _Life())
    mine.close()


def test_only_the_page_that_was_meant_is_mapped(tmp_path) -> None:
    size, token = board.mmap.PAGESIZE, os.urandom(16)
    file, other = board._create(size, token), os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.write(other, token.ljust(size, b"x"))
    try:
        for place in (
            f"{file} {os.urandom(16).hex()}",
            f"{other} {token.hex()}",
            f"{other + 99} {token.hex()}",
            "none",
        ):
            assert board._map(os.getpid(), place, size) is None
        assert board._map(os.getpid(), f"{file} {token.hex()}", 2 * size) is None
        page = board._map(os.getpid(), f"{file} {token.hex()}", size)
        assert page[:16] == token
        page.close()
        assert board._create(-1, token) is None
    finally:
        os.close(file)
        os.close(other)


def test_a_proc_of_other_processes_shows_nothing(monkeypatch) -> None:
    here = processes._record()
    assert Processes(0, [here, here]).all_here()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)  # as in a pid namespace that still has the /proc of another
        hidden = [processes._record() for _ in range(2)]
    assert [Processes(0, hidden).pid(rank) for rank in range(2)] == [None, None]
    assert Processes(1, [here, hidden[0]]).pid(0) is None
    with pytest.raises(ExchangeError, match="out of step: rank 1 says 'mapped'"):
        Processes(0, [here, "mapped"])


def test_without_descriptors_a_process_is_neither_gone_nor_busy(monkeypatch) -> None:
    others = Processes(0, [processes._record()] * 2)

    def read_text(*arguments, **keywords) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "read_text", read_text)
    assert not (others.is_gone(1) or others.was_busy(1) or others.is_stopped(1))
    assert processes._record().endswith("hidden")


def test_a_buffer_that_comes_back_twice_is_lent_once() -> None:
    scratch, like = Scratch(keep=4), torch.empty(0)
    buffer = scratch.take(100, like)
    scratch.give(buffer)
    scratch.give(buffer)
    assert scratch.take(100, like).data_ptr() != scratch.take(100, like).data_ptr()


def _until_raised(wait: Wait, seconds: float) -> ExchangeError | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            wait.check()
        except ExchangeError as error:
            return error
        time.sleep(0.01)
    return None


@pytest.mark.parametrize(
    ("life", "patient", "waiting", "kind", "words"),
    [
        (_Life(), False, False, ExchangeTimeout, "waited 0.3 s"),
        (_Life(busy=True), False, False, ExchangeTimeout, "waited 0.3 s"),
        (_Life(busy=True), True, False, None, ""),
        (_Life(busy=True), True, True, ExchangeTimeout, "waited 0.3 s"),  # it waits for others itself: a deadlock
        (_Life(stopped=True), True, False, ExchangeTimeout, "is stopped"),
        (_Life(gone=True), True, False, PeerGone, "has ended"),
        (None, True, False, ExchangeTimeout, "waited 0.3 s"),
    ],
)
def test_a_wait_ends_when_it_should(life, patient, waiting, kind, words) -> None:
    wait = Wait(0, "this", 0.3, lambda: [1], processes=life, wait_while_busy=patient, waiting=lambda rank: waiting)
    error = _until_raised(wait, 0.8)
    assert type(error) is (kind or type(None))
    if kind is not None:
        assert words in str(error) and error.missing == (1,)


def test_a_stopped_rank_need_not_be_waited_for_to_the_end_and_is_named_by_the_world_s_number_too() -> None:
    life = _Life(stopped=True)
    life.global_ranks = (3, 5)
    wait = Wait(0, "this", 60.0, lambda: (), processes=life, stopped_after=0.3)
    error = _until_raised(wait, 3.0)
    assert str(error).startswith("rank 0 of the group (rank 3) waited 0.3 s in this for rank 1 of the group (rank 5); ")
    assert error.missing == (1,)


def test_what_a_rank_sent_before_its_end_may_still_arrive() -> None:
    wait = Wait(0, "this", 10.0, lambda: [], processes=_Life(gone=True))
    began = time.monotonic()
    assert isinstance(_until_raised(wait, 5.0), PeerGone)
    assert 1.0 <= time.monotonic() - began < 2.5


class _Flag:
    """A Work and an Event that are done when the test says so."""

    def __init__(self, done: bool = False) -> None:
        self.done = done

    def is_completed(self) -> bool:
        return self.done

    query = is_completed


def test_the_host_runs_ahead_of_a_gpu_only_so_far_and_counts_from_its_arrival() -> None:
    order = StreamOrder(lambda number, what, timeout: Wait(0, what, timeout, lambda: [1]), ahead=2)
    works = [_Flag(), _Flag(), _Flag()]
    order.add(1, "the first", _Flag(False), works[0], 0.3)  # this rank's own GPU has not come to it
    time.sleep(0.4)
    order.make_room()
    works[0].done = True
    order.make_room()
    order.add(2, "the second", _Flag(True), works[1], 0.3)
    order.make_room()
    order.add(3, "the third", _Flag(True), works[2], 0.3)
    began = time.monotonic()
    with pytest.raises(ExchangeTimeout, match="the second for rank 1"):
        order.make_room()
    assert time.monotonic() - began < 2.0
