"""The text side of one rank: who holds the text encoder, which prompts are known already, when its memory is freed."""

import gc
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..fleet import RankInfo, parse_devices
from ..models import connectors
from ..models.text_encoder import GemmaBuilder, GemmaEncoder, TextStates
from ..parallel.text_encoder import (
    AccelerateGemmaBuilder,
    BatchParallelGemma,
    BatchParallelGemmaBuilder,
    Embeddings,
    SpreadGemma,
)
from ..weights.registry import StateDictRegistry
from ..weights.text_source import open_text_encoder
from .first_rank import on_every_rank, on_first_rank
from .jobs import Encode, PromptContext
from .loras import set_name
from .settings import LTXSettings

CACHE_BYTES = 256 << 20  # ten prompts of the published models
ACTIVATION_BYTES = 2 << 30  # beside the weights: the states of one prompt, twice, and a layer's work

Encoder = GemmaEncoder | SpreadGemma | BatchParallelGemma


@dataclass(frozen=True)
class _Plan:
    """What the first rank decides for all: how to encode, the key of each prompt, and which are not known yet."""

    mode: str
    keys: tuple[tuple, ...]
    missing: tuple[tuple, ...]

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts to encode, each once."""
        return tuple(prompt for prompt, *_ in self.missing)


class ContextCache:
    """Keeps the last contexts that were encoded, up to a number of bytes."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[tuple, PromptContext] = OrderedDict()

    def get(self, key: tuple) -> PromptContext | None:
        """Returns what is kept under a key, which then counts as used last."""
        context = self._kept.get(key)
        if context is not None:
            self._kept.move_to_end(key)
        return context

    def put(self, key: tuple, context: PromptContext) -> None:
        """Keeps a context; those not used for longest make room, one that is too large is not kept."""
        if key not in self._kept:
            self._kept[key] = context
            self.num_bytes += _num_bytes(context)
        while self.num_bytes > self.max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.num_bytes -= _num_bytes(dropped)


class TextModels:
    """Encodes prompts for a fleet; the encoder loads when a prompt first needs it and then stays, unless released.

    `load_connectors` gives this rank's connectors, `announce` is told what is about to be loaded.
    """

    def __init__(
        self,
        settings: LTXSettings,
        info: RankInfo,
        dtype: torch.dtype,
        *,
        registry: StateDictRegistry,
        load_connectors: Callable[[], nn.Module],
        announce: Callable[[str], None],
    ) -> None:
        self.num_encoded = 0  # prompts that went through this rank's encoder
        self.cache = ContextCache()
        self._settings = settings
        self._info = info
        self._dtype = dtype
        self._registry = registry
        self._load_connectors = load_connectors
        self._announce = announce
        self._encoder: Encoder | None = None
        self._mode: str | None = None  # of the encoder that is loaded

    def encode(self, request: Encode) -> list[PromptContext]:
        """Returns the contexts of a request's prompts on the first rank, on the CPU in float32; collective.

        What fails on a rank is raised as RunnerError on all of them, and the fleet stays warm.
        """
        speaks = self._info.rank == 0
        plan: _Plan = on_every_rank(self._info, lambda: self._plan(request) if speaks else None)[0]
        if plan.mode != self._mode:
            self.release()
        made = self._encode_missing(plan, request.max_length) if plan.missing else []
        if request.release:
            self.release()
        return self._collect(plan, made) if speaks else []

    def check(self) -> None:
        """Compares the text encoder with its files' headers; raises ValueError with one sentence where it is unfit."""
        if self._encoder is None:
            self._builder("first").check()

    def release(self) -> None:
        """Frees the encoder's memory; the next prompt that is not known loads it again."""
        if self._encoder is None:
            return
        self._encoder = self._mode = None
        gc.collect()  # hooks between a spread encoder's layers refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _plan(self, request: Encode) -> _Plan:
        # a context is known by the state of all files it comes from
        files = (self._settings.stamps(), set_name(request.loras))
        keys = tuple((prompt.strip(), request.max_length, files) for prompt in request.prompts)
        missing = tuple(key for key in dict.fromkeys(keys) if self.cache.get(key) is None)
        return _Plan(self._choose(request.mode) if missing else self._mode or "first", keys, missing)

    def _choose(self, mode: str) -> str:
        """Turns "auto" into a mode: spread where the first GPU has no room for the whole encoder."""
        if mode != "auto":
            return mode
        if self._mode is not None:
            return self._mode
        if self._info.device.type != "cuda" or self._info.world_size == 1:
            return "first"
        weights = open_text_encoder(self._settings.text_encoder).num_bytes(self._dtype.itemsize)
        torch.cuda.empty_cache()  # what torch only keeps for later is free too
        free, _ = torch.cuda.mem_get_info(self._info.device)
        return "first" if weights + ACTIVATION_BYTES < free else "sharded"

    def _encode_missing(self, plan: _Plan, max_length: int) -> list[PromptContext]:
        """Returns the contexts of a plan's prompts on the first rank, and on all where each has an encoder."""
        if plan.mode != "replicated":
            return on_first_rank(self._info, lambda: self._encode_here(plan, max_length)) or []
        mine: list[Embeddings] = []
        on_every_rank(self._info, lambda: mine.extend(self._encode_share(plan, max_length)))
        return [_to_cpu(embeddings) for embeddings in self._encoder.exchange(len(plan.missing), mine)]

    def _encode_here(self, plan: _Plan, max_length: int) -> list[PromptContext]:
        encoder = self._load(plan.mode)
        # one after the other, so that a prompt's context does not depend on its company
        return [_to_cpu(self._connect(encoder.encode([prompt], max_length=max_length))) for prompt in plan.prompts]

    def _encode_share(self, plan: _Plan, max_length: int) -> list[Embeddings]:
        encoder = self._load(plan.mode)
        return encoder.encode_share(plan.prompts, max_length=max_length, then=self._connect)

    def _connect(self, states: TextStates) -> Embeddings:
        self.num_encoded += 1
        contexts = connectors.connect(self._load_connectors(), states.hidden, states.mask)
        # no mask: the connectors have put registers where the padding was
        return contexts.video.float(), contexts.audio.float()

    def _load(self, mode: str) -> Encoder:
        if self._encoder is None:
            self._announce("text encoder")
            self._encoder = self._builder(mode).build(self._info.device, self._dtype)
            self._mode = mode
        return self._encoder

    def _builder(self, mode: str) -> GemmaBuilder | AccelerateGemmaBuilder | BatchParallelGemmaBuilder:
        checkpoint = self._registry.checkpoint(self._settings.checkpoint_files())
        whole = GemmaBuilder(self._settings.text_encoder, checkpoint=checkpoint, registry=self._registry)
        if mode == "sharded":
            return AccelerateGemmaBuilder(whole, parse_devices(self._settings.devices))
        return BatchParallelGemmaBuilder(whole, self._info) if mode == "replicated" else whole

    def _collect(self, plan: _Plan, made: list[PromptContext]) -> list[PromptContext]:
        """Puts what was made to what is known, in the order of the request."""
        new = dict(zip(plan.missing, made, strict=True))
        contexts = [new[key] if key in new else self.cache.get(key) for key in plan.keys]
        for key, context in new.items():
            self.cache.put(key, context)
        return contexts


def _to_cpu(embeddings: Embeddings) -> PromptContext:
    video, audio = embeddings
    return PromptContext(video.cpu(), audio.cpu())


def _num_bytes(context: PromptContext) -> int:
    return context.video.nbytes + context.audio.nbytes
