"""What a fleet is made of: files, devices, precision, limits. A description; nothing starts from it alone."""

import math
import os
from dataclasses import dataclass

from ..exchange import DEFAULT_TIMEOUT
from ..exchange.choice import TRANSPORTS
from ..weights.header import ContentKey, content_keys

WEIGHTS_IN_FP8 = "fp8"  # the one precision that is of the weights: what they are computed in is as "auto" chooses
PRECISIONS = ("auto", "bf16", "fp16", "fp32", WEIGHTS_IN_FP8)
DEFAULT_SP_MAX_TOKENS = 32768
TIMEOUT_VARIABLE = "LTX_MGPU_EXCHANGE_TIMEOUT"
_PARTS = ("video_vae", "audio_vae", "text_projection", "duration_head")  # fields that name a part's own file


@dataclass(frozen=True)
class LTXSettings:
    """Describes one configuration of the fleet; equal settings share one warm fleet.

    Attributes:
        checkpoint: path of the file with the transformer: Lightricks' whole model, or the transformer alone.
        text_encoder: path of a Gemma folder or single file, or None for a fleet that never encodes.
        upsampler: path of a latent upsampler file, or None for a fleet that never upscales.
        devices: "auto", a list such as "0,1", or "cpu:N".
        precision: "auto" (bf16 on CUDA, fp32 on the CPU), "bf16", "fp16" or "fp32": what is computed in; "fp8": as
            auto, with the transformer's big weights rounded to 8 bit. Quantised files stay as they are in all.
        sp_max_tokens: the most video tokens one sequence-parallel forward may hold.
        video_vae, audio_vae, text_projection, duration_head: paths of files that hold these parts where the checkpoint
            does not, or that are to be used in place of its own; None otherwise. The vocoder is in the audio_vae file.
        transport: how workers exchange tensors in sequence parallelism: "auto", the fastest that works here, or the
            name of one.
        exchange_timeout: seconds that a worker waits for another in an exchange before the job fails.

    Raises ValueError for a relative path, an unknown precision or transport, a limit below 1, or no time to wait.
    """

    checkpoint: str
    text_encoder: str | None = None
    upsampler: str | None = None
    devices: str = "auto"
    precision: str = "auto"
    sp_max_tokens: int = DEFAULT_SP_MAX_TOKENS
    video_vae: str | None = None
    audio_vae: str | None = None
    text_projection: str | None = None
    duration_head: str | None = None
    transport: str = "auto"
    exchange_timeout: float = DEFAULT_TIMEOUT

    def __post_init__(self) -> None:
        for name in ("checkpoint", "text_encoder", "upsampler", *_PARTS):
            path = getattr(self, name)
            if path is not None and not os.path.isabs(path):
                raise ValueError(f"{name} must be an absolute path, got {path!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if self.sp_max_tokens < 1:
            raise ValueError(f"sp_max_tokens must be at least 1, got {self.sp_max_tokens}")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {self.transport!r}")
        if not (self.exchange_timeout > 0 and math.isfinite(self.exchange_timeout)):
            raise ValueError(f"exchange_timeout must be a number of seconds above 0, got {self.exchange_timeout:g}")

    def stamps(self) -> tuple[ContentKey, ...]:
        """Returns path, time (ns) and size (bytes) of every file this configuration reads; folders file by file.

        Raises ValueError for a path that is not there.
        """
        return tuple(stamp for path in self.files() for stamp in content_keys(path))

    def files(self) -> tuple[str, ...]:
        """Returns the paths this configuration reads, in a fixed order."""
        paths = (self.checkpoint, self.text_encoder, self.upsampler, *self._part_files())
        return tuple(dict.fromkeys(path for path in paths if path is not None))

    def checkpoint_files(self) -> tuple[str, ...]:
        """Returns the files that make one model: the checkpoint first, then those named for parts of it.

        A text encoder's single file is among them: it may hold the text projection.
        """
        text_encoder = self.text_encoder if self.text_encoder and os.path.isfile(self.text_encoder) else None
        paths = (self.checkpoint, text_encoder, *self._part_files())
        return tuple(dict.fromkeys(path for path in paths if path is not None))

    def _part_files(self) -> tuple[str | None, ...]:
        return tuple(getattr(self, name) for name in _PARTS)


def default_exchange_timeout() -> float:
    """Returns the seconds that the environment asks for, else the exchange's own; raises ValueError for no number."""
    text = os.environ.get(TIMEOUT_VARIABLE, "").strip()
    if not text:
        return DEFAULT_TIMEOUT
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{TIMEOUT_VARIABLE} must be a number of seconds, got {text!r}") from None
