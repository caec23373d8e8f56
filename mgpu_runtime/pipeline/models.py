"""One rank's models, each built when a job first needs it and then kept."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..exchange import ExchangeError
from ..fleet import RankInfo, RunnerError
from ..models import audio_vae, connectors, duration_head, mel, upsampler, video_vae, vocoder
from ..models.builder import ComponentBuilder
from ..models.transformer import LTXTransformer
from ..models.transformer_builder import TransformerBuilder
from ..parallel.attention_manager import AttentionManager
from ..parallel.sequence_parallel import SequenceParallelModelWrapper
from ..parallel.tiled_data_parallel import TiledDataParallelModelWrapper
from ..tiling import Grid, TileCountConfig, TilePlace
from ..weights.audio_configs import mel_layout
from ..weights.configs import transformer_kwargs
from ..weights.facts import ModelFacts
from ..weights.keymaps import COMPONENTS
from ..weights.quantized import FLOATS
from ..weights.registry import StateDictRegistry
from .first_rank import on_every_rank
from .jobs import Encode, LoRASpec, PromptContext
from .loras import LoRASwitch, Say
from .settings import WEIGHTS_IN_FP8, LTXSettings
from .text_models import TextModels

ROOM_BYTES = 4 << 30  # kept for the clip itself beside the transformer
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_BUILDERS: dict[str, type[ComponentBuilder]] = {
    builder.component: builder
    for builder in (
        connectors.ConnectorsBuilder,
        video_vae.VideoVAEBuilder,
        audio_vae.AudioVAEBuilder,
        vocoder.VocoderBuilder,
        upsampler.UpsamplerBuilder,
        duration_head.DurationHeadBuilder,
    )
}


def _say_nothing(line: str) -> None:
    """Takes a line that nobody asked for."""


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
        self._attention: AttentionManager | None = None
        self.text = TextModels(
            settings,
            info,
            self._wide_dtype,
            registry=self.registry,
            load_connectors=self._connectors,
            announce=lambda component: self.announce(component),
        )
        self._loras = LoRASwitch("transformer", info, self.registry, settings.checkpoint_files())
        # each rank changes its connectors when it encodes, if it does
        alone = replace(info, world_size=1)
        self._prompt_loras = LoRASwitch("connectors", alone, self.registry, settings.checkpoint_files())
        self._encode_loras: tuple[tuple[LoRASpec, ...], Say] = ((), _say_nothing)

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
    def video_vae(self) -> video_vae.VideoVAE:
        """The video autoencoder."""
        return self._component("video_vae", self._wide_dtype)

    def make_room(self) -> None:
        """Releases the text encoder where the transformer would not fit beside it; collective, before a stage.

        A spread text encoder lies on the GPUs of all ranks, so all are asked.
        """
        if not all(on_every_rank(self.info, self._transformer_fits)):
            self.text.release()

    def _transformer_fits(self) -> bool:
        if self.info.device.type != "cuda" or "transformer" in self._modules:
            return True
        file = self.registry.checkpoint(self.settings.checkpoint_files())
        entries = [file.entry("transformer", target) for target in file.component("transformer")]
        width = 1 if self.settings.precision == WEIGHTS_IN_FP8 else self.dtype.itemsize
        # floats are converted, quantised weights stay as they are
        needed = sum(entry.numel * width if entry.dtype in FLOATS else entry.end - entry.start for entry in entries)
        torch.cuda.empty_cache()
        return needed + ROOM_BYTES < torch.cuda.mem_get_info(self.info.device)[0]

    def use_loras(self, specs: tuple[LoRASpec, ...], say: Say = _say_nothing) -> None:
        """Gives the transformer these LoRAs and no others; collective, to be called before it is used.

        `say` hears what was applied when the LoRAs are others than before. Raises RunnerError on every rank alike.
        """
        self._loras.use(specs, lambda: self.transformer, say)

    def open_exchange(self) -> AttentionManager:
        """Opens the exchange of sequence parallelism where none is open, or the open one is of no use; collective.

        It is kept until `close`, since opening takes time. Raises RunnerError on every rank alike where the chosen
        transport cannot work.
        """
        is_usable = self._attention is not None and self._attention.is_whole
        if not all(on_every_rank(self.info, lambda: is_usable)):
            self.close()
            try:
                self._attention = self._attention_manager()
            except ExchangeError as error:
                raise RunnerError(str(error)) from error
        return self._attention

    def check_exchange(self) -> None:
        """Raises ExchangeTimeout where a GPU waited in vain, which it cannot say itself: once the GPU is done."""
        if self._attention is not None:
            self._attention.check()

    def close(self) -> None:
        """Closes the exchange; collective."""
        if self._attention is not None:
            self._attention.close()
            self._attention = None

    def sequence_parallel(self) -> SequenceParallelModelWrapper:
        """Returns the transformer with the video tokens spread over the ranks; collective."""
        manager = self.open_exchange()
        return SequenceParallelModelWrapper(self.transformer, manager)

    def _attention_manager(self) -> AttentionManager:
        config = transformer_kwargs(self.registry.checkpoint(self.settings.checkpoint_files()))
        info = self.info
        return AttentionManager(
            self.settings.sp_max_tokens,
            config["num_attention_heads"],
            config["attention_head_dim"],
            self.dtype,
            info.group if info.world_size > 1 else None,
            transport=self.settings.transport,
            device=info.device,
            timeout=self.settings.exchange_timeout,
            wait_while_busy=info.device.type == "cpu",  # where ranks share cores, one may compute for minutes
        )

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

    def encode(self, request: Encode, say: Say = _say_nothing) -> list[PromptContext]:
        """Encodes prompts; the contexts come back on the first rank, on the CPU in float32; collective.

        `say` hears what LoRAs do to the connectors, when they are others than before.
        """
        self._encode_loras = (request.loras, say)
        return self.text.encode(request)

    def _connectors(self) -> nn.Module:
        """The text connectors with the LoRAs of the encode job that is running, and no others."""
        module = self._component("connectors", self._wide_dtype)
        specs, say = self._encode_loras
        self._prompt_loras.use(specs, lambda: module, say)
        return module

    def predict_seconds(self, video: Tensor, audio: Tensor) -> float:
        """Returns the seconds that a prompt's contexts, (1, S, D) and (1, S, D'), ask for."""
        return duration_head.predict_seconds(self._component("duration_head", torch.float32), video, audio)

    def upsample(self, latent: Tensor) -> Tensor:
        """Upscales a normalised video latent (B, C, F, H, W) in space; float32."""
        return upsampler.upsample(self._component("upsampler", self._wide_dtype), self.video_vae, latent)

    def decode_video(self, latent: Tensor, *, place: TilePlace | None = None, seed: int = 0) -> Tensor:
        """Decodes a normalised video latent (B, C, F, H, W) to pixels about -1..1, (B, 3, F', H', W').

        `place` and `seed` matter to decoders that draw noise, see VideoVAE.decode.
        """
        return self.video_vae.decode(latent, place=place, seed=seed)

    def encode_video(self, pixels: Tensor) -> Tensor:
        """Encodes pixels (1, 3, N, H, W) of -1..1, N = 8k+1, to a normalised latent (1, C, f, h, w), float32, CPU."""
        return self.video_vae.encode(pixels).cpu()

    def encode_audio(self, waveform: Tensor, rate: int) -> Tensor:
        """Encodes sound (B, channels, N) at any rate to a normalised latent (B, C', T, M), float32, CPU."""
        layout = mel_layout(self.registry.checkpoint(self.settings.checkpoint_files()))
        with _one_thread():
            spectrogram = mel.log_mel(waveform, rate, layout)
            return audio_vae.encode_mel(self._component("audio_vae", self._wide_dtype), spectrogram).cpu()

    def decode_audio(self, latent: Tensor) -> tuple[Tensor, int]:
        """Decodes a normalised audio latent (B, C, T, M) to sound (B, 2, N) float32 on the CPU and its rate in Hz."""
        module = self._component("vocoder", torch.float32)
        with _one_thread():
            spectrogram = audio_vae.decode_mel(self._component("audio_vae", self._wide_dtype), latent)
            return vocoder.synthesize(module, spectrogram).cpu(), vocoder.sample_rate(module)

    def _component(self, name: str, dtype: torch.dtype) -> nn.Module:
        if name not in self._modules:
            self.announce(COMPONENTS[name])
            self._modules[name] = self._builder(name).build(self.info.device, dtype)
        return self._modules[name]

    def _builder(self, name: str) -> ComponentBuilder:
        paths = self.settings.upsampler if name == "upsampler" else self.settings.checkpoint_files()
        if name == "transformer":
            return TransformerBuilder(
                paths, registry=self.registry, round_to_fp8=self.settings.precision == WEIGHTS_IN_FP8
            )
        return _BUILDERS[name](paths, registry=self.registry)


def _dtype(precision: str, device: torch.device) -> torch.dtype:
    if precision in ("auto", WEIGHTS_IN_FP8):
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
