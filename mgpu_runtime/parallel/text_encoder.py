"""Text encoder on several devices: its layers spread over them, or a whole one on each rank with the prompts dealt.

Letters: W ranks.
"""

import gc
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import CustomDtype, compute_module_sizes, get_balanced_memory
from torch import Tensor
from transformers import PreTrainedModel

from ..fleet import RankInfo
from ..models.text_encoder import DamagedStatesError, Device, GemmaBuilder, GemmaEncoder, TextStates

log = logging.getLogger("mgpu")

USABLE_SHARE = 0.9  # of a GPU's free memory; the rest is for the states of a prompt

Embeddings = tuple[Tensor, ...]


class SpreadGemma:
    """An encoder whose layers are on several devices; when its states come out damaged, one device does it alone."""

    def __init__(self, spread: GemmaEncoder, build_alone: Callable[[], GemmaEncoder]) -> None:
        self.encoder = spread
        self._build_alone: Callable[[], GemmaEncoder] | None = build_alone

    def encode(self, prompts: Sequence[str], *, max_length: int) -> TextStates:
        """Encodes prompts, see GemmaEncoder.encode; the states are on the encoder's stated device."""
        try:
            return self.encoder.encode(prompts, max_length=max_length)
        except DamagedStatesError as error:
            if self._build_alone is None:
                raise
            log.warning("Spread over several devices: %s It is loaded again on %s alone.", error, self.encoder.device)
        build_alone, self._build_alone = self._build_alone, None
        del self.encoder  # its memory is needed, and the hooks between its layers refer to each other
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        self.encoder = build_alone()
        return self.encoder.encode(prompts, max_length=max_length)


class AccelerateGemmaBuilder:
    """Builds one Gemma with its layers spread over the devices of a fleet; the first rank builds it for all."""

    def __init__(self, inner: GemmaBuilder, devices: Sequence[Device]) -> None:
        self.inner = inner
        self.devices = [torch.device(device) for device in devices]

    def build(self, device: Device, dtype: torch.dtype) -> SpreadGemma:
        """Returns the encoder, each layer loaded where it stays; its states are collected on `device`.

        Raises ValueError with one sentence when the devices together have too little free memory.
        """
        places = self._places(dtype)
        spread = self.inner.build_on(places, dtype, device=device)
        # hooks even on one device: the way of the data is the same whatever the number of devices
        dispatch_model(spread.model, device_map=places, main_device=str(device), force_hooks=True)
        return SpreadGemma(spread, lambda: self.inner.build(device, dtype))

    def _places(self, dtype: torch.dtype) -> dict[str, str]:
        tower = self.inner.check()
        if any(device.type != "cuda" for device in self.devices):
            return dict.fromkeys(_pieces(tower), "cpu")
        free = {device.index: torch.cuda.mem_get_info(device)[0] for device in self.devices}
        found = spread_evenly(tower, free, dtype, self.inner.quantized_names())
        return {name: f"cuda:{index}" for name, index in found.items()}


def spread_evenly(
    tower: PreTrainedModel, free: Mapping[int, int], dtype: torch.dtype, quantized: Iterable[str] = ()
) -> dict[str, int]:
    """Returns which GPU each module goes to, of GPUs with so many free bytes; a layer stays in one piece.

    The `quantized` tensors are counted with one byte a number. Raises ValueError with one sentence when there is no
    room for all.
    """
    usable = {index: int(size * USABLE_SHARE) for index, size in free.items()}
    sizes = {
        "no_split_module_classes": [type(tower.layers[0]).__name__],
        "dtype": dtype,
        "special_dtypes": dict.fromkeys(quantized, CustomDtype.FP8),
    }
    found = infer_auto_device_map(tower, get_balanced_memory(tower, usable, **sizes), **sizes)
    if all(isinstance(index, int) for index in found.values()):
        return found
    need, have = compute_module_sizes(tower, dtype, sizes["special_dtypes"])[""], sum(usable.values())
    raise ValueError(
        f"The text encoder needs {need / 1e9:.1f} GB, but {len(free)} GPUs have {have / 1e9:.1f} GB for it together. "
        "Close other programs, choose more GPUs, or encode before the other models load."
    )


def _pieces(tower: PreTrainedModel) -> list[str]:
    """Names the modules that may be on different devices."""
    others = [name for name, _ in tower.named_children() if name != "layers"]
    return [*others, *(f"layers.{number}" for number in range(len(tower.layers)))]


class BatchParallelGemma:
    """A whole encoder on every rank; rank r encodes the prompts r, r + W, r + 2 W and so on."""

    def __init__(self, encoder: GemmaEncoder, info: RankInfo) -> None:
        self.encoder = encoder
        self.info = info

    def encode(self, prompts: Sequence[str], *, max_length: int) -> list[Embeddings]:
        """Encodes prompts on all ranks; each rank gets hidden states and mask of every prompt; collective.

        A failure on one rank leaves the others waiting, so it must end the fleet, unless the caller votes between
        `encode_share` and `exchange`.
        """
        return self.exchange(len(prompts), self.encode_share(prompts, max_length=max_length))

    def encode_share(
        self,
        prompts: Sequence[str],
        *,
        max_length: int,
        then: Callable[[TextStates], Embeddings] = lambda states: (states.hidden, states.mask),
    ) -> list[Embeddings]:
        """Encodes this rank's prompts, one after the other; `then` turns states into what is to be exchanged."""
        mine = prompts[self.info.rank :: self.info.world_size]
        return [then(self.encoder.encode([prompt], max_length=max_length)) for prompt in mine]

    def exchange(self, num_prompts: int, mine: list[Embeddings]) -> list[Embeddings]:
        """Gives every rank what all ranks have made, by prompt, on its device; collective."""
        return [self._from(i % self.info.world_size, i // self.info.world_size, mine) for i in range(num_prompts)]

    def _from(self, owner: int, number: int, mine: list[Embeddings]) -> Embeddings:
        """Broadcasts the embeddings of an owner's prompt."""
        info = self.info
        if info.world_size == 1:
            return mine[number]
        is_owner = owner == info.rank
        told = [[(tuple(tensor.shape), tensor.dtype) for tensor in mine[number]] if is_owner else None]
        dist.broadcast_object_list(told, src=owner, group=info.group, device=info.device)
        received = []
        for place, (shape, dtype) in enumerate(told[0]):
            tensor = mine[number][place] if is_owner else torch.empty(shape, dtype=dtype)
            tensor = tensor.to(info.device).contiguous()
            dist.broadcast(tensor, src=owner, group=info.group)
            received.append(tensor)
        return tuple(received)


class BatchParallelGemmaBuilder:
    """Builds a whole Gemma on every rank, for batches of prompts; each rank needs the memory for it."""

    def __init__(self, inner: GemmaBuilder, info: RankInfo) -> None:
        self.inner = inner
        self.info = info

    def build(self, device: Device, dtype: torch.dtype) -> BatchParallelGemma:
        """Returns the encoder of this rank on `device`."""
        return BatchParallelGemma(self.inner.build(device, dtype), self.info)
