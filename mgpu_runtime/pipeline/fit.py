"""Whether a model's weights fit the machine: what each worker holds against what its device has free."""

from dataclasses import dataclass

import torch

from ..weights.keymaps import COMPONENTS
from ..weights.report import FileReport, PartReport, say_size
from .settings import WEIGHTS_IN_FP8

# Held by every worker; the other parts live on the first worker alone.
_ON_EVERY_WORKER = (COMPONENTS["transformer"], COMPONENTS["video_vae"])
_BYTES = {"auto": 2, "bf16": 2, "fp16": 2, "fp32": 4, WEIGHTS_IN_FP8: 1}
_PER_CLIP = 0.1  # of a device, kept for the clip itself


@dataclass(frozen=True)
class DeviceFit:
    """One device: bytes its workers' weights take, bytes free now, bytes it has in all, what is not counted."""

    name: str
    needed: int
    free: int
    total: int
    left_out: str = ""

    @property
    def fits(self) -> bool:
        """Whether the weights fit with a tenth of the device left for the clip."""
        return self.needed <= self.free - self.total * _PER_CLIP

    def line(self) -> str:
        """Returns the comparison as a line of text."""
        verdict = "fits" if self.fits else "does not fit"
        rest = f" (not counted: {self.left_out})" if self.left_out else ""
        return f"{self.name}: weights {say_size(self.needed)}, free {say_size(self.free)}: {verdict}{rest}"


def fit(report: FileReport, devices: list[str], precision: str = "auto") -> list[DeviceFit]:
    """Compares a model's weights with the free memory of devices ("cuda:0", ..., or "cpu" once per worker).

    GPU workers hold weights in the compute precision, quantised parts as they are stored. CPU workers share the file's
    own pages, so their weights count once. LoRAs are fused into the weights, and take no room of their own. What a clip
    needs besides is not counted: it depends on its size. Returns nothing where there are no weights.
    """
    parts = [part for part in report.parts if part.kind != "LoRA"]
    if not parts:
        return []
    has_encoder = any(part.kind == "text encoder" for part in parts)
    needs_encoder = any(part.title == COMPONENTS["transformer"] for part in parts) and not has_encoder
    left_out = "the text encoder" if needs_encoder else ""
    if devices[0] == "cpu":
        free, total = _main_memory()
        return [DeviceFit("main memory", sum(part.num_bytes for part in parts), free, total, left_out)]
    fits = []
    for index, device in enumerate(devices):
        held = [part for part in parts if index == 0 or part.title in _ON_EVERY_WORKER]
        free, total = torch.cuda.mem_get_info(device)
        needed = sum(_bytes_on_gpu(part, precision) for part in held)
        fits.append(DeviceFit(device, needed, free, total, left_out if index == 0 else ""))
    return fits


def _bytes_on_gpu(part: PartReport, precision: str) -> int:
    if part.precision.startswith(("fp8", "nvfp4")):
        return part.num_bytes
    if part.title == COMPONENTS["vocoder"]:
        return part.parameters * _BYTES["fp32"]
    if precision == WEIGHTS_IN_FP8 and part.title != COMPONENTS["transformer"]:
        precision = "auto"  # only the transformer's weights are rounded to 8 bit
    return part.parameters * _BYTES[precision]


def _main_memory() -> tuple[int, int]:
    """Returns bytes available and in all of the machine's main memory, as the kernel counts them."""
    with open("/proc/meminfo", encoding="utf-8") as file:
        values = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":", 1) for line in file)}
    return values["MemAvailable"], values["MemTotal"]
