"""Rows of tensors as csrc/exchange_cpu.c reads them."""

import ctypes

from torch import Tensor

from .layout import Block, Geometry, Move


class Rows(ctypes.Structure):
    """A Block as csrc/exchange_cpu.c reads it, with the strides of both sides, all in bytes."""

    _fields_ = [
        ("batch", ctypes.c_uint64),
        ("tokens", ctypes.c_uint64),
        ("row_bytes", ctypes.c_uint64),
        ("source_first", ctypes.c_uint64),
        ("source_batch_stride", ctypes.c_uint64),
        ("source_token_stride", ctypes.c_uint64),
        ("target_first", ctypes.c_uint64),
        ("target_batch_stride", ctypes.c_uint64),
        ("target_token_stride", ctypes.c_uint64),
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


def rows_in_place(block: Block) -> Rows:
    """Returns the block that copies what a sender put into a result from there into another like it."""
    rows = rows_sent(block, (block.target_batch_stride, block.target_token_stride, 0))
    rows.source_first = block.target_first
    return rows
