"""A gather of tokens that are made piece by piece while others travel, through shared memory."""

import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mgpu_runtime.exchange import ExchangeError
from mgpu_runtime.exchange.layout import Banks, Geometry, Move
from mgpu_runtime.exchange.shared_memory import SharedMemory
from tests.csrc_ranks import do, opened, pair
from tests.rank_group import RankGroup
from tests.test_exchange_shared_memory import marked

__all__ = ["pair"]


class Maker:
    """Makes tokens of a tensor and keeps what it was asked for; the second time it may be slow, or spoil them."""

    def __init__(self, x: torch.Tensor, sleep: float = 0.0, spoil: str = "") -> None:
        self.x, self.sleep, self.spoil = x, sleep, spoil
        self.asked: list[tuple[int, int]] = []

    def __call__(self, first: int, count: int) -> torch.Tensor:
        self.asked.append((first, count))
        if len(self.asked) == 1:
            return self.x.narrow(1, first, count)
        time.sleep(self.sleep)
        if self.spoil == "no more memory":
            raise RuntimeError(self.spoil)
        piece = self.x.narrow(1, first, count - (self.spoil == "(1, 1, 2, 16)"))
        return piece.half() if self.spoil == "float16" else piece


def make_for_peers_first(group: dist.ProcessGroup) -> list[str]:
    exchange, wrong = opened(), []
    for tokens, asked in (((3, 2), [(3, 2), (0, 3)]), ((5, 0), [(0, 5)])):  # nobody waits for no tokens
        make = Maker(marked(exchange.rank, 0, 5, 2))
        exchange.start_gather_heads_of(make, tokens, 4).wait()
        if make.asked != (asked if exchange.rank == 0 else sorted(asked)):
            wrong.append(f"made {make.asked} of {tokens}")
    exchange.close()
    return wrong


def test_pieces_for_peers_are_made_first(pair: RankGroup) -> None:
    do(pair, make_for_peers_first)


def read_while_the_peer_goes_on(group: dist.ProcessGroup) -> list[str]:
    """Rank 1 makes its own piece of a result long after rank 0 has its own, and has gone on to the next exchange."""
    exchange, wrong = opened(), []
    for number in range(6):
        x = marked(exchange.rank, number, 3, 4)
        traded = exchange.send_recv_heads(x, (3, 3))
        kept = traded.clone()
        back = exchange.start_gather_heads_of(Maker(traded, sleep=0.05 * exchange.rank), (3, 3), 4).wait()
        if not torch.equal(traded, kept) or not torch.equal(back, x):
            wrong.append(f"the result of exchange {number} was written over while it was read")
    exchange.close()
    return wrong


def test_results_last_while_pieces_are_made_of_them(pair: RankGroup) -> None:
    do(pair, read_while_the_peer_goes_on)


def use_the_exchange_in_make(group: dist.ProcessGroup) -> list[str]:
    wrong = []
    for use in ("start", "wait"):
        exchange, asked = opened(), []
        pending = exchange.start_allgather(torch.ones(1, 1))

        def make(first: int, count: int, exchange=exchange, pending=pending, asked=asked, use=use) -> torch.Tensor:
            asked.append(first)
            if len(asked) == 2:
                exchange.start_allgather(torch.ones(1, 1)) if use == "start" else pending.wait()
            return torch.ones(1, count, 2, 4)

        try:
            exchange.start_gather_heads_of(make, (2, 2), 4).wait()
            wrong.append(f"{use}: no error")
        except ExchangeError as error:
            if "used the exchange itself" not in str(error):
                wrong.append(f"{use}: {error}")
        dist.barrier(group)
        exchange.close()
    return wrong


def test_make_must_not_use_the_exchange(pair: RankGroup) -> None:
    do(pair, use_the_exchange_in_make)


def refuse_tokens(group: dist.ProcessGroup) -> list[str]:
    """Counts that are none are refused before anything is made, and the exchange goes on."""
    exchange, asked = opened(), []
    for tokens in ((2.0, 2.0), (3, -1), (4,)):
        with pytest.raises(ValueError, match="tokens must"):
            exchange.start_gather_heads_of(lambda *what: asked.append(what), tokens, 4)
    whole = exchange.start_gather_heads_of(Maker(marked(exchange.rank, 0, 4, 2)), (2, 2), 4).wait()
    exchange.close()
    return asked + ([] if whole.shape == (1, 2, 4, 16) else [whole.shape])


def test_counts_that_are_none_are_refused_before_anything_is_made(pair: RankGroup) -> None:
    do(pair, refuse_tokens)


def fill_banks(group: dist.ProcessGroup) -> list[str]:
    """Returns the sizes of the banks after rounds with and without pieces, where they are not as they should be."""
    exchange, wrong = opened(), []
    for in_pieces in (False, True):
        for _ in range(5):
            traded = exchange.send_recv_heads(marked(exchange.rank, 0, 2048, 4), (2048, 2048))
            if in_pieces:
                exchange.start_gather_heads_of(Maker(traded), (2048, 2048), 4).wait()
            else:
                exchange.gather_heads(traded, (2048, 2048))
            exchange.allgather(torch.ones(1, 1))
        present = [exchange._own.lacks(bank, 1 << 40) < 1 << 40 for bank in range(3)]
        if present != [True, True, in_pieces]:
            wrong.append(f"in pieces {in_pieces}: banks with memory {present}")
    exchange.close()
    return wrong


def test_the_third_bank_has_memory_only_where_pieces_need_it(pair: RankGroup) -> None:
    do(pair, fill_banks)


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=3), max_size=30))
def test_no_bank_opens_that_a_peer_may_still_read(groups: list[list[bool]]) -> None:
    """Each group is waited for as a whole. A peer may read what came before one that is made in pieces."""
    banks, opened_banks = Banks(2), []
    geometry = Geometry(Move.GATHER_HEADS, 1, (2, 2), (1, 1), 4)
    for number, in_pieces in enumerate(groups):
        places = {banks.place(geometry, piece)[0] for piece in in_pieces}
        for _ in in_pieces:
            banks.waited()
        (bank,) = places
        before = opened_banks[-2:] if number and any(groups[number - 1]) else opened_banks[-1:]
        assert bank not in before
        assert bank < 2 or (number and any(groups[number - 1]))
        opened_banks.append(bank)


def gather_spoilt(exchange: SharedMemory, spoil: str) -> str:
    """Returns the error that this rank meets, at the latest in the exchange that follows."""
    make = Maker(torch.ones(1, 4, 2, 16), spoil=spoil if exchange.rank == 0 else "")
    try:
        exchange.start_gather_heads_of(make, (2, 2), 4).wait()
        exchange.allgather(torch.ones(1, 1))  # rank 1 had all its tokens already
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


def spoil_pieces(group: dist.ProcessGroup) -> list[str]:
    wrong = []
    for spoil in ("no more memory", "(1, 1, 2, 16)", "float16"):
        exchange, begin = opened(), time.monotonic()
        error = gather_spoilt(exchange, spoil)
        if (spoil if exchange.rank == 0 else "gather_heads could not be started") not in error:
            wrong.append(f"{spoil}: {error}")
        if time.monotonic() - begin > 5:
            wrong.append(f"{spoil}: told late")
        dist.barrier(group)
        exchange.close()
    return wrong


def test_a_piece_that_cannot_be_made_ends_the_exchange_everywhere(pair: RankGroup) -> None:
    do(pair, spoil_pieces)
