"""What conformance checks stand on: the checkpoints of a golden directory, the ranks, the lines of the table."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mgpu_runtime.models import video_vae
from mgpu_runtime.models.transformer_builder import build_transformer
from mgpu_runtime.parallel.attention_manager import AttentionManager
from mgpu_runtime.parallel.sequence_parallel import SequenceParallelModelWrapper
from mgpu_runtime.parallel.tiled_data_parallel import TiledDataParallelModelWrapper
from mgpu_runtime.tiling import TileCountConfig
from mgpu_runtime.weights.registry import StateDictRegistry

# A check yields (component, actual, expected), with a fourth entry where the error is relative to something else than
# the largest expected value.
Triple = tuple[str, Tensor, Tensor] | tuple[str, Tensor, Tensor, float]


@dataclass(frozen=True)
class Row:
    """One line of the table; `reason` says why a case was not run, `error` why it could not be."""

    case: str
    component: str
    max_abs: float = 0.0
    relative: float = 0.0
    tolerance: float = 0.0
    reason: str | None = None
    error: str | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None or (self.reason is None and not self.relative <= self.tolerance)

    @property
    def verdict(self) -> str:
        if self.reason is not None:
            return f"not covered: {self.reason}"
        if self.error is not None:
            return f"FAIL: {self.error}"
        return "FAIL" if self.failed else "ok"


class Bench:
    """What the checks run on: the checkpoints of a golden directory and the ranks."""

    def __init__(self, directory: Path, group: dist.ProcessGroup) -> None:
        self.directory = directory
        self.group = group if dist.get_world_size(group) > 1 else None
        self.registry = StateDictRegistry()
        self._models: dict[tuple, object] = {}

    def checkpoint(self, style: str) -> Path:
        return self.directory / "checkpoints" / f"tiny_ltx{style}.safetensors"

    def build(self, builder: Callable, path: Path, **options: object):
        """Builds a model once."""
        key = (builder.__name__, path)
        if key not in self._models:
            self._models[key] = builder(path, registry=self.registry, device="cpu", **options)
        return self._models[key]

    def sequence_parallel(self, style: str) -> SequenceParallelModelWrapper:
        model = self.build(build_transformer, self.checkpoint(style), dtype=torch.float32)
        config = model.config
        manager = AttentionManager(
            1 << 16, config.num_attention_heads, config.attention_head_dim, torch.float32, self.group
        )
        return SequenceParallelModelWrapper(model, manager)

    def tiled(self, style: str, config: TileCountConfig, grid: tuple, normalize: bool):
        model = self.build(build_transformer, self.checkpoint(style), dtype=torch.float32)
        model.use_attention()
        return TiledDataParallelModelWrapper(model, self.group, config, grid=grid, normalize_positions=normalize)

    def latent_width(self, style: str) -> int | None:
        """Returns the latent channels of a style's video autoencoder; None where its file has none."""
        file = self.registry.checkpoint(self.checkpoint(style))
        return file.shapes("video_vae")["latents_mean"][0] if "video_vae" in file.components else None

    def vae(self, style: str):
        return self.build(video_vae.build_video_vae, self.checkpoint(style), dtype=torch.float32)


def gather_rows(name: str, triples: Iterator[Triple], tolerance: float) -> list[Row]:
    """Gathers a case's triples by component: the worst of each counts."""
    worst: dict[str, Row] = {}
    for component, actual, expected, *scale in triples:
        if actual.shape != expected.shape or not (_is_finite(actual) and _is_finite(expected)):
            difference = relative = float("inf")
        else:
            actual, expected = actual.double(), expected.double()
            difference = float((actual - expected).abs().max()) if actual.numel() else 0.0
            largest = scale[0] if scale else float(expected.abs().max()) if expected.numel() else 1.0
            relative = difference / max(largest, 1e-12)
        if component not in worst or relative >= worst[component].relative:
            worst[component] = Row(name, component, difference, relative, tolerance)
    return list(worst.values()) or [Row(name, "-", error="the case holds nothing to compare")]


def _is_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values.double()).all())
