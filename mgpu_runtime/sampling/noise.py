"""Seeded noise, drawn on the CPU for the whole latent so that every world size sees the same numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor

_SEEDS = 1 << 64


def item_generators(seed: int, batch: int) -> list[torch.Generator]:
    """Makes one CPU generator per batch item; item k has seed + k, so it equals that item run alone with that seed."""
    return [torch.Generator("cpu").manual_seed((seed + item) % _SEEDS) for item in range(batch)]


def draw_noise(generators: Sequence[torch.Generator], shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Draws standard normal noise (B, T, C) float32 for each (T, C), in the order given, from each item's generator.

    Give the video's shape before the audio's, with the real tokens only. Calling again with the same generators goes
    on in their streams, as a second stage without a seed of its own does.
    """
    items = [[torch.randn((1, *shape), generator=generator) for shape in shapes] for generator in generators]
    return [torch.cat(stream) for stream in zip(*items, strict=True)]
