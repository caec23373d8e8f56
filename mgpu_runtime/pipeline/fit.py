"""Whether a model's weights fit the machine: what each worker holds against what its device has free."""

from dataclasses import dataclass

import torch

from ..weights.keymaps import COMPONENTS
from ..weights.report import GIB, FileReport, PartReport
from .settings import WEIGHTS_IN_FP8

# Held by every worker; the other parts live on the first worker alone.
_ON_EVERY_WORKER = (COMPONENTS["transformer"], COMPONENTS["video_vae"])
_BYTES = {"auto": 2, "bf16": 2, "fp16": 2, "fp32": 4, WEIGHTS_IN_FP8: 1}
_PER_CLIP = 0.1  # of a device, kept for the clip itself


@dataclass(frozen=True)
class DeviceFit:
    """One device: bytes its workers' weights take, bytes free now, bytes it has in all."""

    name: str
    needed: int
    free: int
    total: int

    @property
    def fits(self) -> bool:
        """Whether the weights fit with a tenth of the device left for the clip."""
        return self.needed <= self.free - self.total * _PER_CLIP

    def line(self) -> str:
        """Returns the comparison as a line of text."""
        verdict = "fits" if self.fits else "does not fit"
        return f"{self.name}: weights {self.needed / GIB:.1f} GiB, free {self.free / GIB:.1f} GiB: {verdict}"


def fit(report: FileReport, devices: list[str], precision: str = "auto") -> list[DeviceFit]:
    """Compares a model's weights with the free memory of devices ("cuda:0", ..., or "cpu" once per worker).

    GPU workers hold weights in the compute precision, quantised parts as they are stored. CPU workers share the file's
    own pages, so their weights count once. What a clip needs besides is not counted: it depends on its size.
    """
    if devices[0] == "cpu":
        free, total = _main_memory()
        return [DeviceFit("main memory", sum(part.num_bytes for part in report.parts), free, total)]
    fits = []
    for index, device in enumerate(devices):
        held = [part for part in report.parts if index == 0 or part.title in _ON_EVERY_WORKER]
        free, total = torch.cuda.mem_get_info(device)
        fits.append(DeviceFit(device, sum(_bytes_on_gpu(part, precision) for part in held), free, total))
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
