"""From what a person writes about devices to one device name per worker."""

import re

_MAX_CPU_WORKERS = 64
_FORMS = "Write 'auto', a list such as '0,1' or 'cuda:0,cuda:1', or 'cpu:N' for N CPU workers."
_CPU = re.compile(r"cpu(?::(\d+))?")
_CUDA = re.compile(r"(?:cuda:)?(\d+)")


def parse_devices(spec: str, *, num_cuda: int | None = None) -> list[str]:
    """Returns one device name per worker, such as ['cuda:0', 'cuda:1'] or ['cpu', 'cpu'].

    `num_cuda` is the number of visible CUDA devices; None asks torch, which creates no CUDA context.
    Raises ValueError for text that is not a device list, for no device, for a device named twice and for one
    that is not visible.
    """
    text = spec.strip().lower()
    if match := _CPU.fullmatch(text):
        return _cpu_workers(spec, int(match[1] or 1))
    visible = count_cuda() if num_cuda is None else num_cuda
    if text == "auto":
        return [f"cuda:{i}" for i in range(visible)] or ["cpu"]
    indices = [_cuda_index(spec, part.strip()) for part in text.split(",")]
    if len(set(indices)) < len(indices):
        raise ValueError(f"Devices {spec!r} name a GPU twice; each GPU takes one worker. {_FORMS}")
    if missing := [i for i in indices if i >= visible]:
        asked = f"Devices {spec!r} ask for {len(indices)} GPU{'s' if len(indices) > 1 else ''}"
        if not visible:
            raise ValueError(f"{asked}, but no GPU is visible here. Choose 'cpu:N', such as 'cpu:2'.")
        raise ValueError(
            f"{asked}, but {_not_visible(missing)}: {visible} CUDA devices are visible here, so {_allowed(visible)}. "
            "Choose from those, or 'auto', or 'cpu:N'."
        )
    return [f"cuda:{i}" for i in indices]


def first_devices(num_gpus: int) -> list[str]:
    """Returns the names of the first `num_gpus` CUDA devices; ValueError when there are fewer."""
    visible = count_cuda()
    if not visible:
        raise ValueError(
            f"num_gpus={num_gpus} was requested, but no GPU is visible here. Pass devices=['cpu', 'cpu'] instead."
        )
    if not 1 <= num_gpus <= visible:
        raise ValueError(
            f"num_gpus={num_gpus} was requested, but {visible} CUDA devices are visible here, so 1 to {visible} are "
            "allowed. Ask for fewer, or pass devices=['cpu', 'cpu']."
        )
    return [f"cuda:{i}" for i in range(num_gpus)]


def check_devices(devices: list[str]) -> list[str]:
    """Returns the device names of a fleet, all 'cpu' or all distinct and visible CUDA ones; else ValueError."""
    if devices and all(device == "cpu" for device in devices):
        return _cpu_workers(devices, len(devices))
    return parse_devices(",".join(devices))


def count_cuda() -> int:
    """Returns how many CUDA devices this process can see, without creating a CUDA context."""
    import torch

    return torch.cuda.device_count()


def _cpu_workers(spec: object, count: int) -> list[str]:
    if not 1 <= count <= _MAX_CPU_WORKERS:
        raise ValueError(f"Devices {spec!r} ask for {count} CPU workers; 1 to {_MAX_CPU_WORKERS} are allowed.")
    return ["cpu"] * count


def _cuda_index(spec: str, part: str) -> int:
    match = _CUDA.fullmatch(part)
    if match is None:
        raise ValueError(f"Devices {spec!r} cannot be read at {part!r}. {_FORMS}")
    return int(match[1])


def _not_visible(missing: list[int]) -> str:
    names = ", ".join(f"cuda:{i}" for i in missing)
    return f"{names} {'is' if len(missing) == 1 else 'are'} not visible"


def _allowed(visible: int) -> str:
    return f"cuda:0 to cuda:{visible - 1} are allowed" if visible > 1 else "only cuda:0 is allowed"
