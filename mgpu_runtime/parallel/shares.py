"""How the tokens of one sequence are dealt to the ranks."""

from dataclasses import dataclass

import torch

from ..exchange.layout import deal, starts

# Vectorised CPU loops treat the last elements of a buffer with scalar code that may round differently. Shares of whole
# multiples of this many rows keep real tokens out of that tail, whatever the world size.
CPU_ROWS = 32


@dataclass(frozen=True)
class Shares:
    """What each rank holds of a sequence, by rank.

    Attributes:
        rows: rows of a rank's tensors; at least one, so that every rank does the same work.
        tokens: real tokens among them, from the first row on; they add up to the sequence's. The rows behind are
            padding, which only the ranks at the end have. It never travels, so no token sees it.
        first: number of a rank's first row in the whole sequence.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    first: tuple[int, ...]

    @classmethod
    def of(cls, num_tokens: int, world_size: int, device: torch.device) -> "Shares":
        """Deals `num_tokens` tokens: on a GPU one by one, on the CPU in units of CPU_ROWS rows."""
        unit = CPU_ROWS if device.type == "cpu" else 1
        num_units = max(-(-num_tokens // unit), world_size)
        rows = tuple(units * unit for units in deal(num_units, world_size))
        first = starts(rows)
        tokens = tuple(min(max(num_tokens - start, 0), held) for start, held in zip(first, rows, strict=True))
        return cls(rows, tokens, first)
