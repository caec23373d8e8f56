"""Rows of tensors as the native code reads them, csrc/exchange_cpu.c and csrc/exchange_rows.h alike."""

import ctypes

from torch import Tensor

from .layout import Block, Geometry, Move


class Rows(ctypes.Structure):
    """A Block with the strides of both sides; all in bytes but batch and tokens."""

    _fields_ = [
        (name, ctypes.c_int64)  # none is ever negative, so that C may take them for unsigned ones
        for name in (
            "batch",
            "tokens",
            "row_bytes",
            "source_first",
            "source_batch_stride",
            "source_token_stride",
            "target_first",
            "target_batch_stride",
            "target_token_stride",
        )
    ]


def with_whole_rows(geometry: Geometry, x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Returns x, or a copy whose rows are contiguous, with its strides of (B, T, H) in bytes."""
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    one_head = geometry.move is not Move.ALLGATHER and max(geometry.heads) <= 1
    if not _is_dense(x, 3 if one_head else 2):
        x = x.contiguous()
    strides, size = x.stride(), x.element_size()
    head_stride = 0 if geometry.move is Move.ALLGATHER else strides[2]
    return x, (strides[0] * size, strides[1] * size, head_stride * size)


def _is_dense(x: Tensor, first_dim: int) -> bool:
    """Tells whether the dims from `first_dim` on lie one after another without gaps."""
    dense = 1
    for size, stride in zip(reversed(x.shape[first_dim:]), reversed(x.stride()[first_dim:]), strict=True):
        if size != 1 and stride != dense:
            return x.numel() == 0
        dense *= size
    return True


def rows_sent(block: Block, strides: tuple[int, int, int]) -> Rows:
    """Returns a block with the strides of (B, T, H) of the sender's tensor, in bytes."""
    return Rows(
        batch=block.batch,
        tokens=block.tokens,
        row_bytes=block.row_bytes,
        source_first=block.source_first,
        source_batch_stride=strides[0],
        source_token_stride=strides[1],
        target_first=block.target_first,
        target_batch_stride=block.target_batch_stride,
        target_token_stride=block.target_token_stride,
    )


def rows_to_all(geometry: Geometry, rank: int, strides: tuple[int, int, int]) -> ctypes.Array:
    """Returns the Rows that a rank sends to each rank; `strides` are as in `rows_sent`."""
    blocks = [geometry.block(rank, receiver, strides) for receiver in range(geometry.world_size)]
    return (Rows * geometry.world_size)(*(rows_sent(block, strides) for block in blocks))


def rows_in_place(block: Block) -> Rows:
    """Returns the block that copies what a sender put into a result from there into another like it."""
    rows = rows_sent(block, (block.target_batch_stride, block.target_token_stride, 0))
    rows.source_first = block.target_first
    return rows
