"""Weights kept as a file holds them and turned into the compute dtype each time a layer reads them.

Used for quantised weights everywhere, and on the CPU for every large weight of another dtype than the compute dtype:
what is not copied stays a view of the mapped file, whose pages all workers of a machine share.

torch's parametrisations would do the same, but they make a class per layer, for each of which torch.compile compiles
a block anew. Here one class per kind of layer takes the place of torch's.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..weights.quantized import Quantization
from ..weights.quantized_numbers import dequantize_fp8, dequantize_nvfp4, quantize_fp8

MIN_SHARED_NUMEL = 1 << 14  # below this a converted copy costs a worker less than 64 KiB


@dataclass(frozen=True)
class FileWeight:
    """One weight as a file holds it, and what a layer is to make of it.

    Attributes:
        stored: the file's tensor, a view of the mapped file.
        dtype: what the layer computes in.
        shape: what the layer sees.
        quantization: how `stored` is quantised; None for a float weight.
        scale, second_scale: the file's tensors that undo the quantisation, see weights.quantized.
        is_rounded: whether the layer is to see the weight rounded to fp8 (e4m3, without a scale).
    """

    stored: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    quantization: Quantization | None = None
    scale: Tensor | None = None
    second_scale: Tensor | None = None
    is_rounded: bool = False

    @property
    def kind(self) -> str | None:
        """The quantised format, None for a float weight."""
        return None if self.quantization is None else self.quantization.kind

    def weight(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """Returns the weight as the layer sees it, in its compute dtype or another, on the stored's device or another.

        It may be the file's own tensor: do not write into it.
        """
        there = self if device is None else self.on(device)
        return self._encoding(dtype or self.dtype).decode(*there._tensors())

    def on(self, device: torch.device) -> "FileWeight":
        """Returns the same weight with its tensors on a device."""
        tensors = (None if tensor is None else tensor.to(device) for tensor in (self.stored, *self.scales))
        return replace(self, **dict(zip(("stored", "scale", "second_scale"), tensors, strict=True)))

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        """The tensors that undo the quantisation."""
        return self.scale, self.second_scale

    def fused(self, weight: Tensor) -> "FileWeight":
        """Returns another weight of the same layer, kept as precisely as the file keeps its own.

        fp8 stays fp8, scaled fp8 with one scale made anew; nvfp4 becomes bfloat16; floats take the file's dtype.
        """
        plain = replace(self, quantization=None, scale=None, second_scale=None)
        if self.quantization is None:
            return replace(plain, stored=weight.to(self.stored.dtype))
        if self.kind == "nvfp4":
            return replace(plain, stored=weight.to(torch.bfloat16))
        stored, scale = quantize_fp8(weight, self.stored.dtype, scaled=self.kind == "fp8 scaled")
        return replace(plain, stored=stored, scale=scale, quantization=Quantization(self.kind, self.shape))

    def install(self, layer: nn.Module, device: torch.device) -> None:
        """Makes this a layer's weight, on a device: kept as stored where that is asked for, else converted."""
        if not self._is_kept(layer, device):
            layer.weight = nn.Parameter(self.weight(device=device), requires_grad=False)
            return
        if not isinstance(layer, StoredWeight):
            del layer.weight
            layer.__class__ = _STORED[type(layer)]
        stored, *scales = self.on(device)._tensors()
        if self.is_rounded and device.type != "cpu":  # on the CPU the file's pages stay shared, rounded at use
            stored = _rounded(stored)
        layer.encoding = self._encoding(self.dtype)
        for name, tensor in zip(("stored", "stored_scale", "stored_second_scale"), (stored, *scales), strict=True):
            layer.register_buffer(name, tensor)

    def _is_kept(self, layer: nn.Module, device: torch.device) -> bool:
        if isinstance(layer, StoredWeight):
            return True
        if type(layer) not in _STORED:
            return False
        if self.quantization is not None or self.is_rounded:
            return True
        return device.type == "cpu" and self.stored.dtype != self.dtype and self.stored.numel() >= MIN_SHARED_NUMEL

    def _tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the stored tensor and its scales, the float ones with as many axes as the weight."""
        scale, second = self.scale, self.second_scale
        ones = (1,) * (len(self.shape) - 1)
        if scale is not None and self.kind != "nvfp4":
            scale = scale.float().reshape(-1, *ones)
        return self.stored, scale, None if second is None else second.float().reshape(1)

    def _encoding(self, dtype: torch.dtype) -> "Encoding":
        transposed = self.quantization is not None and self.quantization.is_transposed(self.shape)
        return Encoding(self.kind, dtype, self.shape, transposed, self.is_rounded)


@dataclass(frozen=True)
class Encoding:
    """How a layer's stored tensors become its weight; alike for alike layers, which torch.compile relies on."""

    kind: str | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_transposed: bool = False
    is_rounded: bool = False

    def decode(self, stored: Tensor, scale: Tensor | None, second_scale: Tensor | None) -> Tensor:
        """Returns the weight; it is `stored` itself where nothing is to be done."""
        if self.kind == "nvfp4":
            return dequantize_nvfp4(stored, scale, second_scale, self.dtype, self.shape)
        if self.kind is not None:
            return dequantize_fp8(stored, scale, self.dtype, transposed=self.is_transposed)
        return (_rounded(stored) if self.is_rounded else stored).to(self.dtype)


class StoredWeight:
    """Mixed into a layer class: `weight` is made of the layer's buffers each time it is read, and not kept."""

    encoding: Encoding
    stored: Tensor
    stored_scale: Tensor | None
    stored_second_scale: Tensor | None

    @property
    def weight(self) -> Tensor:
        """The weight in the compute dtype, a new tensor."""
        return self.encoding.decode(self.stored, self.stored_scale, self.stored_second_scale)


class StoredLinear(StoredWeight, nn.Linear):
    """A linear layer with a stored weight."""


class StoredConv1d(StoredWeight, nn.Conv1d):
    """A convolution over time with a stored weight."""


class StoredConv2d(StoredWeight, nn.Conv2d):
    """A convolution over a picture with a stored weight."""


class StoredConv3d(StoredWeight, nn.Conv3d):
    """A convolution over a clip with a stored weight."""


class StoredConvTranspose1d(StoredWeight, nn.ConvTranspose1d):
    """An upsampling convolution over time with a stored weight."""


_STORED: dict[type, type] = {
    nn.Linear: StoredLinear,
    nn.Conv1d: StoredConv1d,
    nn.Conv2d: StoredConv2d,
    nn.Conv3d: StoredConv3d,
    nn.ConvTranspose1d: StoredConvTranspose1d,
}
REPLACEABLE = tuple(_STORED)  # layers whose weight can be kept as stored, and replaced


def original(layer: nn.Module) -> FileWeight:
    """Returns the weight that the file holds for a layer, whatever has replaced it since."""
    held = layer.__dict__.get("file_weight")
    if held is None:  # a layer that no builder filled
        held = layer.file_weight = FileWeight(layer.weight.detach(), layer.weight.dtype, tuple(layer.weight.shape))
    return held


def replace_weight(layer: nn.Module, weight: Tensor | None) -> None:
    """Gives a layer another weight (out, in), kept as precisely as the file keeps its own; None restores the file's.

    What the layer computes with depends on the file's tensors and `weight` alone, never on earlier replacements.
    """
    own = original(layer)
    assert weight is None or tuple(weight.shape) == own.shape, f"a weight {tuple(weight.shape)} for {own.shape}"
    (own if weight is None else own.fused(weight)).install(layer, _device(layer))


def compute_dtype(module: nn.Module) -> torch.dtype:
    """Returns the dtype a module computes in, whatever its weights are stored in."""
    for layer in module.modules():
        if isinstance(layer, StoredWeight):
            return layer.encoding.dtype
        for parameter in layer.parameters(recurse=False):
            if parameter.is_floating_point():
                return parameter.dtype
    raise ValueError(f"{type(module).__name__} has no weights, and so no dtype.")


def _rounded(weight: Tensor) -> Tensor:
    """Rounds to fp8 as the official fp8-cast does."""
    return weight if weight.dtype == torch.float8_e4m3fn else quantize_fp8(weight, torch.float8_e4m3fn, scaled=False)[0]


def _device(layer: nn.Module) -> torch.device:
    return layer.stored.device if isinstance(layer, StoredWeight) else layer.weight.device
