"""One rank's models, each built when a job first needs it and then kept."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn

from ..fleet import RankInfo
from ..models import audio_vae, connectors, text_encoder, upsampler, video_vae, vocoder
from ..models.builder import ComponentBuilder
from ..models.transformer import LTXTransformer
from ..models.transformer_builder import TransformerBuilder
from ..parallel.attention_manager import AttentionManager
from ..parallel.sequence_parallel import SequenceParallelModelWrapper
from ..parallel.tiled_data_parallel import TiledDataParallelModelWrapper
from ..tiling import Grid, TileCountConfig
from ..weights.facts import ModelFacts
from ..weights.keymaps import COMPONENTS
from ..weights.registry import StateDictRegistry
from .jobs import PromptContext
from .settings import LTXSettings

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_BUILDERS: dict[str, type[ComponentBuilder]] = {
    builder.component: builder
    for builder in (
        TransformerBuilder,
        connectors.ConnectorsBuilder,
        video_vae.VideoVAEBuilder,
        audio_vae.AudioVAEBuilder,
        vocoder.VocoderBuilder,
        upsampler.UpsamplerBuilder,
    )
}


class LTXModels:
    """Builds and holds the components of one configuration on one rank's device."""

    def __init__(self, settings: LTXSettings, facts: ModelFacts, info: RankInfo) -> None:
        self.settings = settings
        self.facts = facts
        self.info = info
        self.registry = StateDictRegistry()
        self.dtype = _dtype(settings.precision, info.device)
        # Gemma and the autoencoders leave fp16's range; bf16 is as small and does not
        self._wide_dtype = torch.bfloat16 if self.dtype == torch.float16 else self.dtype
        self.announce: Callable[[str], None] = lambda component: None  # is told what is about to be loaded
        self._modules: dict[str, nn.Module] = {}
        self._checked: set[str] = set()

    def check(self, components: Iterable[str]) -> None:
        """Compares components with their files' headers, once each; raises ValueError where one does not fit."""
        for component in components:
            if component not in self._checked:
                self._builder(component).check()
                self._checked.add(component)

    @property
    def transformer(self) -> LTXTransformer:
        """The transformer, with its attentions as the last wrapper set them."""
        return self._component("transformer", self.dtype)

    @property
    def video_vae(self) -> nn.Module:
        """The video autoencoder."""
        return self._component("video_vae", self._wide_dtype)

    def sequence_parallel(self) -> SequenceParallelModelWrapper:
        """Returns the transformer with the video tokens spread over the ranks."""
        config = self.transformer.config
        manager = AttentionManager(
            self.settings.sp_max_tokens,
            config.num_attention_heads,
            config.attention_head_dim,
            self.dtype,
            self.info.group if self.info.world_size > 1 else None,
        )
        return SequenceParallelModelWrapper(self.transformer, manager)

    def tiled(self, tiling: TileCountConfig, grid: Grid, *, normalize_positions: bool) -> TiledDataParallelModelWrapper:
        """Returns the transformer run tile by tile over the ranks, for a latent (F, H, W)."""
        self.transformer.use_attention()  # each rank attends within its own tile
        return TiledDataParallelModelWrapper(
            self.transformer,
            self.info.group if self.info.world_size > 1 else None,
            tiling,
            grid=grid,
            normalize_positions=normalize_positions,
        )

    def encode(self, prompts: tuple[str, ...], max_length: int) -> list[PromptContext]:
        """Encodes prompts on this rank's device; contexts come back on the CPU in float32."""
        tokenizer, encoder = self._text_encoder
        contexts = []
        for prompt in prompts:
            states = text_encoder.encode_prompts(tokenizer, encoder, [prompt], max_length=max_length)
            # no mask: the connectors have put registers where the padding was
            context = connectors.connect(self._component("connectors", self._wide_dtype), states.hidden, states.mask)
            contexts.append(PromptContext(context.video.float().cpu(), context.audio.float().cpu()))
        return contexts

    def upsample(self, latent: Tensor) -> Tensor:
        """Upscales a normalised video latent (B, C, F, H, W) in space; float32."""
        return upsampler.upsample(self._component("upsampler", self._wide_dtype), self.video_vae, latent)

    def decode_video(self, latent: Tensor) -> Tensor:
        """Decodes a normalised video latent (B, C, F, H, W) to pixels about -1..1, (B, 3, F', H', W')."""
        return video_vae.decode(self.video_vae, latent)

    def decode_audio(self, latent: Tensor) -> tuple[Tensor, int]:
        """Decodes a normalised audio latent (B, C, T, M) to sound (B, 2, N) float32 on the CPU and its rate in Hz."""
        module = self._component("vocoder", torch.float32)
        with _one_thread():
            mel = audio_vae.decode_mel(self._component("audio_vae", self._wide_dtype), latent)
            return vocoder.synthesize(module, mel).cpu(), vocoder.sample_rate(module)

    @cached_property
    def _text_encoder(self) -> tuple:
        self.announce("text encoder")
        return text_encoder.build_text_encoder(
            self.settings.text_encoder,
            self.info.device,
            self._wide_dtype,
            checkpoint=self.registry.checkpoint(self.settings.checkpoint),
            registry=self.registry,
        )

    def _component(self, name: str, dtype: torch.dtype) -> nn.Module:
        if name not in self._modules:
            self.announce(COMPONENTS[name])
            self._modules[name] = self._builder(name).build(self.info.device, dtype)
        return self._modules[name]

    def _builder(self, name: str) -> ComponentBuilder:
        path = self.settings.upsampler if name == "upsampler" else self.settings.checkpoint
        return _BUILDERS[name](path, registry=self.registry)


def _dtype(precision: str, device: torch.device) -> torch.dtype:
    if precision == "auto":
        # CPUs compute bf16 slowly, and float32 is what makes worker counts agree bit for bit
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[precision]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Runs a block on one CPU thread: sums over time then do not depend on how many threads a worker has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
