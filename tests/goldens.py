"""Reads golden cases: inputs and the official implementation's outputs, one safetensors file each."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mgpu_runtime.models.streams import StreamInput
from mgpu_runtime.sampling.guidance import GuiderParams

GOLDEN = Path(__file__).parent / "golden"
TOY = Path(__file__).parents[1] / "assets" / "toy"


@dataclass(frozen=True)
class Case:
    """One golden file: its tensors by name and the description in its metadata."""

    name: str
    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)

    def stream(self, name: str) -> StreamInput | None:
        """Builds the transformer input of a stream ("video" or "audio"); None where the case has none."""
        if f"{name}.latent" not in self.tensors:
            return None
        return StreamInput(
            latent=self[f"{name}.latent"],
            timesteps=self[f"{name}.timesteps"].squeeze(-1),
            sigma=self[f"{name}.sigma"],
            positions=self[f"{name}.positions"],
            context=self[f"{name}.context"],
            context_mask=self.get(f"{name}.context_mask"),
            attention_mask=self.get(f"{name}.attention_mask"),
            keyframes_mask=self.get(f"{name}.keyframes_mask"),
        )


def read_case(path: Path) -> Case:
    """Reads one golden file."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads((file.metadata() or {}).get("case", "{}"))
        return Case(path.stem, {name: file.get_tensor(name) for name in file.keys()}, facts)


def golden(name: str) -> Case:
    """Reads a case of the copy under tests/golden by name."""
    return read_case(GOLDEN / "golden" / f"{name}.safetensors")


def guider(values: dict) -> GuiderParams:
    """Reads guidance parameters under their published names."""
    return GuiderParams(
        cfg=values["cfg_scale"],
        stg=values["stg_scale"],
        stg_blocks=tuple(values["stg_blocks"]),
        rescale=values["rescale_scale"],
        modality=values["modality_scale"],
        skip_step=values["skip_step"],
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Gives the largest difference over the largest expected value; infinite for another shape or no finite value."""
    if actual.shape != expected.shape or not bool(torch.isfinite(actual).all()):
        return float("inf")
    scale = expected.abs().max().clamp(min=1e-12)
    return float(((actual.double() - expected.double()).abs().max() / scale).item())
