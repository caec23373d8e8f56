"""Context parallelism against the unsharded computation, in float64: values, gradients, refusals."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mgpu_runtime.exchange import context_parallel as cp
from mgpu_runtime.exchange.layout import deal, starts
from tests.spawn import run

ROOT = Path(__file__).parents[1]
TOLERANCE = 1e-6


def _error(x: Tensor, y: Tensor) -> float:
    return float((x - y).detach().abs().max()) if x.numel() else 0.0


def _random(*shape: int, seed: int = 0) -> Tensor:
    """Draws the same numbers on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _summed(gradient: Tensor) -> Tensor:
    """Adds up every rank's partial gradient, as a training loop does."""
    if cp.is_cp_enabled():
        dist.all_reduce(gradient, group=cp.get_cp_group())
    return gradient


def _own(whole: Tensor, counts: tuple[int, ...], dim: int) -> Tensor:
    return whole.narrow(dim, starts(counts)[cp.get_cp_rank()], counts[cp.get_cp_rank()])


def _all_to_all(shape: tuple[int, ...], scatter: int, gather: int, sizes: tuple[int, ...] | None) -> float:
    """Compares seq_all_to_all with cutting the whole, and its gradient with the own slice of the whole's."""
    size = cp.get_cp_world_size()
    counts = (shape[gather] // size,) * size if sizes is None else sizes
    whole, weight = _random(*shape), _random(*shape, seed=1)
    x = _own(whole, counts, gather).clone().requires_grad_()
    out = cp.seq_all_to_all(x, scatter, gather, gather_sizes=sizes)
    dealt = deal(shape[scatter], size)
    (out**2 * _own(weight, dealt, scatter)).sum().backward()
    return max(
        _error(out, _own(whole, dealt, scatter)),
        _error(x.grad, _own(2 * whole * weight, counts, gather)),
    )


def _attention(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None) -> Tensor:
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        mask = mask[:, None, None] if mask.dim() == 2 else mask
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


def _ulysses(heads: int, mask: Tensor | None, local_mask: Tensor | None, tokens: int, keys: int) -> float:
    """Runs attention whole and spread; compares outputs, and gradients of q, k, v and of a float mask."""
    size = cp.get_cp_world_size()
    whole = [_random(2, count, heads * 3, seed=seed) for seed, count in enumerate((tokens, keys, keys))]
    weight = _random(2, tokens, heads * 3, seed=9)
    leaves = [x.clone().requires_grad_() for x in whole]
    expected = _attention(*leaves, heads, mask)
    (expected * weight).sum().backward()
    own = [_own(x, deal(x.shape[1], size), 1).clone().requires_grad_() for x in whole]
    out = cp.apply_ulysses_attention(*own, heads, _attention, local_mask)
    (out * _own(weight, deal(tokens, size), 1)).sum().backward()
    errors = [_error(out, _own(expected, deal(tokens, size), 1))]
    errors += [_error(a.grad, _own(b.grad, deal(b.shape[1], size), 1)) for a, b in zip(own, leaves, strict=True)]
    return max(errors)


def _ulysses_cases(size: int) -> dict[str, float]:
    tokens = 4 * size
    keep = _random(2, tokens, seed=5) > -0.5
    bias = _random(2, 1, 1, tokens, seed=6)
    square = _random(2, 1, tokens, tokens, seed=7)
    own = deal(tokens, size)
    errors = {
        "no mask": _ulysses(4, None, None, tokens, tokens),
        "7 heads": _ulysses(7, None, None, tokens, tokens),
        "other keys": _ulysses(5, None, None, tokens, 2 * size),
        "local mask": _ulysses(4, keep, _own(keep, own, 1), tokens, tokens),
        "local bias": _ulysses(4, bias, _own(bias, own, 3), tokens, tokens),
        "whole mask": _ulysses(4, square, square, tokens, tokens),
    }
    leaf = bias.clone().requires_grad_()
    spread = _own(bias, own, 3).clone().requires_grad_()
    for mask, share in ((leaf, None), (spread, own)):
        q = _random(2, tokens, 12)
        if share is None:
            (_attention(q, q, q, 4, mask) ** 2).sum().backward()
        else:
            q = _own(q, own, 1)
            (cp.apply_ulysses_attention(q, q, q, 4, _attention, mask) ** 2).sum().backward()
    errors["gradient of a bias"] = _error(spread.grad, _own(leaf.grad, own, 3))
    return errors


def _sequence_cases(size: int) -> dict[str, float]:
    errors = {}
    for dim in (0, 1, 2, -1):
        shape = [3, 2, 4]
        shape[dim] = 2 * size
        whole, weight = _random(*shape), _random(*shape, seed=1)
        leaf = whole.clone().requires_grad_()
        part = cp.scatter_sequence(leaf, dim)
        own = (2,) * size
        (part**2 * _own(weight, own, dim)).sum().backward()
        errors[f"scatter {dim}"] = _error(part, _own(whole, own, dim))
        errors[f"scatter gradient {dim}"] = _error(_summed(leaf.grad), 2 * whole * weight)

        part = _own(whole, own, dim).clone().requires_grad_()
        out = cp.gather_sequence(part, dim)
        (out**2 * weight * (cp.get_cp_rank() + 1)).sum().backward()  # each rank a loss of its own
        factor = sum(range(1, size + 1))
        errors[f"gather {dim}"] = _error(out, whole)
        errors[f"gather gradient {dim}"] = _error(part.grad, factor * 2 * _own(whole * weight, own, dim))

        part = _own(whole, own, dim).clone().requires_grad_()
        out = cp.gather_for_loss(part, dim)
        (out**2 * weight).sum().backward()  # every rank the same loss
        errors[f"for loss {dim}"] = _error(out, whole)
        errors[f"for loss gradient {dim}"] = _error(part.grad, 2 * _own(whole * weight, own, dim))
    return errors


def _all_to_all_cases(size: int) -> dict[str, float]:
    tokens = 3 * size
    errors = {
        "heads": _all_to_all((2, tokens, 2 * size, 3), 2, 1, None),
        "back": _all_to_all((2, tokens, 2 * size, 3), 1, 2, None),
        "heads, uneven": _all_to_all((2, tokens, 7, 3), 2, 1, None),
        "tokens, uneven": _all_to_all((2, tokens + 1, size, 3), 1, 2, None),
        "negative dims": _all_to_all((2, tokens, 5), -1, 1, None),
        "first and last": _all_to_all((size, 2, 2, 5), 3, 0, None),
        "last to first": _all_to_all((5, 2, 2, size), 0, 3, None),
        "two dims": _all_to_all((size, 4), 1, 0, None),
    }
    uneven = tuple(range(1, size + 1))
    errors["sizes"] = _all_to_all((2, sum(uneven), 5, 2), 2, 1, uneven)
    errors["sizes, back"] = _all_to_all((2, 5, sum(uneven), 2), 1, 2, uneven)
    errors["dealt sizes, back"] = _all_to_all((2, 5, 2 * size + 1, 2), 1, 2, deal(2 * size + 1, size))
    return errors


def _second_derivative(size: int) -> dict[str, float]:
    """Differentiates a gradient again: exchanges within a gradient have gradients too."""
    whole = _random(1, 2 * size, size, 2)
    leaf = whole.clone().requires_grad_()
    (first,) = torch.autograd.grad((leaf**3).sum(), leaf, create_graph=True)
    (expected,) = torch.autograd.grad((first**2).sum(), leaf)
    own = _own(whole, (2,) * size, 1).clone().requires_grad_()
    (first,) = torch.autograd.grad((cp.seq_all_to_all(own, 2, 1) ** 3).sum(), own, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), own)
    return {"second derivative": _error(second, _own(expected, (2,) * size, 1))}


def _input_cases(size: int) -> dict[str, float]:
    """Pads, cuts, joins and unpads odd lengths; the loss over the joined outputs is the unsharded one."""
    length, audio_length = 4 * size + 1, 2
    video, audio = _random(2, length, 3), _random(2, audio_length, 2, seed=1)
    positions, audio_positions = _random(2, 3, length, 2, seed=2), _random(2, 1, audio_length, 2, seed=3)
    scale = torch.full((), 1.5, dtype=torch.float64, requires_grad=True)
    inputs = cp.prepare_cp_inputs(video, audio, positions, audio_positions)
    outputs = [(inputs[i] * scale + inputs[i + 2].sum((1, 3))[..., None]) ** 2 for i in (0, 1)]
    out, audio_out = cp.gather_cp_outputs(*outputs, inputs[4])
    loss = out.mean() + audio_out.mean()
    loss.backward()
    same = torch.full((), 1.5, dtype=torch.float64, requires_grad=True)
    whole = (video * same + positions.sum((1, 3))[..., None]) ** 2
    audio_whole = (audio * same + audio_positions.sum((1, 3))[..., None]) ** 2
    expected = whole.mean() + audio_whole.mean()
    expected.backward()
    padded, _ = cp.gather_cp_outputs(outputs[0])
    return {
        "outputs": max(_error(out, whole), _error(audio_out, audio_whole), _error(loss, expected)),
        "gradient": _error(_summed(scale.grad), same.grad),
        "padded length": abs(padded.shape[1] - (length + -length % size)),
        "lengths": inputs[4] != {"video_original_length": length, "audio_original_length": audio_length},
        "no audio": cp.prepare_cp_inputs(video)[1:4] != (None, None, None),
    }


def _compiled_cases(size: int) -> dict[str, float]:
    """Compiles attention, all-to-all and gathers without a graph break, for several lengths; with gradients."""

    sizes = deal(15, size)

    def program(q: Tensor, mask: Tensor) -> Tensor:
        out = cp.apply_ulysses_attention(q, q.sin(), q * 2, 5, _attention, mask)
        out = cp.seq_all_to_all(cp.seq_all_to_all(out, 2, 1), 1, 2, gather_sizes=sizes)
        whole = cp.gather_sequence(out)
        return cp.gather_for_loss(out).square().sum() + whole.sum() + cp.scatter_sequence(whole).sin().sum()

    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(program, fullgraph=True, dynamic=True, backend="aot_eager")
    errors = {}
    for tokens in (4, 6, 9):
        q = _random(1, tokens, 15, seed=cp.get_cp_rank()).requires_grad_()
        mask = _random(1, tokens) > -1
        (expected,) = torch.autograd.grad(program(q, mask), q)
        (got,) = torch.autograd.grad(compiled(q, mask), q)
        errors[f"compiled, {tokens} tokens"] = _error(got, expected)
    return errors | {"graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"] - 1}


def _sentences() -> list[str]:
    texts = []
    for call in (
        lambda: cp.scatter_sequence(torch.zeros(1, 5, 1)),
        lambda: cp.seq_all_to_all(torch.zeros(1, 4, 4), 1, -2),
        lambda: cp.seq_all_to_all(torch.zeros(1, 4, 4), 3, 1),
        lambda: cp.apply_ulysses_attention(*[torch.zeros(1, 4, 4)] * 3, 1, _attention),
        lambda: cp.apply_ulysses_attention(*[torch.zeros(1, 4, 5)] * 3, 4, _attention),
        lambda: cp.prepare_cp_inputs(torch.zeros(1, 4, 1), None, torch.zeros(1, 3, 5, 2)),
        lambda: cp.prepare_cp_inputs(torch.zeros(1, 4, 1), audio_positions=torch.zeros(1, 1, 4, 2)),
    ):
        try:
            call()
            texts.append("")
        except ValueError as error:
            texts.append(str(error))
    try:
        cp.initialize_context_parallel(2)
    except RuntimeError as error:
        texts.append(str(error))
    return texts


def _everything(rank: int, group, cp_size: int) -> dict:
    """Runs all cases in groups of one size: starting ranks costs more than the cases."""
    cp.initialize_context_parallel(cp_size, transport="gloo")
    cp.warmup_context_parallel(hidden_dim=12, num_heads=5, seq_len=9)
    size = cp.get_cp_world_size()
    errors = _all_to_all_cases(size) | _sequence_cases(size) | _ulysses_cases(size) | _input_cases(size)
    if size > 1:
        errors |= _second_derivative(size)
    if size == 2 and rank >= dist.get_world_size() - size:  # one group is enough: the one with other ranks in the world
        errors |= _compiled_cases(size)
    result = {
        "errors": {name: float(error) for name, error in errors.items() if not error < TOLERANCE},
        "place": (cp.get_cp_rank(), size, cp.is_cp_enabled(), cp.get_cp_group() is not None),
        "sentences": _sentences() if size == 4 else None,
    }
    cp.destroy_context_parallel()
    result["off"] = (cp.get_cp_rank(), cp.get_cp_world_size(), cp.is_cp_enabled(), cp.get_cp_group())
    return result


def _four(rank: int, group) -> dict:
    """Opens groups of 2, of 4 and of 1 one after another, and asks for 3."""
    try:
        cp.initialize_context_parallel(3)
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    return {"refusal": refusal} | {size: _everything(rank, group, size) for size in (2, 4, 1)}


@pytest.fixture(scope="module")
def of_four() -> list[dict]:
    return run(_four, 4)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_every_value_and_gradient_is_the_unsharded_one(of_four: list[dict], cp_size: int) -> None:
    for rank, result in enumerate(of_four):
        assert result[cp_size]["errors"] == {}
        assert result[cp_size]["place"] == (rank % cp_size, cp_size, cp_size > 1, cp_size > 1)
        assert result[cp_size]["off"] == (0, 1, False, None)


@pytest.mark.slow
def test_three_ranks_with_heads_and_tokens_that_do_not_divide() -> None:
    for result in run(_everything, 3, 3):
        assert result["errors"] == {}


def test_refusals_say_the_numbers_and_what_to_do(of_four: list[dict]) -> None:
    for result in of_four:
        assert "4 ranks cannot be cut into groups of cp_size 3" in result["refusal"]
        wanted = (
            "5 rows of dim 1 do not divide over 4 ranks: use pad_to_cp_divisible",
            "scatter_dim and gather_dim must differ, got 1 and -2",
            "dim 3 is none of a tensor of shape (1, 4, 4)",
            "1 attention heads cannot be shared by 4 ranks: use cp_size <= 1",
            "5 channels do not divide into 4 heads",
            "video_positions are for 5 tokens (dim 2), video_latent has 4 (dim 1)",
            "audio_positions were given without audio_latent",
            "on already, with cp_size 4: call destroy_context_parallel first",
        )
        for text, part in zip(result[4]["sentences"], wanted, strict=True):
            assert part in text


def test_without_a_group_everything_stays_whole() -> None:
    assert (cp.get_cp_rank(), cp.get_cp_world_size(), cp.is_cp_enabled()) == (0, 1, False)
    cp.initialize_context_parallel(1)
    cp.warmup_context_parallel()
    x = _random(2, 5, 6).requires_grad_()
    assert cp.seq_all_to_all(x, 2, 1) is x and cp.gather_sequence(x) is x and cp.gather_for_loss(x) is x
    assert torch.equal(cp.scatter_sequence(x), x)
    assert torch.equal(cp.apply_ulysses_attention(x, x, x, 3, _attention), _attention(x, x, x, 3, None))
    assert cp.pad_to_cp_divisible(x) == (x, 5) and torch.equal(cp.unpad_from_cp(x, 4), x[:, :4])
    cp.destroy_context_parallel()
    with pytest.raises(ValueError, match="cp_size must be at least 1, got 0"):
        cp.initialize_context_parallel(0)
    with pytest.raises(RuntimeError, match="cp_size 2 needs torch.distributed: start with torchrun"):
        cp.initialize_context_parallel(2)


@given(st.integers(1, 2000), st.integers(1, 16), st.sampled_from([1, 4, 8]))
def test_frame_counts_divide_and_are_the_nearest_above(frames: int, cp_size: int, stride: int) -> None:
    got = cp.compute_cp_divisible_frames(frames, cp_size, stride)
    below = frames - (frames - 1) % stride  # the nearest stride n + 1 at or below
    fitting = [n for n in range(below, below + stride * cp_size, stride) if ((n - 1) // stride + 1) % cp_size == 0]
    assert [got] == fitting
    assert cp.compute_cp_divisible_frames(got, cp_size, stride) == got


def test_frame_counts_by_hand_and_refused() -> None:
    assert [cp.compute_cp_divisible_frames(*case) for case in ((121, 2), (121, 4), (1, 2), (9, 1), (15, 1))] == [
        121,
        121,
        9,
        9,
        9,
    ]
    for case, text in (((0, 2), "frames"), ((9, 0), "cp_size"), ((9, 2, 0), "temporal_stride")):
        with pytest.raises(ValueError, match=f"{text} must be at least 1, got 0"):
            cp.compute_cp_divisible_frames(*case)


@pytest.mark.slow
def test_the_example_learns_alike_on_one_and_on_two_ranks() -> None:
    script = ROOT / "docs" / "examples" / "train_context_parallel.py"
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
