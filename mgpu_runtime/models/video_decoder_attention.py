"""Neighbourhood attention of the diffusion video decoder in plain PyTorch, with bounded memory.

Every query attends to a window of fixed size around it, shifted inward at the borders of the grid, so that the window
is always full (as NATTEN's `na3d`). FlexAttention could say the same, but needs a compiler to be fast, and its block
mask of a whole clip is larger than a GPU. Here neighbouring queries share the keys that any of them needs, and a mask
keeps each to its own window.

Letters: B batch, T H W the grid of tokens, N heads, D head width, n columns of query blocks, q queries of a block, k
keys of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from diffusers.models.autoencoders.ltx2_diffusion_decoder import LTX2VideoVaeNeighborhoodAttention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BLOCK = 4  # queries a side of a block: with more, blocks gather many keys that few of their queries need
MAX_GATHERED = 1 << 25  # numbers of keys gathered at once, about

Window = tuple[int, int, int]


class NeighborhoodAttention:
    """Attention processor for LTX2VideoVaeNeighborhoodAttention that runs on every device, compiler or not."""

    def __call__(
        self, attn: LTX2VideoVaeNeighborhoodAttention, hidden_states: Tensor, block_mask: None = None
    ) -> Tensor:
        """Attends over hidden states (B, T, H, W, channels); takes no mask, the window says it all."""
        query, key, value = attn.project_qkv(hidden_states)
        attended = neighborhood_attention(query, key, value, attn.kernel_size)
        return attn.to_out[0](attended.flatten(4))


def neighborhood_attention(query: Tensor, key: Tensor, value: Tensor, window: Window) -> Tensor:
    """Attends from each token of (B, T, H, W, N, D) to the window around it; the query comes already scaled.

    A side of the grid that is shorter than the window's makes the window as short.
    """
    grid = query.shape[1:4]
    times, rows = (list(_blocks(length, side)) for length, side in zip(grid[:2], window[:2], strict=True))
    keys_each = times[0].keys * rows[0].keys * min(BLOCK + window[2], grid[2]) * prod(key.shape[4:])
    result = torch.empty_like(value)
    for columns in _columns(grid[2], window[2], max(1, MAX_GATHERED // keys_each), query.device):
        shape, bias = None, None
        for time, row in product(times, rows):
            if shape != (time.shape, row.shape):  # blocks away from the borders all look alike
                shape, bias = (time.shape, row.shape), _bias(time, row, columns, query)
            queries = (slice(None), time.own, row.own)
            attended = _attend(query[queries], key[_keys(time, row)], value[_keys(time, row)], columns, bias)
            result[(*queries, slice(columns.start, columns.stop))] = attended
    return result


@dataclass(frozen=True)
class _Block:
    """Neighbouring queries of one axis, and the keys that any of them needs."""

    start: int
    stop: int
    first_key: int
    keys: int
    visible: Tensor  # (queries, keys), bool

    @property
    def own(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Decides what the queries see: blocks of one shape on one axis have equal masks."""
        return self.stop - self.start, self.start - self.first_key, self.keys


@dataclass(frozen=True)
class _Columns:
    """Several equally large blocks of the last axis, side by side."""

    start: int
    stop: int
    keys: Tensor  # (blocks, keys) positions
    visible: Tensor  # (blocks, queries, keys), bool


def _blocks(length: int, side: int) -> Iterator[_Block]:
    """Cuts an axis into blocks of BLOCK queries, the last one shorter."""
    side = min(side, length)
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        keys = min(stop - start + side - 1, length)
        first_key = min(max(start - side // 2, 0), length - keys)
        positions = torch.arange(first_key, first_key + keys)
        window = (torch.arange(start, stop) - side // 2).clamp(0, length - side)[:, None]
        visible = (positions >= window) & (positions < window + side)
        yield _Block(start, stop, first_key, keys, visible)


def _columns(length: int, side: int, most: int, device: torch.device) -> Iterator[_Columns]:
    """Puts blocks of the last axis together, at most `most`, so that each call of the attention has much to do."""
    blocks = list(_blocks(length, side))
    while blocks:
        size = blocks[0].stop - blocks[0].start
        group = [block for block in blocks[:most] if block.stop - block.start == size]
        blocks = blocks[len(group) :]
        first = torch.tensor([block.first_key for block in group])
        keys = (first[:, None] + torch.arange(group[0].keys)).to(device)
        yield _Columns(group[0].start, group[-1].stop, keys, torch.stack([block.visible for block in group]))


def _keys(time: _Block, row: _Block) -> tuple[slice, slice, slice]:
    return (slice(None), *(slice(block.first_key, block.first_key + block.keys) for block in (time, row)))


def _attend(query: Tensor, key: Tensor, value: Tensor, columns: _Columns, bias: Tensor) -> Tensor:
    """Attends from the blocks of one stripe (B, T, H, W, N, D); returns (B, T, H, the columns' W, N, D)."""
    batch, num_times, num_rows, _, heads, width = query.shape
    num_blocks, block_width, _ = columns.visible.shape
    own = query[:, :, :, columns.start : columns.stop].unflatten(3, (num_blocks, block_width))
    # key, value: (B, T, H, n, W, N, D); all three to (B * n, N, tokens, D)
    q, k, v = (
        tensor.permute(0, 3, 5, 1, 2, 4, 6).flatten(0, 1).flatten(2, 4)
        for tensor in (own, key[:, :, :, columns.keys], value[:, :, :, columns.keys])
    )
    attended = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
    attended = attended.view(batch, num_blocks, heads, num_times, num_rows, block_width, width)
    return attended.permute(0, 3, 4, 1, 5, 2, 6).flatten(3, 4)


def _bias(time: _Block, row: _Block, columns: _Columns, query: Tensor) -> Tensor:
    """Gives what is added to the scores so that each query sees its own window: (B * n, 1, q, k), 0 or -inf."""
    times, rows, last = (visible.to(query.device) for visible in (time.visible, row.visible, columns.visible))
    seen = (
        times[None, :, None, None, :, None, None]
        & rows[None, None, :, None, None, :, None]
        & last[:, None, None, :, None, None, :]
    )
    hidden = ~seen.flatten(1, 3).flatten(2, 4)[:, None]  # (n, 1, q, k)
    bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
    return bias.repeat(query.shape[0], 1, 1, 1) if query.shape[0] > 1 else bias
