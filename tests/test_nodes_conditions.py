"""What the condition nodes read from LoRA files; test_nodes_in_comfy.py has the nodes themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mgpu_runtime.pipeline.jobs import LoRASpec
from mgpu_runtime.pipeline.reference_factors import reference_factors


def _lora(folder: Path, name: str, **metadata: str) -> LoRASpec:
    """Writes a LoRA of one pair."""
    module = "diffusion_model.transformer_blocks.0.attn1.to_q"
    pair = {f"{module}.lora_A.weight": torch.zeros(2, 8), f"{module}.lora_B.weight": torch.zeros(8, 2)}
    save_file(pair, folder / f"{name}.safetensors", metadata=metadata)
    return LoRASpec(str(folder / f"{name}.safetensors"))


def test_reference_factors_are_read_from_the_loras(tmp_path: Path) -> None:
    plain = _lora(tmp_path, "plain")
    small = _lora(tmp_path, "small", reference_downscale_factor="2")
    slow = _lora(tmp_path, "slow", reference_downscale_factor="2", reference_temporal_scale_factor="3")
    assert reference_factors(()) == reference_factors((plain,)) == (1, 1)
    assert reference_factors((plain, small)) == (2, 1)
    assert reference_factors((small, plain, slow)) == (2, 3)


def test_loras_that_want_different_references_are_refused_by_name(tmp_path: Path) -> None:
    small = _lora(tmp_path, "small", reference_downscale_factor="2")
    tiny = _lora(tmp_path, "tiny", reference_downscale_factor="4")
    with pytest.raises(ValueError, match=r"small.safetensors 2.*tiny.safetensors 4.*Reference Clip"):
        reference_factors((small, tiny))
