"""Ulysses context parallelism for training: one sequence spread over a group of ranks, with gradients.

    initialize_context_parallel(cp_size=2)          # every rank; consecutive ranks form groups
    warmup_context_parallel(hidden_dim=4096, num_heads=32)
    video, audio, positions, _, lengths = prepare_cp_inputs(video, audio, positions)
    ...  # the model; its self-attention calls apply_ulysses_attention
    video, audio = gather_cp_outputs(video, audio, lengths)   # the loss is computed alike on every rank

Parameters that every rank holds get partial gradients: sum (do not average) them over `get_cp_group()`.

These functions work on the one group that `initialize_context_parallel` opened for this process; nothing else sets it.
Code that wants several groups at once uses `ContextParallel` objects. Without a group, or with cp_size 1, all functions
leave sequences whole.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..all2all import OneRank
from . import inputs
from .group import TIMEOUT, AttentionFn, ContextParallel
from .inputs import Lengths, compute_cp_divisible_frames

__all__ = [
    "ContextParallel",
    "apply_ulysses_attention",
    "compute_cp_divisible_frames",
    "destroy_context_parallel",
    "gather_cp_outputs",
    "gather_for_loss",
    "gather_sequence",
    "get_cp_group",
    "get_cp_rank",
    "get_cp_world_size",
    "initialize_context_parallel",
    "is_cp_enabled",
    "pad_to_cp_divisible",
    "prepare_cp_inputs",
    "scatter_sequence",
    "seq_all_to_all",
    "unpad_from_cp",
    "warmup_context_parallel",
]

_OFF = ContextParallel(OneRank())
_current = _OFF


def initialize_context_parallel(
    cp_size: int = 1, *, timeout: float = TIMEOUT, transport: str = "auto", device: torch.device | None = None
) -> None:
    """Forms groups of `cp_size` consecutive ranks; 1 is off. Every rank must call it, after init_process_group.

    `timeout` is how many seconds a rank waits for another, `transport` and `device` are those of `exchange_for`. Raises
    ValueError where the world size is no multiple of `cp_size`, RuntimeError where a group is open already.
    """
    global _current
    if is_cp_enabled():
        raise RuntimeError(
            f"context parallelism is on already, with cp_size {_current.size}: call destroy_context_parallel first"
        )
    _current = ContextParallel.open(cp_size, timeout=timeout, transport=transport, device=device)


def destroy_context_parallel() -> None:
    """Turns context parallelism off and gives back its group. May be called when it is off."""
    global _current
    before, _current = _current, _OFF
    before.close()


def is_cp_enabled() -> bool:
    """Says whether sequences are spread: a group of two ranks or more is open."""
    return _current.size > 1


def get_cp_rank() -> int:
    """Returns this rank's place in its group; 0 when off."""
    return _current.rank


def get_cp_world_size() -> int:
    """Returns the size of the group; 1 when off."""
    return _current.size


def get_cp_group() -> dist.ProcessGroup | None:
    """Returns the group, to sum gradients over; None when off (which torch.distributed takes for the whole world)."""
    return _current.group


def warmup_context_parallel(
    hidden_dim: int = 4096, num_heads: int = 32, seq_len: int = 1024, device: torch.device | str | None = None
) -> None:
    """Runs every kind of exchange once, with a long timeout: what starts lazily does not burden the first step."""
    _current.warm_up(hidden_dim, num_heads, seq_len, device)


def seq_all_to_all(
    x: Tensor, scatter_dim: int, gather_dim: int, *, gather_sizes: Sequence[int] | None = None
) -> Tensor:
    """Cuts one dim over the ranks and joins another that was cut before, with gradient.

    The scattered dim need not divide: the first ranks get one more. Of the gathered dim every rank must hold as much,
    or what `gather_sizes` says for each rank, as on the way back from an uneven cut.
    """
    return _current.all_to_all(x, scatter_dim, gather_dim, gather_sizes)


def scatter_sequence(x: Tensor, dim: int = 1) -> Tensor:
    """Returns the own slice of a whole sequence; the gradient lands in the own slice, with zeros elsewhere.

    Summed over the group that is the unsharded gradient. Raises ValueError where the dim does not divide.
    """
    return _current.scatter(x, dim)


def gather_sequence(x: Tensor, dim: int = 1) -> Tensor:
    """Joins the slices; the gradient is the sum over ranks of the own slice's: for losses summed over ranks."""
    return _current.gather(x, dim)


def gather_for_loss(x: Tensor, dim: int = 1) -> Tensor:
    """Joins the slices; the gradient is the own slice of this rank's: for a loss that every rank computes alike."""
    return _current.gather_for_loss(x, dim)


def apply_ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, heads: int, attention_fn: AttentionFn, mask: Tensor | None = None
) -> Tensor:
    """Attends over the whole sequence: (B, s, heads * D) each to (B, s, heads * D), s tokens of this rank.

    `attention_fn(q, k, v, heads, mask)` gets all S tokens of this rank's heads, (B, S, own heads * D). A mask whose
    last dim is the local number of keys is gathered along it, any other is passed whole. Heads need not divide over the
    ranks; ValueError where there are fewer heads than ranks.
    """
    return _current.attend(q, k, v, heads, attention_fn, mask)


def pad_to_cp_divisible(x: Tensor, dim: int = 1) -> tuple[Tensor, int]:
    """Appends zeros until the dim divides over the group; returns (padded, original length).

    Attention must not see the padded keys: pad a mask in the same way, its zeros mask them.
    """
    return inputs.padded(_current, x, dim)


def unpad_from_cp(x: Tensor, original_length: int, dim: int = 1) -> Tensor:
    """Drops what `pad_to_cp_divisible` appended."""
    return x.narrow(dim, 0, original_length)


def prepare_cp_inputs(
    video_latent: Tensor,
    audio_latent: Tensor | None = None,
    video_positions: Tensor | None = None,
    audio_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Lengths]:
    """Returns this rank's share of (video, audio, video positions, audio positions), and the lengths before.

    Latents are (B, T, ...), positions (B, axes, T, ...); both are padded with zeros where they do not divide. The last
    value goes to `gather_cp_outputs`. Raises ValueError where positions do not fit their latent.
    """
    return inputs.prepare(_current, video_latent, audio_latent, video_positions, audio_positions)


def gather_cp_outputs(
    video_output: Tensor, audio_output: Tensor | None = None, metadata: Lengths | None = None
) -> tuple[Tensor, Tensor | None]:
    """Joins outputs (B, t, ...) as `gather_for_loss` does, and drops the padding where `metadata` is given."""
    return inputs.joined(_current, video_output, audio_output, metadata)
