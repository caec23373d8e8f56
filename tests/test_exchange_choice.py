"""The choice between transports: what is taken, what is said, and that all ranks agree."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mgpu_runtime.exchange import All2All, ExchangeError, board, choice, exchange_for, self_test
from mgpu_runtime.exchange.all2all import Done
from mgpu_runtime.exchange.collectives import Collectives
from mgpu_runtime.exchange.layout import Geometry
from mgpu_runtime.exchange.ltx_kernels_adapter import LTXKernels
from mgpu_runtime.exchange.symmetric import Room, SymmetricMemory
from tests.log_lines import Lines
from tests.rank_group import RankGroup
from tests.spawn import run

CPU = torch.device("cpu")
STAND_INS = Path(__file__).parent / "stand_ins"


class _Odd(Collectives):
    """A transport with a fault, which notes whether it was closed."""

    closed = 0

    def close(self) -> None:
        _Odd.closed += 1
        super().close()


class _Corrupt(_Odd):
    """Hands rank 1 a wrong value."""

    def _start(self, geometry: Geometry, x: Tensor):
        return super()._start(geometry, x + 1 if self.rank == 0 else x)


class _Stuck(_Odd):
    """Fails on rank 1 and moves nothing on the others."""

    def _start(self, geometry: Geometry, x: Tensor):
        if self.rank == 1:
            raise ExchangeError("rank 1 waited in vain")
        return Done(x)


def _opener(kind: type[Collectives], fails_on: int | None = None) -> Callable:
    def open_it(group: dist.ProcessGroup, device: torch.device, settings) -> Collectives:
        if dist.get_rank(group) == fails_on:
            raise RuntimeError("CUDA error: peer access is not supported\nand more lines")
        return kind(group)

    return open_it


def _early(group: dist.ProcessGroup, device: torch.device, settings) -> Collectives:
    """Fails on rank 1 before the ranks have told each other anything."""
    if dist.get_rank(group) == 1:
        raise AttributeError("this version has no such function")
    return Collectives.open(group, device)


def _refused(call: Callable[[], object]) -> tuple[str, str]:
    """Returns the type and text of what a call raises."""
    try:
        call()
    except (ValueError, ExchangeError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def _choices(rank: int, group: dist.ProcessGroup, empty: str) -> dict[str, object]:
    log, seen = Lines(), {}
    logger = logging.getLogger("mgpu_runtime.exchange")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)

    for name in ("gloo", "csrc"):
        exchange = exchange_for(group, transport=name, timeout=3.0)
        seen[name] = (exchange.transport, exchange.timeout, exchange.description, log.take())
    for name in ("shared memory", "nccl", "symmetric_memory", "ltx_kernels"):
        seen[f"forced {name}"] = _refused(lambda name=name: exchange_for(group, transport=name))
    seen["meta"] = _refused(lambda: exchange_for(group, device="meta"))
    seen["at odds"] = _refused(lambda: exchange_for(group, transport=("csrc", "gloo")[rank]))
    log.take()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LTX_MGPU_CACHE", empty)
        if rank == 1:
            patch.setenv("PATH", empty)
            patch.delenv("CC", raising=False)
        seen["one without compiler"] = exchange_for(group).description
        log.take()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LTX_MGPU_CACHE", empty + "/other")
        patch.setenv("PATH", empty)
        patch.delenv("CC", raising=False)
        seen["none with compiler"] = (exchange_for(group).description, log.take())
        seen["forced without compiler"] = _refused(lambda: exchange_for(group, transport="csrc"))

    gloo = choice._OPENERS["cpu"]["gloo"]
    for name, opener in {
        "corrupt": _opener(_Corrupt),
        "stuck": _opener(_Stuck),
        "one fails": _opener(_Odd, fails_on=1),
        "all fail": _opener(_Odd, fails_on=rank),
        "one fails early": _early,
    }.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(choice._OPENERS, "cpu", {"csrc": opener, "gloo": gloo})
            _Odd.closed = 0
            seen[name] = (exchange_for(group).description, _Odd.closed)
            if name == "corrupt":
                seen["corrupt and forced"] = _refused(lambda: exchange_for(group, transport="csrc"))
                patch.setitem(choice._OPENERS, "cpu", {"csrc": opener})
                seen["nothing left"] = _refused(lambda: exchange_for(group))
    logger.removeHandler(log)
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict]:
    return run(_choices, 2, str(tmp_path_factory.mktemp("empty")), timeout=100.0)


def test_what_is_taken_is_said_once_by_rank_0(seen) -> None:
    assert seen[0]["gloo"] == ("gloo", 3.0, "gloo, 2 workers", ["exchange: gloo, 2 workers"])
    assert seen[1]["gloo"] == ("gloo", 3.0, "gloo, 2 workers", [])


def test_csrc_says_what_it_is_where_it_can_be_built(seen) -> None:
    if seen[0]["csrc"][0] != "csrc":
        pytest.skip("csrc cannot be used here")
    assert seen[0]["csrc"][2:] == ("csrc (shared memory), 2 workers", ["exchange: csrc (shared memory), 2 workers"])
    assert seen[1]["csrc"][3] == []


def test_what_cannot_be_asked_for_is_refused_in_the_user_s_words(seen) -> None:
    for rank in seen:
        assert (
            rank["forced shared memory"][0] == "ValueError"
            and "csrc, symmetric_memory" in rank["forced shared memory"][1]
        )
        for name in ("nccl", "symmetric_memory", "ltx_kernels"):
            kind, text = rank[f"forced {name}"]
            assert kind == "ValueError" and "is for CUDA devices" in text and "choose auto, csrc, gloo" in text
        assert rank["meta"] == ("ValueError", "the exchange moves tensors of CUDA devices and of the CPU, not of meta")


def test_ranks_that_ask_for_different_transports_are_told_so(seen) -> None:
    for rank in seen:
        assert rank["at odds"][0] == "ExchangeError"
        assert rank["at odds"][1].endswith("the same exchange: rank 0: csrc on cpu; rank 1: gloo on cpu")


def test_without_a_compiler_everything_still_works_and_the_line_says_why(seen) -> None:
    for rank in seen:
        assert rank["one without compiler"].startswith("gloo, 2 workers (csrc: ")
        assert "rank 1: no C compiler found" in rank["one without compiler"]
        description, _ = rank["none with compiler"]
        assert description.startswith("gloo, 2 workers (csrc: no C compiler found; install gcc")
        kind, text = rank["forced without compiler"]
        assert kind == "ExchangeError"
        assert text.startswith("transport csrc cannot work here: no C compiler found") and text.endswith("that works")
    assert len(seen[0]["none with compiler"][1]) == 1 and seen[1]["none with compiler"][1] == []


def test_b118_a_transport_that_fails_anywhere_is_closed_everywhere_and_the_next_is_taken(seen) -> None:
    for number, rank in enumerate(seen):
        wrong = "its self test got wrong values from send_recv_heads in torch.float32"
        assert rank["corrupt"] == (f"gloo, 2 workers (csrc: {wrong})", 1)
        assert rank["corrupt and forced"] == (
            "ExchangeError",
            f"transport csrc cannot work here: {wrong}. Choose auto to take the fastest that works",
        )
        assert rank["nothing left"] == ("ExchangeError", f"no transport of the exchange works here: csrc: {wrong}")
        assert rank["stuck"] == (f"gloo, 2 workers (csrc: {wrong})", 1)
        assert rank["one fails"][0] == "gloo, 2 workers (csrc: on rank 1: CUDA error: peer access is not supported)"
        assert rank["one fails"][1] == (1 if number == 0 else 0)
        assert rank["one fails early"] == ("gloo, 2 workers (csrc: on rank 1: this version has no such function)", 0)
        assert rank["all fail"] == ("gloo, 2 workers (csrc: CUDA error: peer access is not supported)", 0)


def test_arguments_are_checked_for_one_rank_as_well() -> None:
    for timeout in (-1, 0, float("nan"), "10"):
        with pytest.raises(ValueError, match="a number of seconds above 0, got "):
            exchange_for(None, timeout=timeout)
    with pytest.raises(ValueError, match="a process group that this process is a member of"):
        exchange_for(dist.GroupMember.NON_GROUP_MEMBER)


def _groups(rank: int, group: dist.ProcessGroup) -> tuple[list[dist.ProcessGroup], All2All]:
    """Returns fresh groups, each good for one opening that fails, and an exchange over another."""
    return [dist.new_group() for _ in range(3)], exchange_for(group, transport="gloo", timeout=1.0)


def _told(call: Callable[[], object]) -> tuple[str, str, tuple[int, ...], float]:
    """Returns the type, the text and the missing ranks of what a call raises, and after how many seconds."""
    began = time.monotonic()
    try:
        call()
    except ExchangeError as error:
        return type(error).__name__, str(error), getattr(error, "missing", ()), time.monotonic() - began
    return "nothing", "", (), 0.0


class _Struck:
    """Stands for Collectives, and sends this process a signal before it opens."""

    def __init__(self, sent: int) -> None:
        self._sent = sent

    def open(self, *arguments, **keywords) -> Collectives:
        os.kill(os.getpid(), self._sent)
        return Collectives.open(*arguments, **keywords)


def _open_over(state: tuple, number: int, sent: int) -> tuple[str, str, tuple[int, ...], float]:
    """Opens an exchange over one of the groups; in the middle of it this process sends itself a signal, if any."""
    with pytest.MonkeyPatch.context() as patch:
        if number == 0:  # where the other does not come
            patch.setattr(choice, "FIRST_SECONDS", 0.7)
        if sent:
            patch.setattr(choice, "Collectives", _Struck(sent))
            patch.setattr(board, "_SECONDS", 0.5)
        return _told(lambda: exchange_for(state[0][number], transport="gloo", timeout=0.7))


def _exchange_over(state: tuple) -> tuple[str, str, tuple[int, ...], float]:
    return _told(lambda: state[1].send_recv_heads(torch.ones(1, 2, 4, 8)))


def test_a_rank_that_is_lost_while_opening_is_named_and_nobody_hangs() -> None:
    with RankGroup(2, _groups) as ranks:
        ranks.tell(0, _open_over, 0, 0)  # alone
        kind, text, missing, seconds = ranks.hear(0)
        assert (kind, missing) == ("ExchangeTimeout", (1,)) and 0.7 <= seconds < 3.0
        assert "rank 0 waited 0.7 s in the ranks' agreement on an exchange for rank 1. Look" in text

        ranks.tell(0, _open_over, 1, 0)
        ranks.tell(1, _open_over, 1, signal.SIGSTOP)
        kind, text, missing, seconds = ranks.hear(0)
        assert (kind, missing) == ("ExchangeTimeout", (1,)) and 0.7 <= seconds < 5.0
        assert "the process of rank 1 is stopped" in text
        ranks.resume(1)
        kind, _, _, seconds = ranks.hear(1)  # it may find what the other said before that one left
        assert kind == "ExchangeTimeout"

        ranks.tell(0, _open_over, 2, 0)
        ranks.tell(1, _open_over, 2, signal.SIGKILL)
        kind, text, missing, seconds = ranks.hear(0)
        assert (kind, missing) == ("PeerGone", (1,)) and seconds < 4.0
        ranks.tell(0, _exchange_over)
        kind, text, missing, seconds = ranks.hear(0)
        assert (kind, missing) == ("PeerGone", (1,)) and "send_recv_heads" in text and seconds < 4.0


class _Never:
    def query(self) -> bool:
        return False


def test_b118_a_gpu_that_never_ends_the_self_test_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(self_test, "mark", lambda device: _Never())
    monkeypatch.setattr(self_test, "SECONDS", 0.1)
    with pytest.raises(ExchangeError, match=r"did not end within 0.1 s: the direct path between the GPUs"):
        self_test._wait_for_device(torch.device("cuda", 0))


def test_a_gpu_that_is_not_there_cannot_be_asked_for() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        choice._device(None, "cuda")


def _other_transports(rank: int, group: dist.ProcessGroup, folder: str) -> dict[str, object]:
    rest = Collectives.open(group, CPU, timeout=7.0)
    seen: dict[str, object] = {"missing": _refused(lambda: LTXKernels.open(group, CPU, lambda: rest))}
    sys.path.insert(0, str(STAND_INS))
    log = Lines()
    logging.getLogger("mgpu_runtime.exchange").addHandler(log)
    logging.getLogger("mgpu_runtime.exchange").setLevel(logging.INFO)
    exchange = LTXKernels.open(group, CPU, lambda: rest)
    for _ in range(3):
        self_test.self_test(exchange, CPU)
    x = torch.arange(2 * 16 * 4 * 64).view(2, 16, 4, 64).bfloat16()
    results = [exchange.start_send_recv_heads(x + n) for n in range(3)]
    seen["in flight"] = all(
        torch.equal(exchange.gather_heads(result.wait()), x + n) for n, result in enumerate(results)
    )
    made = sys.modules["ltx_kernels"].All2All.made
    seen["made"] = ([one.calls for one in made], {one.timeout_seconds for one in made[-2:]})
    exchange.close()
    seen["destroyed"] = all(one.destroyed for one in made)
    seen["lines"] = log.lines

    rooms = []

    def make_room(bank_bytes: int) -> Room:
        rooms.append(bank_bytes)
        memory = [
            torch.from_file(f"{folder}/{len(rooms)}-{r}", shared=True, size=2 * bank_bytes, dtype=torch.uint8)
            for r in range(group.size())
        ]
        return Room(memory, bank_bytes, lambda timeout: dist.barrier(group))

    symmetric = SymmetricMemory(rank, group.size(), make_room, None, device=CPU, copy_out=False)
    for _ in range(3):
        self_test.self_test(symmetric, CPU)
    tokens = [100 * (r + 1) for r in range(group.size())]
    x = torch.randn(2, tokens[rank], 7, 257, generator=torch.Generator().manual_seed(rank))
    seen["grown"] = torch.equal(symmetric.gather_heads(symmetric.send_recv_heads(x, tokens), tokens, 7), x)
    seen["rooms"] = rooms
    symmetric.close()
    seen["closed"] = _refused(lambda: symmetric.allgather(x, tokens))[0]
    return seen


def test_ltx_kernels_and_symmetric_memory_over_stand_ins(tmp_path) -> None:
    for number, rank in enumerate(run(_other_transports, 2, str(tmp_path))):
        assert rank["missing"] == ("ExchangeError", "the package ltx_kernels is not installed")
        assert rank["in flight"] and rank["destroyed"]
        calls, timeouts = rank["made"]
        assert len(calls) == 6 and min(calls) > 0 and timeouts == {7.0}  # two take turns, and have grown twice
        assert len(rank["lines"]) == (1 if number == 0 else 0)
        assert rank["grown"] and rank["rooms"] == [1 << 20, 1 << 22]
        assert rank["closed"] == "ExchangeError"
