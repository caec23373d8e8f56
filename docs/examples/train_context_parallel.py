"""Trains a two-block transformer with its sequence spread over two processes, and whole, and compares the losses.

    python docs/examples/train_context_parallel.py

Runs on the CPU in seconds. Prints the loss of each step of both; exits with 1 if they differ by more than 1e-6.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this pack is not installed

from mgpu_runtime.exchange.context_parallel import (
    apply_ulysses_attention,
    destroy_context_parallel,
    gather_cp_outputs,
    get_cp_group,
    initialize_context_parallel,
    is_cp_enabled,
    pad_to_cp_divisible,
    prepare_cp_inputs,
    scatter_sequence,
    warmup_context_parallel,
)

WIDTH, HEADS, TOKENS, STEPS = 48, 6, 61, 8  # 61 tokens do not divide: one is padded
TOLERANCE = 1e-6


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None) -> Tensor:
    """Attends over (B, S, heads * D); `mask` is (B, S), true where a key is real."""
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    mask = None if mask is None else mask[:, None, None]
    return scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Self-attention and a feed-forward layer; only the attention looks beyond its own token."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(apply_ulysses_attention(q, k, v, HEADS, attention, mask))
        return x + self.feed_forward(self.norms[1](x))


def train() -> list[float]:
    """Returns the loss of each step. The same code runs whole and spread."""
    torch.manual_seed(0)  # every rank makes the same weights and draws the same batches
    blocks = nn.ModuleList([Block(), Block()]).double()
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        video, target = torch.randn(2, 1, TOKENS, WIDTH, dtype=torch.float64)
        x, _, _, _, lengths = prepare_cp_inputs(video)
        real, _ = pad_to_cp_divisible(torch.ones(1, TOKENS, dtype=torch.bool))  # the padding's zeros mask its keys
        mask = scatter_sequence(real)
        for block in blocks:
            x = block(x, mask)
        output, _ = gather_cp_outputs(x, metadata=lengths)
        loss = mse_loss(output, target)  # every rank computes the same
        optimizer.zero_grad()
        loss.backward()
        if is_cp_enabled():
            for parameter in blocks.parameters():  # each rank has the part of its own tokens: sum, do not average
                dist.all_reduce(parameter.grad, group=get_cp_group())
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_rank(rank: int, world_size: int, folder: str) -> None:
    """Trains with the sequence spread over all ranks; the first writes down its losses."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    initialize_context_parallel(cp_size=world_size)
    warmup_context_parallel(WIDTH, HEADS, TOKENS)
    losses = train()
    destroy_context_parallel()
    dist.destroy_process_group()
    if rank == 0:
        torch.save(losses, f"{folder}/losses.pt")


def main() -> int:
    whole = train()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train_rank, (2, folder), nprocs=2)
        spread = torch.load(f"{folder}/losses.pt")
    print("step  loss, 1 process  loss, 2 processes")
    for step, (one, two) in enumerate(zip(whole, spread, strict=True)):
        print(f"{step:4}  {one:15.12f}  {two:17.12f}")
    worst = max(abs(one - two) for one, two in zip(whole, spread, strict=True))
    print(f"largest difference {worst:.1e} ({'the same' if worst <= TOLERANCE else 'NOT the same'})")
    return 0 if worst <= TOLERANCE and whole[-1] < whole[0] else 1


if __name__ == "__main__":
    raise SystemExit(main())
