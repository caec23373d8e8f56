"""Sequence parallelism against one process: bit for bit, over worker counts, token counts, masks and perturbations."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from mgpu_runtime.exchange import ExchangeError
from mgpu_runtime.models.streams import StreamInput
from mgpu_runtime.parallel.attention_manager import MEETING_TIMEOUT, AttentionManager
from mgpu_runtime.parallel.limits import check_heads, check_tokens
from mgpu_runtime.parallel.sequence_parallel import SequenceParallelModelWrapper
from mgpu_runtime.parallel.shares import CPU_ROWS, Shares
from tests.goldens import GOLDEN, golden, relative_error
from tests.spawn import run
from tests.tiny import random_transformer, transformer

NAMES = sorted(p.stem for style in ("20", "23") for p in (GOLDEN / "golden").glob(f"transformer_{style}_*")) + [
    "sp_20",
    "sp_23",
]
TOKEN_COUNTS = (1, 2, 5, 36, 97)
HEADS_RANDOM, HEADS_PUBLISHED = 6, 32
ROPE_TYPES = ("split", "interleaved")


def _wrap(model, group, max_tokens: int = 4096) -> SequenceParallelModelWrapper:
    config = model.config
    manager = AttentionManager(max_tokens, config.num_attention_heads, config.attention_head_dim, torch.float32, group)
    return SequenceParallelModelWrapper(model, manager)


def _everything(rank: int, group) -> dict[str, list | dict | float]:
    """Runs all cases that a world size can run: spawning ranks costs more than the cases."""
    world_size = dist.get_world_size(group)
    results: dict[str, list | dict | float] = {}
    with torch.no_grad():
        if world_size != 5:  # the goldens' models have 4 heads
            results["golden"] = _golden_velocities(group)
            results["poisoned"] = _poisoned(rank, group)
        if world_size != 4:
            for rope_type in ROPE_TYPES:
                results[rope_type] = _random_velocities(group, rope_type)
        if world_size in (1, 3):
            model = _wrap(random_transformer(num_heads=HEADS_PUBLISHED), group)
            results["32 heads"] = [model.predict(*_streams(count, 7, HEADS_PUBLISHED)) for count in (36, 97)]
        results["timeouts"] = _timeouts(group)
        results["left by a graph"] = _left_by_a_graph(rank, group)
        if world_size == 2:
            results["broken off"] = _broken_off(group)
    return results


def _golden_velocities(group) -> dict[str, tuple]:
    models = {style: _wrap(transformer(style), group) for style in ("20", "23")}
    results = {}
    for name in NAMES:
        case = golden(name)
        model = models[name.split("_")[1]]
        results[name] = model.predict(case.stream("video"), case.stream("audio"), case.get("perturbation_keep_mask"))
    return results


def _random_velocities(group, rope_type: str) -> list[tuple]:
    model = _wrap(random_transformer(num_heads=HEADS_RANDOM, rope_type=rope_type), group)
    return [model.predict(*_streams(count, audio)) for count in TOKEN_COUNTS for audio in (1, 7)]


def _poisoned(rank: int, group) -> float:
    """Fills the rows that only pad with large values; returns the error of the real ones."""
    model = _wrap(transformer("23"), group)
    case = golden("sp_23")
    share = model._share

    def poisoned_share(video: StreamInput, shares: Shares) -> StreamInput:
        local = share(video, shares)
        local.latent[:, shares.tokens[rank] :] = 1e4
        return local

    model._share = poisoned_share
    video, audio = model.predict(case.stream("video"), case.stream("audio"))
    return max(
        relative_error(video, case["out.unsharded.video_velocity"]),
        relative_error(audio, case["out.unsharded.audio_velocity"]),
    )


def _timeouts(group) -> list[float]:
    """Returns the exchange's timeout at each attention of video to video, in two forwards of one shape."""
    model, seen = _wrap(random_transformer(num_heads=HEADS_RANDOM), group), []
    gather = model.attn_mgr.start_gather

    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.append(model.attn_mgr.exchange.timeout)
        return gather(x)

    model.attn_mgr.start_gather = watched
    for _ in range(2):
        model.predict(*_streams(5, 1))
    return [*seen, model.attn_mgr.exchange.timeout]


def _left_by_a_graph(rank: int, group) -> list[bool]:
    """Tells whether attention ends right where a compiled graph began it and was broken before the end."""
    manager = AttentionManager(64, HEADS_RANDOM, 4, torch.float32, group, copy_out_=True)
    whole = torch.randn(1, 40, HEADS_RANDOM, 4, generator=torch.Generator().manual_seed(3))
    with manager.sequence(40, torch.device("cpu")) as shares:
        own = torch.nn.functional.pad(whole, (0, 0, 0, 0, 0, 160)).narrow(1, shares.first[rank], shares.rows[rank])
        begun, passed_on = [manager.start(own)], [manager.without_padding(own)]
        (traded,) = manager.finish(*begun)
        same = [torch.equal(traded, manager.finish(*passed_on)[0])]
        back = manager.finish_gather(manager.start_gather(lambda first, count: traded.narrow(1, first, count)))
        same += [torch.equal(back, own), torch.equal(manager.finish_gather(manager.without_padding(own)), own)]
    manager.close()
    return same


def _broken_off(group) -> str:
    """Breaks a forward off on every rank and tells what the next one says."""
    model = _wrap(transformer("23"), group)
    streams = golden("sp_23").stream("video"), golden("sp_23").stream("audio")
    with pytest.raises(ValueError, match="perturbation"):
        model.predict(*streams, torch.ones(1))
    with pytest.raises(ExchangeError) as caught:
        model.predict(*streams)
    return str(caught.value)


@pytest.fixture(scope="module")
def by_world() -> dict[int, list[dict]]:
    return {world: run(_everything, world) for world in (1, 2, 3, 4, 5)}


@pytest.mark.parametrize("name", NAMES)
def test_b01_every_worker_count_gives_the_official_velocities(by_world: dict, name: str) -> None:
    case = golden(name)
    prefix = "out.unsharded" if name.startswith("sp_") else "out"
    for world in (1, 2, 3, 4):
        for stream, velocity in zip(("video", "audio"), by_world[world][0]["golden"][name], strict=True):
            expected = case.get(f"{prefix}.{stream}_velocity")
            assert (velocity is None) == (expected is None)
            if expected is not None:
                assert relative_error(velocity, expected) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_every_worker_count_gives_the_same_bits(by_world: dict, name: str) -> None:
    for world in (2, 3, 4):
        for rank_result in by_world[world]:
            for one, many in zip(by_world[1][0]["golden"][name], rank_result["golden"][name], strict=True):
                assert one is None or torch.equal(one, many)


def test_the_official_padding_would_have_failed() -> None:
    """The goldens hold what unmasked padding gives: far from the right answer, so the tests above can tell."""
    case = golden("sp_23")
    wrong = case["official_padded.ws2.audio_velocity"]
    assert relative_error(wrong, case["out.unsharded.audio_velocity"]) > 1e-3


def _streams(num_tokens: int, num_audio: int, num_heads: int = HEADS_RANDOM) -> tuple[StreamInput, StreamInput]:
    generator = torch.Generator().manual_seed(num_tokens)

    def stream(count: int, channels: int, width: int, axes: int) -> StreamInput:
        starts = torch.rand(2, axes, count, 1, generator=generator)
        return StreamInput(
            latent=torch.randn(2, count, channels, generator=generator),
            timesteps=torch.rand(2, count, generator=generator),
            sigma=torch.rand(2, generator=generator),
            positions=torch.cat([starts, starts + 0.1], -1),
            context=torch.randn(2, 3, width, generator=generator),
        )

    video = stream(num_tokens, 16, num_heads * 16, 3)
    mask = torch.rand(2, num_tokens, num_tokens, generator=generator).round(decimals=1)
    mask.diagonal(dim1=1, dim2=2).fill_(1)
    return replace(video, attention_mask=mask), stream(num_audio, 32, num_heads * 8, 1)


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_b03_b05_b06_any_token_count_runs_on_2_3_and_5_workers(by_world: dict, rope_type: str) -> None:
    """6 heads; 1 audio token; token counts below, at and beside multiples of the worker count; both rotary layouts."""
    for world in (2, 3, 5):
        for rank_result in by_world[world]:
            for one, many in zip(by_world[1][0][rope_type], rank_result[rope_type], strict=True):
                assert torch.equal(one[0], many[0]) and torch.equal(one[1], many[1])


def test_b08_large_values_in_padded_rows_change_no_real_row(by_world: dict) -> None:
    assert max(result["poisoned"] for world in (1, 2, 3, 4) for result in by_world[world]) < 1e-5


def test_b10_32_heads_on_3_workers_equal_one_worker(by_world: dict) -> None:
    for rank_result in by_world[3]:
        for one, many in zip(by_world[1][0]["32 heads"], rank_result["32 heads"], strict=True):
            for stream in (0, 1):
                assert relative_error(many[stream], one[stream]) < 1e-5


def test_b10_more_workers_than_heads_are_refused_with_the_counts_that_work() -> None:
    with pytest.raises(ValueError, match="4 attention heads cannot be dealt to 5 workers") as caught:
        check_heads(4, 5)
    assert "1 to 4" in str(caught.value)
    for world_size in (1, 3, 5, 6, 7, 8, 32):
        check_heads(32, world_size)


def test_ranks_wait_long_for_a_first_use_and_for_the_meeting_in_each_forward_only(by_world: dict) -> None:
    """Two blocks, two forwards: long in all of the first, then up to the first attention, which has been waited for."""
    for world in (2, 3, 5):
        for result in by_world[world]:
            assert result["timeouts"] == [MEETING_TIMEOUT, MEETING_TIMEOUT, 10.0, 10.0, 10.0]


def test_attention_that_a_graph_began_ends_without_it(by_world: dict) -> None:
    for ranks in by_world.values():
        for result in ranks:
            assert result["left by a graph"] == [True, True, True]


def test_a_forward_broken_off_leaves_an_exchange_that_refuses(by_world: dict) -> None:
    assert all("make a new AttentionManager" in result["broken off"] for result in by_world[2])


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 31, 32, 33, 97, 4996])
def test_shares_hold_every_token_once_and_padding_at_the_end_only(num_tokens: int, world_size: int) -> None:
    for device, unit in (("cpu", CPU_ROWS), ("cuda", 1)):
        shares = Shares.of(num_tokens, world_size, torch.device(device))
        assert sum(shares.tokens) == num_tokens
        assert shares.first == tuple(sum(shares.rows[:rank]) for rank in range(world_size))
        assert all(rows and rows % unit == 0 for rows in shares.rows) and max(shares.rows) - min(shares.rows) <= unit
        padded = [rank for rank in range(world_size) if shares.tokens[rank] < shares.rows[rank]]
        assert not any(shares.tokens[rank + 1] for rank in padded[:-1])
        assert sum(shares.rows) - num_tokens <= unit * world_size
        if device == "cuda" and num_tokens >= world_size:
            assert shares.rows == shares.tokens


def test_too_many_tokens_are_refused_with_advice() -> None:
    with pytest.raises(ValueError, match="24600 video tokens exceed sp_max_tokens 16384: use fewer frames"):
        check_tokens(24600, 16384)
    case = golden("transformer_23_uniform")
    model = _wrap(transformer("23"), None, max_tokens=23)
    with pytest.raises(ValueError, match="24 video tokens exceed sp_max_tokens 23"):
        model.predict(case.stream("video"), case.stream("audio"))
    with pytest.raises(ValueError, match="at least 1"):
        AttentionManager(0, 4, 16, torch.float32, None)
