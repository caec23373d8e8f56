"""Fuses LoRAs into the weights of a built module, and takes them out again without a trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn

from ..weights.lora_targets import LoRAMatch
from ..weights.quantized_numbers import is_finite
from .stored import compute_dtype, original, replace_weight

# How a sum is rounded, see fused_weight.
Rule = Literal["float32", "bf16", "bf16 delta"]


@dataclass(frozen=True)
class LoRADelta:
    """One LoRA's change of one linear layer: factor * up (out, rank) @ down (rank, in)."""

    down: Tensor
    up: Tensor
    factor: float


Deltas = Mapping[str, Sequence[LoRADelta]]  # module name -> its changes, in the order of the LoRAs


def read_deltas(matches: Sequence[tuple[LoRAMatch, float]], component: str) -> dict[str, list[LoRADelta]]:
    """Maps the matrices of some LoRAs, each with its strength, for one component; checks every number of them.

    Raises ValueError naming file and tensor where one is not finite.
    """
    deltas: dict[str, list[LoRADelta]] = {}
    for match, strength in matches:
        pairs = match.pairs.get(component, {})
        tensors = match.file.read(name for pair in pairs.values() for name in (pair.down, pair.up))
        for name, tensor in tensors.items():
            if not is_finite(tensor):
                raise ValueError(
                    f"{match.file.path} is damaged: {name!r} holds values that are not finite. Nothing of it was "
                    "applied; download it again."
                )
        for module, pair in pairs.items():
            delta = LoRADelta(tensors[pair.down], tensors[pair.up], strength * match.file.factor(pair))
            deltas.setdefault(module, []).append(delta)
    return deltas


def fused_weight(weight: Tensor, deltas: Sequence[LoRADelta], rule: Rule) -> Tensor:
    """Returns weight + the sum of its changes as a new float32 tensor, on the weight's device.

    "float32" computes everything in float32. "bf16" is the official rule: matrices, products and their sum are rounded
    to bfloat16, and so is what comes of adding the weight, whatever the weight's dtype. "bf16 delta" does not round
    that last sum, as the official code does not where a scaled fp8 weight is quantised anew.
    """
    if rule == "float32":
        fused = weight.to(torch.float32, copy=True)
        for delta in deltas:
            up, down = (half.to(weight.device).float() for half in (delta.up, delta.down))
            fused.addmm_(up, down, alpha=delta.factor)
        return fused
    change = _bf16_delta(deltas, weight.device)
    return change.add_(weight).float() if rule == "bf16" else change.float().add_(weight)


def _bf16_delta(deltas: Sequence[LoRADelta], device: torch.device) -> Tensor:
    """Sums the products; each is rounded to bfloat16, and their sum once more."""
    products = []
    for delta in deltas:
        up, down = (half.to(device).to(torch.bfloat16) for half in (delta.up, delta.down))
        products.append((up * delta.factor) @ down)
    return products[0] if len(products) == 1 else torch.stack(products).float().sum(0).to(torch.bfloat16)


class LoRAFuser:
    """Keeps a module's weights fused with one set of LoRAs at a time.

    Every weight is made from the file's own tensor, never from an earlier fused one: however often sets are changed,
    the weights are those of a fresh load with the last set. Only layers that a LoRA changes get weights of their own.
    """

    def __init__(self, module: nn.Module, *, rule: Rule | None = None) -> None:
        """Takes a module as its builder filled it.

        `rule` None is the official one for a module that computes in bfloat16, and float32 for any other.
        """
        self.module = module
        self._rule: Rule = rule or ("bf16" if compute_dtype(module) == torch.bfloat16 else "float32")
        self._device = next(chain(module.parameters(), module.buffers())).device
        self._touched: set[str] = set()

    @property
    def touched(self) -> frozenset[str]:
        """The layers whose weight is, or may be, another than the file's."""
        return frozenset(self._touched)

    def fuse(self, deltas: Deltas) -> None:
        """Makes the module's weights those of the file plus these changes, and no others.

        What is interrupted may leave some layers fused and some not; the next call puts all of them right.
        Raises ValueError, with nothing changed, for a layer that the module lacks or that has another shape.
        """
        layers = dict(self.module.named_modules())
        for name, changes in deltas.items():
            _check(name, layers.get(name), changes)
        for name in sorted(self._touched - deltas.keys()):
            replace_weight(layers[name], None)
            self._touched.discard(name)
        for name, changes in deltas.items():
            self._touched.add(name)
            self._change(layers[name], changes)

    def _change(self, layer: nn.Module, changes: Sequence[LoRADelta]) -> None:
        own = original(layer)
        rule = "bf16 delta" if self._rule == "bf16" and own.kind == "fp8 scaled" else self._rule
        replace_weight(layer, fused_weight(own.weight(torch.float32, self._device), changes, rule))


def _check(name: str, layer: nn.Module | None, changes: Sequence[LoRADelta]) -> None:
    expected = (layer.out_features, layer.in_features) if isinstance(layer, nn.Linear) else None
    for delta in changes:
        shape = (delta.up.shape[0], delta.down.shape[1])
        if shape != expected:
            raise ValueError(
                f"A LoRA changes {name!r} by a {list(shape)} matrix, but the model has "
                f"{'no linear layer' if expected is None else list(expected)} there."
            )
