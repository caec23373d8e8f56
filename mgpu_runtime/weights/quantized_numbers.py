"""The arithmetic of quantised weights: from fp8 and nvfp4 to a compute dtype, and from there to fp8.

Own code, because diffusers' layerwise casting knows no scale and copies what it casts, torchao packs fp4 the other way
round, and comfy-kitchen rounds scales to the compute dtype; none of them keeps a weight as a view of the file.
"""

import torch
from torch import Tensor

FP4_BLOCK = 16  # inputs that share an nvfp4 scale
FP4_TILE_ROWS, FP4_TILE_COLUMNS = 128, 4  # of nvfp4 scales, see untile_scales


def dequantize_fp8(stored: Tensor, scale: Tensor | None, dtype: torch.dtype, *, transposed: bool = False) -> Tensor:
    """Returns a new tensor, stored times scale, rounded once to `dtype`; (out, in) from (in, out) if transposed.

    `scale` is float32 with as many axes as the result: a single number or one a row.
    """
    weight = (stored.t() if transposed else stored).to(dtype, memory_format=torch.contiguous_format)
    # `out` in place of mul_: the product is taken in float32 and rounded once, without a float32 copy on CUDA
    return weight if scale is None else torch.mul(weight, scale, out=weight)


def dequantize_nvfp4(
    packed: Tensor, block_scales: Tensor, second_scale: Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """Returns an nvfp4 matrix (out, in) in `dtype`, cut to `shape`; both products but the last are exact in 16 bit.

    `packed` is uint8 (rows, columns / 2), `block_scales` e4m3 in cuBLAS's tiles, `second_scale` float32 (1,).
    """
    rows, half = packed.shape
    nibbles = torch.stack((packed >> 4, packed & 15), dim=-1).view(rows, 2 * half)
    # the bits of an e2m1 number, set into e4m3, are the same number over 64
    numbers = (((nibbles & 8) << 4) | ((nibbles & 7) << 2)).view(torch.float8_e4m3fn).to(dtype)
    scales = untile_scales(block_scales, rows, 2 * half // FP4_BLOCK).to(dtype) * 64
    weight = (numbers.view(rows, -1, FP4_BLOCK) * scales[..., None]).view(rows, 2 * half)
    weight = weight[: shape[0], : shape[1]].contiguous()
    return torch.mul(weight, second_scale, out=weight)


def untile_scales(tiled: Tensor, rows: int, columns: int) -> Tensor:
    """Returns block scales (rows, columns) out of cuBLAS's tiles of 128 x 4, whatever shape the file gives them.

    In a tile, row 32 * a + b stands at line b, columns 4 * a to 4 * a + 3 (NVIDIA's cuBLAS manual, "1D block scaling
    factors layout"); tiles follow each other row by row.
    """
    tiles_down, tiles_across = -(-rows // FP4_TILE_ROWS), -(-columns // FP4_TILE_COLUMNS)
    tiles = tiled.contiguous().view(torch.uint8).reshape(tiles_down, tiles_across, 32, 4, FP4_TILE_COLUMNS)
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(tiles_down * FP4_TILE_ROWS, tiles_across * FP4_TILE_COLUMNS)
    return plain[:rows, :columns].contiguous().view(tiled.dtype)


def quantize_fp8(weight: Tensor, dtype: torch.dtype, *, scaled: bool = True) -> tuple[Tensor, Tensor | None]:
    """Rounds a weight to fp8 and returns it with its scale, float32 (1, ...), the largest value filling the range.

    Without `scaled` there is no scale, and what is out of range becomes the largest fp8 number.
    """
    limit = torch.finfo(dtype).max
    scale = None
    if scaled:
        largest = weight.abs().amax().float()
        scale = torch.where(largest > 0, largest / limit, 1.0).reshape((1,) * weight.dim())
        weight = weight.float() / scale
    return weight.clamp(-limit, limit).to(dtype), scale


def is_finite(tensor: Tensor) -> bool:
    """Tells whether a tensor holds no infinite value and no NaN, in one pass and without a copy."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    if tensor.itemsize > 1:
        return all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))
    # fp8 has no comparisons: its codes that are no number are the highest of each sign, 0x7f in e4m3, 0x7c up in e5m2
    limit = 0x7F if tensor.dtype == torch.float8_e4m3fn else 0x7C
    return int(tensor.view(torch.int8).max()) < limit and int(tensor.view(torch.uint8).max()) < 0x80 + limit
