"""Duration head: an encoded prompt becomes the seconds that the shot it describes naturally takes. From LTX-2.5 on.

Letters: S text tokens, D width of a context.
"""

from collections.abc import Mapping

import torch
from diffusers.pipelines.ltx2.duration_head import LTX2DurationHead
from torch import Tensor

from ..weights.bundle import Checkpoint
from ..weights.inferred_parts import duration_head_section
from .builder import ComponentBuilder

_FUSED = "attention_pooler.to_qkv."
# Fields of the config -> the class's own arguments. Published configs leave all of them out.
_FIELDS = {
    "pooler_hidden_dim": "pooler_hidden_dim",
    "num_queries": "num_queries",
    "num_pooler_heads": "num_pooler_heads",
    "mlp_hidden": "mlp_hidden_dim",
    "video_cross_attention_dim": "video_cross_attention_dim",
    "audio_cross_attention_dim": "audio_cross_attention_dim",
}


class DurationHeadBuilder(ComponentBuilder):
    """Builds an LTX2DurationHead."""

    component = "duration_head"

    def construct(self, file: Checkpoint) -> LTX2DurationHead:
        """Makes the head that the file's config describes; what it leaves out is told by the shapes."""
        of_shapes, _ = duration_head_section(file.shapes(self.component))
        section = {**of_shapes, **file.config_section("duration_head")}
        return LTX2DurationHead(**{_FIELDS[name]: value for name, value in section.items() if name in _FIELDS})

    def arrange(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Splits the fused query, key and value projection, in this order."""
        arranged = dict(state)
        for kind in ("weight", "bias"):
            fused = arranged.pop(f"{_FUSED}{kind}", None)
            if fused is not None:
                parts = zip("qkv", fused.chunk(3), strict=True)
                arranged |= {f"attention_pooler.to_{name}.{kind}": part for name, part in parts}
        return arranged


@torch.no_grad()
def predict_seconds(head: LTX2DurationHead, video_1SD: Tensor, audio_1SD: Tensor) -> float:
    """Returns the seconds that a prompt's contexts ask for; the head sets no bounds."""
    return head(video_1SD.to(head.device), audio_1SD.to(head.device)).item()
