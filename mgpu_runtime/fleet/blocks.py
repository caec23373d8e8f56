"""Tensors as raw bytes in a block of anonymous memory whose descriptor is passed along.

A memfd has no name in /dev/shm, so nothing can stay behind, and no container's limit on /dev/shm applies.
"""

import math
import os
from contextlib import ExitStack

import torch

_ALIGN = 64
_NAME = "mgpu-tensors"

TensorSpec = list  # [dtype name, shape, byte offset], as it stands in JSON


def write_block(tensors: list[torch.Tensor]) -> tuple[list[TensorSpec], int | None]:
    """Copies tensors of any device and layout into a new block; returns their specs and the block's descriptor.

    There is no block (None) when the tensors hold no bytes. Raises ValueError for tensors without plain storage.
    """
    specs, size = [], 0
    for tensor in tensors:
        _check_plain(tensor)
        specs.append([str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size])
        size += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    if size == 0:
        return specs, None
    block = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    with ExitStack() as failure:
        failure.callback(os.close, block)
        os.ftruncate(block, size)
        storage = _map(block, size, shared=True)
        with torch.inference_mode(False), torch.no_grad():
            for tensor, spec in zip(tensors, specs, strict=True):
                _view(storage, spec).copy_(tensor)
        failure.pop_all()
    return specs, block


def read_block(specs: list[TensorSpec], block: int | None) -> list[torch.Tensor]:
    """Returns ordinary CPU tensors, each with memory of its own, also within inference mode; closes the block."""
    # The copy is what makes them ordinary: a mapping would be shared between tensors, or hold a descriptor each.
    with torch.inference_mode(False):
        if block is None:
            return [torch.empty(shape, dtype=_dtype(name)) for name, shape, _ in specs]
        try:
            storage = _map(block, os.fstat(block).st_size, shared=False)
        finally:
            os.close(block)
        return [_view(storage, spec).clone() for spec in specs]


def _map(block: int, size: int, *, shared: bool) -> torch.UntypedStorage:
    return torch.UntypedStorage.from_file(f"/proc/self/fd/{block}", shared, size)


def _view(storage: torch.UntypedStorage, spec: TensorSpec) -> torch.Tensor:
    name, shape, offset = spec
    empty = torch.empty(0, dtype=_dtype(name))
    if math.prod(shape) == 0:
        return empty.reshape(shape)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return empty.set_(storage, offset // empty.element_size(), shape, strides)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def _check_plain(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ValueError(
            f"A {tensor.layout} tensor of {tensor.dtype} on {tensor.device} cannot be sent to or from a worker; "
            "send a dense tensor that holds values."
        )
