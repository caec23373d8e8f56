"""The exchange against the permutation it must be, over world sizes, dtypes and strided inputs."""

import pytest
import torch

from mgpu_runtime.exchange import exchange_for
from tests.spawn import run

B, T, H, D = 2, 12, 12, 5
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def _whole(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(B * T * H * D, dtype=torch.float32).remainder(240).view(B, T, H, D).to(dtype)


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def _exchange(rank: int, group, has_all_to_all: bool) -> list[str]:
    exchange = exchange_for(group)
    world = exchange.world_size
    if not has_all_to_all:
        exchange._has_all_to_all = False
    tokens, heads = slice(rank * T // world, (rank + 1) * T // world), slice(rank * H // world, (rank + 1) * H // world)
    wrong = []
    for dtype in DTYPES:
        whole = _whole(dtype)
        local = whole[:, tokens]
        sent = exchange.send_recv_heads(local)
        strided = exchange.send_recv_heads(local.transpose(0, 1).contiguous().transpose(0, 1))
        for name, got, want in (
            ("send_recv_heads", sent, whole[:, :, heads]),
            ("strided input", strided, whole[:, :, heads]),
            ("gather_heads", exchange.gather_heads(sent), local),
            ("allgather", exchange.allgather(local), whole),
            ("empty", exchange.send_recv_heads(local[:, :0]), whole[:, :0, heads]),
        ):
            if not _same(got, want):
                wrong.append(f"{name} of {dtype}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_b12_exchange_is_the_permutation_for_strided_inputs_too(world_size: int) -> None:
    assert run(_exchange, world_size, True) == [[]] * world_size


def test_b13_exchange_without_a_single_tensor_all_to_all_is_the_same() -> None:
    assert run(_exchange, 2, False) == [[], []]


def test_one_rank_moves_nothing() -> None:
    exchange, x = exchange_for(None), _whole(torch.float32)
    assert exchange.send_recv_heads(x) is x and exchange.gather_heads(x) is x and exchange.allgather(x) is x


def _uneven(rank: int, group) -> list[str]:
    exchange = exchange_for(group)
    texts = []
    three_heads, three_tokens = torch.zeros(1, 2, 3, 1), torch.zeros(1, 3, 2, 1)
    for call, x in ((exchange.send_recv_heads, three_heads), (exchange.gather_heads, three_tokens)):
        with pytest.raises(ValueError) as caught:
            call(x)
        texts.append(str(caught.value))
    return texts


def test_uneven_splits_are_refused_with_the_numbers() -> None:
    for texts in run(_uneven, 2):
        assert "3 heads" in texts[0] and "2 ranks" in texts[0] and "3 tokens" in texts[1]
