"""What a fleet is made of: files, devices, precision, limits. A description; nothing starts from it alone."""

import os
from dataclasses import dataclass

PRECISIONS = ("auto", "bf16", "fp16", "fp32")
DEFAULT_SP_MAX_TOKENS = 32768


@dataclass(frozen=True)
class LTXSettings:
    """Describes one configuration of the fleet; equal settings share one warm fleet.

    Attributes:
        checkpoint: path of a Lightricks single-file checkpoint.
        text_encoder: path of a Gemma folder, or None for a fleet that never encodes.
        upsampler: path of a latent upsampler file, or None for a fleet that never upscales.
        devices: "auto", a list such as "0,1", or "cpu:N".
        precision: "auto" (bf16 on CUDA, fp32 on the CPU), "bf16", "fp16" or "fp32".
        sp_max_tokens: the most video tokens one sequence-parallel forward may hold.

    Raises ValueError for a relative path, an unknown precision or a limit below 1.
    """

    checkpoint: str
    text_encoder: str | None = None
    upsampler: str | None = None
    devices: str = "auto"
    precision: str = "auto"
    sp_max_tokens: int = DEFAULT_SP_MAX_TOKENS

    def __post_init__(self) -> None:
        for name in ("checkpoint", "text_encoder", "upsampler"):
            path = getattr(self, name)
            if path is not None and not os.path.isabs(path):
                raise ValueError(f"{name} must be an absolute path, got {path!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if self.sp_max_tokens < 1:
            raise ValueError(f"sp_max_tokens must be at least 1, got {self.sp_max_tokens}")

    def stamps(self) -> tuple[tuple[str, int, int], ...]:
        """Returns path, time (ns) and size (bytes) of every file this configuration reads; folders file by file.

        Raises ValueError for a path that is not there.
        """
        return tuple(stamp for path in self.files() for stamp in _stamps(path))

    def files(self) -> tuple[str, ...]:
        """Returns the paths this configuration reads, in a fixed order."""
        return tuple(path for path in (self.checkpoint, self.text_encoder, self.upsampler) if path is not None)


def _stamps(path: str) -> list[tuple[str, int, int]]:
    paths = [path]
    if os.path.isdir(path):
        paths = sorted(entry.path for entry in os.scandir(path) if entry.is_file())
    try:
        return [(path, (status := os.stat(path)).st_mtime_ns, status.st_size) for path in paths]
    except FileNotFoundError as error:
        raise ValueError(f"There is no file {error.filename}. Check the path in Load LTX MGPU.") from None
