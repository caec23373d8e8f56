"""Tiny models for tests: the golden checkpoints, and random ones of any head count."""

import torch

from mgpu_runtime.models.transformer import LTXTransformer
from mgpu_runtime.models.transformer_builder import build_transformer
from mgpu_runtime.weights.registry import StateDictRegistry
from tests.goldens import GOLDEN


def transformer(style: str) -> LTXTransformer:
    """Builds the transformer of a golden checkpoint ("20" or "23") in float32 on the CPU."""
    path = GOLDEN / "checkpoints" / f"tiny_ltx{style}.safetensors"
    return build_transformer(path, registry=StateDictRegistry(), device="cpu", dtype=torch.float32)


def random_transformer(*, num_heads: int, rope_type: str = "split") -> LTXTransformer:
    """Makes a two-block 2.3-style transformer with seeded random weights; head widths 16 (video) and 8 (audio)."""
    torch.manual_seed(0)
    width, audio_width = num_heads * 16, num_heads * 8
    model = LTXTransformer(
        in_channels=16,
        out_channels=16,
        num_attention_heads=num_heads,
        attention_head_dim=16,
        cross_attention_dim=width,
        gated_attn=True,
        cross_attn_mod=True,
        audio_in_channels=32,
        audio_out_channels=32,
        audio_num_attention_heads=num_heads,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=audio_width,
        audio_gated_attn=True,
        audio_cross_attn_mod=True,
        num_layers=2,
        rope_type=rope_type,
        use_prompt_embeddings=False,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model.eval()
