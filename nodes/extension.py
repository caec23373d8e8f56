"""The list of nodes that ComfyUI asks for."""

from __future__ import annotations

from .comfy import ComfyExtension, io
from .decode import LTXMGPUDistributedDecode
from .encode import LTXMGPUEncodePrompt
from .load import LTXMGPULoad
from .sp_stage import LTXMGPUSPStage
from .tdp_stage import LTXMGPUTDPUpscaleStage

NODES: tuple[type[io.ComfyNode], ...] = (
    LTXMGPULoad,
    LTXMGPUEncodePrompt,
    LTXMGPUSPStage,
    LTXMGPUTDPUpscaleStage,
    LTXMGPUDistributedDecode,
)


class LTXMGPUExtension(ComfyExtension):
    """Offers every node, whatever is or is not installed beside the pack: a missing part is an error on use."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return list(NODES)
