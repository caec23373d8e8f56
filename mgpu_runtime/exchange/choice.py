"""The choice between transports: the fastest that works on every rank, and one line that says why."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from .agree import gather_texts
from .all2all import DEFAULT_TIMEOUT, All2All, OneRank
from .collectives import Collectives
from .errors import ExchangeError
from .ltx_kernels_adapter import LTXKernels
from .self_test import SECONDS, self_test
from .symmetric import SymmetricMemory

TRANSPORTS = ("auto", "csrc", "symmetric_memory", "ltx_kernels", "nccl", "gloo")
AGREE_SECONDS = 600.0  # another rank may compile in the meantime
_WORKS = "works"

log = logging.getLogger("mgpu_runtime.exchange")


@dataclass(frozen=True)
class _Settings:
    timeout: float
    copy_out: bool
    wait_while_busy: bool


Opener = Callable[[dist.ProcessGroup, torch.device, _Settings], All2All]


def exchange_for(
    group: dist.ProcessGroup | None,
    *,
    transport: str = "auto",
    device: torch.device | str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    copy_out: bool = True,
    wait_while_busy: bool = False,
) -> All2All:
    """Returns the fastest exchange that works for a group; None stands for a single process. Collective.

    `device` is what the tensors lie on, by default what the group's backend is for. `transport` is one of TRANSPORTS.
    Each candidate is opened and tested on every rank, and taken only if all succeed. With `wait_while_busy` a timeout
    that passes while the missing ranks' processes work is no error, where the transport can tell.

    Raises ValueError for a transport that does not exist or is not for the device, ExchangeError, on every rank, where
    none works, or the one asked for does not.
    """
    _check_name(transport)
    if group is None or dist.get_world_size(group) == 1:
        return OneRank()
    device, names = _same_for_all(group, transport, device)
    settings = _Settings(timeout, copy_out, wait_while_busy)
    reasons: dict[str, str] = {}
    for name in names:
        exchange, reason = _attempt(name, group, device, settings)
        if exchange is not None:
            exchange.description = _describe(exchange, reasons)
            if exchange.rank == 0:
                log.info("exchange: %s", exchange.description)
            return exchange
        reasons[name] = reason
    raise ExchangeError(_none_works(transport, reasons))


def _same_for_all(
    group: dist.ProcessGroup, transport: str, device: torch.device | str | None
) -> tuple[torch.device, tuple[str, ...]]:
    """Returns the device and what to try, after all ranks have said that they mean the same."""
    refusal = None
    try:
        device = _device(group, device)
        names = candidates(transport, device.type)
        mine = f"{transport} on {device.type}"
    except ValueError as error:
        refusal, mine = error, "nothing, for it cannot take part"
    said = gather_texts(group, mine, timeout=AGREE_SECONDS)
    if refusal is not None:
        raise refusal
    if len(set(said)) > 1:
        wishes = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said))
        raise ExchangeError(f"the ranks do not ask for the same exchange: {wishes}")
    return device, names


def candidates(transport: str, device_type: str) -> tuple[str, ...]:
    """Returns what `exchange_for` would try for "cpu" or "cuda", the fastest first. Needs no group.

    Raises ValueError for a transport that does not exist or is not for the device.
    """
    _check_name(transport)
    if device_type not in _OPENERS:
        raise ValueError(f"the exchange moves tensors of CUDA devices and of the CPU, not of {device_type}")
    names = tuple(_OPENERS[device_type])
    if transport == "auto":
        return names
    if transport not in names:
        other, here = ("the CPU", "CUDA devices") if device_type == "cuda" else ("CUDA devices", "the CPU")
        raise ValueError(
            f"transport {transport} is for {other}, and this exchange is for {here}: choose auto, {', '.join(names)}"
        )
    return (transport,)


def _check_name(transport: str) -> None:
    if transport not in TRANSPORTS:
        raise ValueError(f"there is no transport {transport!r} of the exchange: choose one of {', '.join(TRANSPORTS)}")


def _attempt(
    name: str, group: dist.ProcessGroup, device: torch.device, settings: _Settings
) -> tuple[All2All | None, str]:
    """Opens and tests one transport on all ranks. Returns it, or None and the reason, alike on every rank."""
    exchange, reason = None, _WORKS
    try:
        exchange = _OPENERS[device.type][name](group, device, settings)
    except (RuntimeError, OSError) as error:  # ExchangeError, and torch's word for a device or a group that fails
        reason = _first_line(error)
    reason = _agree(group, reason, AGREE_SECONDS)
    if reason == _WORKS:
        assert exchange is not None
        try:
            self_test(exchange, device)
        except RuntimeError as error:
            reason = _first_line(error)
        reason = _agree(group, reason, 2 * SECONDS)
    if reason == _WORKS:
        return exchange, ""
    if exchange is not None:
        exchange.close()
    return None, reason


def _agree(group: dist.ProcessGroup, reason: str, timeout: float) -> str:
    """Returns _WORKS if every rank says so, else the reason of the first that does not."""
    said = gather_texts(group, reason, timeout=timeout)
    failed = {rank: text for rank, text in enumerate(said) if text != _WORKS}
    if not failed:
        return _WORKS
    rank, text = next(iter(failed.items()))
    return text if len(failed) == len(said) else f"on rank {rank}: {text}"


def _describe(exchange: All2All, reasons: dict[str, str]) -> str:
    text = f"{exchange.description}, {exchange.world_size} workers"
    return f"{text} ({'; '.join(f'{name}: {reason}' for name, reason in reasons.items())})" if reasons else text


def _none_works(transport: str, reasons: dict[str, str]) -> str:
    if transport == "auto":
        return "no transport of the exchange works here: " + "; ".join(f"{n}: {r}" for n, r in reasons.items())
    return f"transport {transport} cannot work here: {reasons[transport]}. Choose auto to take the fastest that works"


def _device(group: dist.ProcessGroup, device: torch.device | str | None) -> torch.device:
    """Returns the device that is meant, with its index where it is a GPU."""
    if device is None:
        device = "cuda" if "nccl" in dist.get_backend_config(group) and torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"the exchange is asked for on {device}, but torch sees no CUDA device here")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _csrc(group: dist.ProcessGroup, device: torch.device, settings: _Settings) -> All2All:
    if device.type == "cpu":
        from .shared_memory import SharedMemory

        return SharedMemory(group, **asdict(settings))
    from .peer_memory import PeerMemory

    return PeerMemory(group, device=device, timeout=settings.timeout, copy_out=settings.copy_out)


_OPENERS: dict[str, dict[str, Opener]] = {
    "cpu": {
        "csrc": _csrc,
        "gloo": lambda group, device, settings: Collectives.open(group, device, **asdict(settings)),
    },
    "cuda": {
        "csrc": _csrc,
        "symmetric_memory": lambda group, device, settings: SymmetricMemory.open(group, device, **asdict(settings)),
        "ltx_kernels": lambda group, device, settings: LTXKernels.open(group, device, **asdict(settings)),
        "nccl": lambda group, device, settings: Collectives.open(group, device, **asdict(settings)),
    },
}
