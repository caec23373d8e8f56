"""Fills a module made on the meta device with mapped weights, strictly and without a second copy."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

Shapes = Mapping[str, tuple[int, ...]]
NUM_NAMED = 4  # names shown per kind of mismatch
STATISTICS = ("latents_mean", "latents_std")


class WeightTracker(Protocol):
    """Is told of each module that a builder has filled."""

    def track(self, module: nn.Module, component: str, path: str) -> None:
        """Takes note of a module just built from a component of a file."""
        ...


def check_shapes(module: nn.Module, given: Shapes, what: str) -> None:
    """Raises one ValueError naming missing, unexpected and misshaped tensors; `what` names component and file."""
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    problems = []
    for title, names in (("missing", expected.keys() - given.keys()), ("unexpected", given.keys() - expected.keys())):
        if names:
            problems.append(f"{len(names)} {title} ({_some(sorted(names))})")
    misshaped = sorted(name for name in expected.keys() & given.keys() if expected[name] != tuple(given[name]))
    if misshaped:
        shown = [f"{name}: file {list(given[name])}, model {list(expected[name])}" for name in misshaped]
        problems.append(f"{len(misshaped)} of another shape ({_some(shown)})")
    if problems:
        raise ValueError(
            f"The {what} does not fit its own config, tensors: {'; '.join(problems)}. "
            "The file is of a generation this program does not know, or it was changed."
        )


def fill(
    module: nn.Module, state: Mapping[str, Tensor], *, device: torch.device, dtype: torch.dtype, what: str
) -> nn.Module:
    """Assigns `state` to `module`, in `dtype` on `device`, frozen and in evaluation mode.

    A tensor that needs no change is assigned as it is and stays a view of the mapped file; others are converted one at
    a time. Buffers that make latent statistics stay float32: they undo and redo a normalisation of float32 latents.
    """
    check_shapes(module, {name: tuple(tensor.shape) for name, tensor in state.items()}, what)
    converted = {name: _convert(name, tensor, device, dtype) for name, tensor in state.items()}
    module.load_state_dict(converted, strict=True, assign=True)
    module.to(device=device)  # buffers that are in no file
    left = [name for name, tensor in _all_tensors(module) if tensor.is_meta]
    assert not left, f"still empty after loading: {_some(left)}"
    return module.requires_grad_(False).eval()


def _convert(name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if name in STATISTICS:
        dtype = torch.float32
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)


def _all_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _some(names: list[str]) -> str:
    """Joins the first few names."""
    return ", ".join(names[:NUM_NAMED]) + (", ..." if len(names) > NUM_NAMED else "")
