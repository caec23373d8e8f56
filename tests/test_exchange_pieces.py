"""A gather of tokens that are made piece by piece while others travel, through shared memory."""

import time

import torch
import torch.distributed as dist

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
