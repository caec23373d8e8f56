"""The list of nodes that ComfyUI asks for."""

from __future__ import annotations

from .comfy import ComfyExtension, io
from .conditions import (
    LTXMGPUImageCondition,
    LTXMGPULatentCondition,
    LTXMGPUReferenceAudio,
    LTXMGPUReferenceClip,
)
from .decode import LTXMGPUDistributedDecode
from .encode import LTXMGPUEncodePrompt
from .encode_audio import LTXMGPUEncodeAudio
from .encode_video import LTXMGPUEncodeVideo
from .guidance_node import LTXMGPUGuidance
from .load import LTXMGPULoad
from .lora import LTXMGPULoRA
from .predict_length import LTXMGPUPredictLength
from .sp_stage import LTXMGPUSPStage
from .tdp_stage import LTXMGPUTDPUpscaleStage

NODES: tuple[type[io.ComfyNode], ...] = (
    LTXMGPULoad,
    LTXMGPUEncodePrompt,
    LTXMGPUSPStage,
    LTXMGPUTDPUpscaleStage,
    LTXMGPUDistributedDecode,
    LTXMGPUImageCondition,
    LTXMGPULatentCondition,
    LTXMGPUReferenceClip,
    LTXMGPUReferenceAudio,
    LTXMGPULoRA,
    LTXMGPUGuidance,
    LTXMGPUEncodeVideo,
    LTXMGPUEncodeAudio,
    LTXMGPUPredictLength,
)


class LTXMGPUExtension(ComfyExtension):
    """Offers every node, whatever is or is not installed beside the pack: a missing part is an error on use."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return list(NODES)
