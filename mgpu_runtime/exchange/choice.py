"""The choice between transports: the fastest that works on every rank, and one line that says why."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import torch
import torch.distributed as dist

from .agree import FIRST_SECONDS, PATIENCE, agree_on, gather_texts, watching
from .all2all import DEFAULT_TIMEOUT, All2All, OneRank
from .collectives import Collectives
from .errors import AgreementLost, ExchangeError, ExchangeTimeout, GaveUp
from .ltx_kernels_adapter import LTXKernels
from .processes import Processes
from .self_test import SECONDS, self_test
from .symmetric import SymmetricMemory

TRANSPORTS = ("auto", "csrc", "symmetric_memory", "ltx_kernels", "nccl", "gloo")
STEP_SECONDS = 30.0  # the ranks wait for each other where none has much to do
COMPILE_SECONDS = {"cpu": 150.0, "cuda": 660.0}  # more than native.py gives a build and another process's before it
# What opening or testing a transport may raise: bad luck, another version of something, a fault of this package. All
# of it must reach the other ranks as words, or they would wait for this one.
_FAILURES = (RuntimeError, OSError, ValueError, TypeError, AttributeError, LookupError, ImportError, MemoryError)
_LOST = (ExchangeTimeout, AgreementLost)  # in opening: whoever goes on would be out of step with the others

log = logging.getLogger("mgpu_runtime.exchange")


@dataclass(frozen=True)
class _Settings:
    timeout: float
    copy_out: bool
    wait_while_busy: bool
    processes: Processes


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
    none works, or the one asked for does not. A rank that does not come at all is waited for `timeout` or 60 seconds,
    whichever is more, and named where the group has a store. One that ends or is stopped later is named, the former
    within seconds, the latter once it has been stopped for `timeout` seconds. These raise PeerGone and ExchangeTimeout,
    and AgreementLost where a rank is out of step; the group's collectives are of no more use then.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"the exchange needs a process group that this process is a member of, got {group!r}")
    if group is None or dist.get_world_size(group) == 1:
        _check_arguments(transport, timeout)
        return OneRank()
    device, names, processes = _same_for_all(group, transport, device, timeout)
    settings = _Settings(timeout, copy_out, wait_while_busy, processes)
    reasons: dict[str, str] = {}
    for name in names:
        with watching(group, processes, timeout):
            exchange, reason = _attempt(name, group, device, settings)
        if exchange is not None:
            exchange.description = _describe(exchange, reasons)
            if exchange.rank == 0:
                log.info("exchange: %s", exchange.description)
            return exchange
        reasons[name] = reason
    raise ExchangeError(_none_works(transport, reasons))


def _same_for_all(
    group: dist.ProcessGroup, transport: str, device: torch.device | str | None, timeout: float
) -> tuple[torch.device, tuple[str, ...], Processes]:
    """Returns the device, what to try, and the processes, after all ranks have said that they mean the same."""
    refusal, patience = None, PATIENCE
    try:
        _check_arguments(transport, timeout)
        patience = timeout
        device = _device(group, device)
        names = candidates(transport, device.type)
        mine = f"{transport} on {device.type}"
    except (ValueError, TypeError, RuntimeError) as error:  # the last two are torch's for what is no device
        refusal, mine = error, "nothing, for it cannot take part"
    processes = Processes.of(group, timeout=max(FIRST_SECONDS, patience))
    said = gather_texts(group, mine, timeout=STEP_SECONDS, processes=processes, patience=patience)
    if refusal is not None:
        raise refusal
    if len(set(said)) > 1:
        wishes = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said))
        raise ExchangeError(f"the ranks do not ask for the same exchange: {wishes}")
    return device, names, processes


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


def _check_arguments(transport: str, timeout: float) -> None:
    _check_name(transport)
    if not isinstance(timeout, Real) or math.isnan(timeout) or timeout <= 0:
        raise ValueError(f"the exchange's timeout must be a number of seconds above 0, got {timeout!r}")


def _check_name(transport: str) -> None:
    if transport not in TRANSPORTS:
        raise ValueError(f"there is no transport {transport!r} of the exchange: choose one of {', '.join(TRANSPORTS)}")


def _attempt(
    name: str, group: dist.ProcessGroup, device: torch.device, settings: _Settings
) -> tuple[All2All | None, str]:
    """Opens and tests one transport on all ranks. Returns it, or None and the reason, alike on every rank.

    Raises ExchangeTimeout, PeerGone or AgreementLost where the ranks have lost each other.
    """
    opened: list[All2All] = []
    seconds = COMPILE_SECONDS[device.type] if name == "csrc" else 2 * FIRST_SECONDS

    def open_it() -> None:
        opened.append(_OPENERS[device.type][name](group, device, settings))
        opened[0].copy_out = settings.copy_out

    try:
        reason = _step(open_it, group, seconds, _LOST)
        if not reason:
            # A path that loses data also ends in a timeout here; whether a rank is lost the agreement behind it tells.
            reason = _step(lambda: self_test(opened[0], device), group, 2 * SECONDS, (AgreementLost,))
        return (None, reason) if reason else (opened.pop(), "")
    finally:
        for exchange in opened:
            exchange.close()


def _step(
    do: Callable[[], object],
    group: dist.ProcessGroup,
    timeout: float,
    lost: tuple[type[ExchangeError], ...],
) -> str:
    """Does a step of opening on this rank. Returns nothing, or why it failed on some rank, alike on every rank.

    Raises what is of the types `lost` at once, and what `agree_on` raises.
    """
    failure = ""
    try:
        do()
    except lost:
        raise
    except GaveUp as error:  # the ranks have agreed by that
        return str(error)
    except _FAILURES as error:
        failure = _first_line(error)
    return agree_on(group, failure, timeout=timeout)


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

        return SharedMemory(group, timeout=settings.timeout, wait_while_busy=settings.wait_while_busy)
    from .peer_memory import PeerMemory

    return PeerMemory(group, device, settings.processes, timeout=settings.timeout)


def _symmetric_memory(group: dist.ProcessGroup, device: torch.device, settings: _Settings) -> All2All:
    return SymmetricMemory.open(group, device, settings.processes, timeout=settings.timeout)


def _ltx_kernels(group: dist.ProcessGroup, device: torch.device, settings: _Settings) -> All2All:
    return LTXKernels.open(group, device, lambda: _collectives(group, device, settings))


def _collectives(group: dist.ProcessGroup, device: torch.device, settings: _Settings) -> All2All:
    return Collectives.open(
        group,
        device,
        processes=settings.processes,
        timeout=settings.timeout,
        wait_while_busy=settings.wait_while_busy,
    )


_OPENERS: dict[str, dict[str, Opener]] = {
    "cpu": {
        "csrc": _csrc,
        "gloo": _collectives,
    },
    "cuda": {
        "csrc": _csrc,
        "symmetric_memory": _symmetric_memory,
        "ltx_kernels": _ltx_kernels,
        "nccl": _collectives,
    },
}
