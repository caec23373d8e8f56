"""Text connectors: hidden states of the text encoder become the contexts of both streams.

Letters: B batch, S text tokens, D hidden size of the text encoder, L its hidden states per token.
"""

import os
from dataclasses import dataclass

import torch
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from torch import Tensor

from ..weights.bundle import Checkpoint
from ..weights.configs import NUM_REGISTERS, connectors_kwargs, transformer_values
from ..weights.registry import StateDictRegistry
from .builder import ComponentBuilder
from .loading import WeightTracker


@dataclass(frozen=True)
class TextContexts:
    """What the transformer reads: video (B, S, Dv), audio (B, S, Da) and mask (B, S), which is all ones."""

    video: Tensor
    audio: Tensor
    mask: Tensor


class ConnectorsBuilder(ComponentBuilder):
    """Builds LTX2TextConnectors with the text projections."""

    component = "connectors"

    def construct(self, file: Checkpoint) -> LTX2TextConnectors:
        """Makes the connectors that the file's config describes."""
        module = LTX2TextConnectors(**connectors_kwargs(file))
        if not transformer_values(file)["connector_ff_bias"]:
            _drop_feed_forward_biases(module)
        return module


def build_connectors(
    checkpoint: str | os.PathLike,
    *,
    registry: StateDictRegistry,
    device: torch.device | str,
    dtype: torch.dtype,
    tracker: WeightTracker | None = None,
) -> LTX2TextConnectors:
    """Builds the text connectors; raises ValueError with one sentence when the file lacks them."""
    return ConnectorsBuilder(checkpoint, registry=registry, tracker=tracker).build(device, dtype)


def check_text_length(num_tokens: int) -> None:
    """Raises ValueError unless a text length is a positive multiple of the number of learnable registers."""
    if num_tokens <= 0 or num_tokens % NUM_REGISTERS:
        raise ValueError(f"The text length must be a positive multiple of {NUM_REGISTERS}, got {num_tokens}.")


@torch.no_grad()
def connect(connectors: LTX2TextConnectors, states_BSDL: Tensor, mask_BS: Tensor) -> TextContexts:
    """Turns hidden states of left-padded prompts into contexts, in the connectors' dtype and on their device.

    `mask_BS` is 1 on real tokens. S must be a multiple of 128. Raises ValueError for other shapes.
    """
    check_text_length(states_BSDL.shape[1])
    config = connectors.config
    expected = (config.caption_channels, config.text_proj_in_factor)
    if tuple(states_BSDL.shape[2:]) != expected:
        raise ValueError(
            f"The hidden states are {list(states_BSDL.shape[2:])} a token, but the text projection takes "
            f"{list(expected)}. Choose the text encoder of this checkpoint."
        )
    states = states_BSDL.to(device=connectors.device, dtype=connectors.dtype)
    video, audio, mask = connectors(states, mask_BS.to(connectors.device), padding_side="left")
    return TextContexts(video, audio, mask)


def _drop_feed_forward_biases(module: LTX2TextConnectors) -> None:
    """Makes the feed-forward layers bias-free, for which diffusers has no option."""
    for connector in (module.video_connector, module.audio_connector):
        for block in connector.transformer_blocks:
            for layer in block.ff.modules():
                if isinstance(layer, torch.nn.Linear):
                    layer.bias = None
