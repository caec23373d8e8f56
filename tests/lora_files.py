"""Writes LoRA files for tests, in the key dialects of the known trainers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mgpu_runtime.weights.bundle import read_checkpoint
from mgpu_runtime.weights.lora_targets import LoRATargets, lora_targets
from tests.goldens import GOLDEN
from tests.weights_files import TINY_23

LORA_23 = GOLDEN / "checkpoints" / "tiny_lora_ltx23.safetensors"

PREFIXES = (
    "",
    "diffusion_model.",
    "model.diffusion_model.",
    "transformer.",
    "base_model.model.",
    "transformer.base_model.model.",
    "base_model.model.diffusion_model.",
)
HALVES = (
    ("lora_A.weight", "lora_B.weight"),
    ("lora_A.default.weight", "lora_B.default.weight"),
    ("lora_down.weight", "lora_up.weight"),
    ("lora.down.weight", "lora.up.weight"),
)

Pair = tuple[Tensor, Tensor]  # down (rank, in), up (out, rank)


@dataclass(frozen=True)
class Dialect:
    """How a trainer writes a module's path and the halves of its pair; flat ones write underscores for dots."""

    prefix: str = "diffusion_model."
    halves: tuple[str, str] = HALVES[0]
    is_flat: bool = False

    def key(self, module: str, suffix: str) -> str:
        """Returns the tensor name of a part of a module's pair."""
        return f"{self.prefix}{module.replace('.', '_') if self.is_flat else module}.{suffix}"


OFFICIAL = Dialect()
KOHYA = Dialect("lora_unet_", HALVES[2], is_flat=True)
FLAT = (KOHYA, Dialect("lora_transformer_", HALVES[2], is_flat=True), Dialect("lycoris_", HALVES[2], is_flat=True))
DIALECTS = (*(Dialect(prefix, halves) for prefix in PREFIXES for halves in HALVES), *FLAT)


def random_pair(out_features: int, in_features: int, *, rank: int = 2, seed: int = 0, scale: float = 0.3) -> Pair:
    """Makes a seeded pair."""
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, in_features, generator=generator) * scale
    return down, torch.randn(out_features, rank, generator=generator) * scale


def write_lora(
    path: Path,
    pairs: Mapping[str, Pair],
    dialect: Dialect = OFFICIAL,
    *,
    alpha: float | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Writes pairs by module name in a dialect, with the same alpha for all where one is given."""
    tensors: dict[str, Tensor] = {}
    for module, (down, up) in pairs.items():
        for half, tensor in zip(dialect.halves, (down, up), strict=True):
            tensors[dialect.key(module, half)] = tensor.contiguous()
        if alpha is not None:
            tensors[dialect.key(module, "alpha")] = torch.tensor(float(alpha))
    save_file(tensors, path, metadata=dict(metadata or {}))
    return path


def toy_lora(path: Path, checkpoint: Path, *, seed: int = 0, scale: float = 0.3) -> Path:
    """Writes a LoRA of rank 2 for the attentions of a checkpoint's first block."""
    shapes = {
        target.removesuffix(".weight"): shape
        for target, shape in read_checkpoint(checkpoint).shapes("transformer").items()
        if target.startswith("transformer_blocks.0.") and target.endswith(("to_q.weight", "to_out.0.weight"))
    }
    pairs = {name: random_pair(*shape, seed=seed + i, scale=scale) for i, (name, shape) in enumerate(shapes.items())}
    return write_lora(path, pairs)


def targets(checkpoint: Path = TINY_23) -> LoRATargets:
    """Lists what a LoRA may name in a checkpoint."""
    return lora_targets(read_checkpoint(checkpoint))
