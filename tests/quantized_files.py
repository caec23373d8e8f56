"""Writes quantised checkpoints for tests, in the dialects of Lightricks and ComfyUI, from the tiny 2.3-style one."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mgpu_runtime.weights.quantized_numbers import quantize_fp8
from tests.weights_files import TINY_23, read_all

PREFIX = "model.diffusion_model."
E4M3 = torch.float8_e4m3fn
QUANTIZED = tuple(  # what Lightricks' fp8 files hold in 8 bit: the blocks' projections and both feed-forwards
    f"{part}.weight" for part in (".to_q", ".to_k", ".to_v", ".to_out.0", "ff.net.0.proj", "ff.net.2")
)

Tensors = dict[str, Tensor]
Dialect = Callable[[str, Tensor, Tensor], Tensors]  # (layer, fp8 weight, scale ()) -> the file's tensors of the layer


def transformer_tensors() -> tuple[Tensors, dict[str, str]]:
    """Returns the tiny transformer's tensors in float32 by the file's names, and the file's metadata."""
    tensors, metadata = read_all(TINY_23)
    return {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}, metadata


def is_quantized(name: str) -> bool:
    """Tells a weight that published fp8 files hold in 8 bit."""
    return ".transformer_blocks." in name and name.endswith(QUANTIZED)


def lightricks(layer: str, weight: Tensor, scale: Tensor) -> Tensors:
    """As published: scalar scales."""
    return {f"{layer}.weight": weight, f"{layer}.weight_scale": scale, f"{layer}.input_scale": torch.tensor(0.05)}


def older_comfyui(layer: str, weight: Tensor, scale: Tensor) -> Tensors:
    """Scales of one element under other names; the marker of the whole file is the caller's."""
    return {
        f"{layer}.weight": weight,
        f"{layer}.scale_weight": scale.reshape(1),
        f"{layer}.scale_input": torch.ones(1),
    }


def newer_comfyui(layer: str, weight: Tensor, scale: Tensor) -> Tensors:
    """A marker of JSON bytes beside each weight."""
    marker = json.dumps({"format": "float8_e4m3fn"}).encode()
    return {**lightricks(layer, weight, scale), f"{layer}.comfy_quant": torch.tensor(list(marker), dtype=torch.uint8)}


def one_scale_a_row(layer: str, weight: Tensor, scale: Tensor) -> Tensors:
    """Scales (out, 1)."""
    return {f"{layer}.weight": weight, f"{layer}.weight_scale": scale.expand(len(weight), 1).contiguous()}


def one_scale_a_row_flat(layer: str, weight: Tensor, scale: Tensor) -> Tensors:
    """Scales (out,)."""
    return {f"{layer}.weight": weight, f"{layer}.weight_scale": scale.expand(len(weight)).contiguous()}


def stored_transposed(layer: str, weight: Tensor, scale: Tensor) -> Tensors:
    """Matrices that are not square as (in, out)."""
    turned = weight if weight.shape[0] == weight.shape[1] else weight.t().contiguous()
    return lightricks(layer, turned, scale)


def unscaled(layer: str, weight: Tensor, scale: Tensor) -> Tensors:
    """The weight alone."""
    return {f"{layer}.weight": weight}


DIALECTS: tuple[Dialect, ...] = (
    lightricks,
    older_comfyui,
    newer_comfyui,
    one_scale_a_row,
    one_scale_a_row_flat,
    stored_transposed,
)


def fp8_tensors(dialect: Dialect) -> tuple[Tensors, dict[str, str]]:
    """Returns the tiny transformer with its big weights in e4m3, the way `dialect` writes them, and its metadata."""
    wide, metadata = transformer_tensors()
    tensors: Tensors = {}
    for name, tensor in wide.items():
        if is_quantized(name):
            weight, scale = quantize_fp8(tensor, E4M3)
            tensors |= dialect(name.removesuffix(".weight"), weight, scale.reshape(()))
        else:
            tensors[name] = tensor
    if dialect is older_comfyui:
        tensors[f"{PREFIX}scaled_fp8"] = torch.empty(0, dtype=E4M3)
    return tensors, metadata


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
    """Writes a checkpoint."""
    save_file(dict(tensors), path, metadata=dict(metadata))
    return path


def write_fp8(path: Path, dialect: Dialect = lightricks) -> Path:
    """Writes the tiny transformer as an fp8 file."""
    return write(path, *fp8_tensors(dialect))


def pack_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns packed weight, tiled block scales and second scale of a matrix, number by number as the format says."""
    rows, columns = weight.shape
    second = weight.abs().max() / (448 * 6)
    blocks = weight.view(rows, columns // 16, 16)
    scales = (blocks.abs().amax(2) / 6 / second).to(E4M3)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    wanted = blocks / (scales.float()[..., None] * second).clamp(min=1e-30)
    codes = (wanted[..., None] - values).abs().argmin(-1).view(rows, columns)
    packed = (codes[:, 0::2] * 16 + codes[:, 1::2]).to(torch.uint8)
    return packed, tile_scales(scales), second


def tile_scales(scales: Tensor) -> Tensor:
    """Lays block scales out in cuBLAS's 128 x 4 tiles, entry by entry from the manual's offset formula."""
    rows, columns = scales.shape
    down, across = -(-rows // 128), -(-columns // 4)
    tiled = torch.zeros(down * across * 512, dtype=torch.uint8)
    raw = scales.contiguous().view(torch.uint8)
    for row in range(rows):
        for column in range(columns):
            tile = (row // 128) * across + column // 4
            tiled[tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4] = raw[row, column]
    return tiled.view(scales.dtype).view(down * 128, across * 4)
