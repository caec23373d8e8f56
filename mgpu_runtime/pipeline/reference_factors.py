"""How much smaller and slower an IC-LoRA wants its reference clip, as its file says."""

from collections.abc import Iterable

from ..weights.lora import LoRAFile
from .jobs import LoRASpec


def reference_factors(loras: Iterable[LoRASpec]) -> tuple[int, int]:
    """Returns the factors (downscale, time_scale) that the LoRAs of a model ask for; 1 where none asks.

    Reads headers alone. Raises ValueError for two LoRAs that contradict each other.
    """
    files = [LoRAFile(lora.path) for lora in loras]
    downscale = _common("reference_downscale_factor", {file.path: file.reference_downscale for file in files})
    time_scale = _common("reference_temporal_scale_factor", {file.path: file.reference_time_scale for file in files})
    return downscale, time_scale


def _common(key: str, factors: dict[str, int]) -> int:
    """Returns the one factor that LoRAs ask for; 1 asks for nothing."""
    asked = {path: factor for path, factor in factors.items() if factor != 1}
    if len(set(asked.values())) > 1:
        wishes = ", ".join(f"{path} {factor}" for path, factor in asked.items())
        raise ValueError(
            f"the LoRAs want different references ({key}: {wishes}): load one of them, or set the factor in "
            "Reference Clip"
        )
    return next(iter(asked.values()), 1)
