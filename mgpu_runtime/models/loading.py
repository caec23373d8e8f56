"""Fills a module made on the meta device with mapped weights, strictly and without a second copy."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from ..weights.quantized import Quantization, is_companion
from ..weights.quantized_numbers import is_finite
from .stored import REPLACEABLE, FileWeight

Shapes = Mapping[str, tuple[int, ...]]
Quantizations = Mapping[str, Quantization]
NUM_NAMED = 4  # names shown per kind of mismatch
STATISTICS = ("latents_mean", "latents_std")


class WeightTracker(Protocol):
    """Is told of each module that a builder has filled."""

    def track(self, module: nn.Module, component: str, path: str) -> None:
        """Takes note of a module just built from a component of a file."""
        ...


def check_shapes(module: nn.Module, given: Shapes, what: str, quantized: Quantizations | None = None) -> None:
    """Raises one ValueError naming missing, unexpected and misshaped tensors; `what` names component and file.

    Scales and markers are no tensors of the module; `quantized` says which tensors a file holds in another shape.
    """
    expected, quantized = _expected(module), quantized or {}
    given = {name: shape for name, shape in given.items() if not is_companion(name)}
    for name in expected.keys() & quantized.keys():
        given[name] = quantized[name].shape_for(expected[name])
    problems = []
    for title, names in (("missing", expected.keys() - given.keys()), ("unexpected", given.keys() - expected.keys())):
        if names:
            problems.append(f"{len(names)} {title} ({_some(sorted(names))})")
    misshaped = sorted(name for name in expected.keys() & given.keys() if expected[name] != tuple(given[name]))
    if misshaped:
        shown = [f"{name}: file {list(given[name])}, model {list(expected[name])}" for name in misshaped]
        problems.append(f"{len(misshaped)} of another shape ({_some(shown)})")
    unscalable = sorted(name for name, way in quantized.items() if not way.has_scales_for(expected.get(name, (0,))))
    if unscalable and not problems:
        shown = [f"{quantized[name].scale}: {quantized[name].num_scales} numbers" for name in unscalable]
        problems.append(f"{len(unscalable)} scales that are neither one nor one a row ({_some(shown)})")
    if problems:
        raise ValueError(
            f"The {what} does not fit its own config, tensors: {'; '.join(problems)}. "
            "The file is of a generation this program does not know, or it was changed."
        )


def fill(
    module: nn.Module,
    state: Mapping[str, Tensor],
    *,
    device: torch.device,
    dtype: torch.dtype,
    what: str,
    quantized: Quantizations | None = None,
    is_rounded: Callable[[str], bool] = lambda name: False,
) -> nn.Module:
    """Makes `state` the tensors of `module`, computing in `dtype` on `device`, frozen and in evaluation mode.

    One tensor at a time. A tensor that needs no change stays a view of the mapped file, and so do the weights of layers
    that are quantised or, on the CPU, large and of another dtype: those are turned into `dtype` at use. The tensors
    that `is_rounded` names are rounded to fp8. Buffers that make latent statistics stay float32: they undo and redo a
    normalisation of float32 latents. Raises ValueError naming the tensor where a number is not finite.
    """
    quantized = quantized or {}
    check_shapes(module, {name: tuple(tensor.shape) for name, tensor in state.items()}, what, quantized)
    for name, shape in _expected(module).items():
        weight = _file_weight(name, state, dtype, shape, quantized.get(name), is_rounded(name))
        here = weight.on(device)  # checked there, and moved but once
        _check_finite(name, here, what)
        _assign(module, name, weight, here)
    module.to(device=device)  # buffers that are in no file
    left = [name for name, tensor in _all_tensors(module) if tensor.is_meta]
    assert not left, f"still empty after loading: {_some(left)}"
    return module.requires_grad_(False).eval()


def _file_weight(
    name: str,
    state: Mapping[str, Tensor],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    quantization: Quantization | None,
    is_rounded: bool,
) -> FileWeight:
    if name.rsplit(".", 1)[-1] in STATISTICS:
        dtype = torch.float32
    scale = quantization and quantization.scale and state[quantization.scale]
    second = quantization and quantization.second_scale and state[quantization.second_scale]
    return FileWeight(state[name], dtype, shape, quantization, scale, second, is_rounded and quantization is None)


def _check_finite(name: str, weight: FileWeight, what: str) -> None:
    """Raises ValueError where a tensor holds an infinite value or none; reads what the first use would read anyway."""
    for tensor in (weight.stored, *weight.scales):
        if tensor is not None and not is_finite(tensor):
            raise ValueError(
                f"The {what} is damaged: {name!r} holds numbers that are not finite. Download the file again, or "
                "choose another one."
            )


def _assign(module: nn.Module, name: str, weight: FileWeight, here: FileWeight) -> None:
    """Puts a tensor where the module has an empty one; `here` is `weight` on the module's device."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf == "weight" and isinstance(owner, REPLACEABLE):
        owner.file_weight = weight
        here.install(owner, here.stored.device)
        return
    tensor = here.weight()
    setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False) if leaf in owner._parameters else tensor)


def _expected(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _all_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _some(names: list[str]) -> str:
    """Joins the first few names."""
    return ", ".join(names[:NUM_NAMED]) + (", ..." if len(names) > NUM_NAMED else "")
