"""The exchange over the optional package `ltx_kernels`, Lightricks' own all-to-all between the GPUs of one machine."""

import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from .agree import gather_or_fail
from .all2all import All2All, Done, Pending, result_shape
from .collectives import Collectives
from .errors import ExchangeError
from .layout import Geometry, Move
from .stream_order import refuse_capture

DTYPES = (torch.bfloat16, torch.float8_e4m3fn)
_ACCESS = 16  # bytes it moves at once

log = logging.getLogger("mgpu_runtime.exchange")


class LTXKernels(All2All):
    """Moves what the package can (even counts, its dtypes) through it, and the rest through the group's collectives.

    Results are copies always: the package has one buffer for an instance, which the next call of any rank overwrites.
    Two instances of a dtype take turns, so that this happens only after every rank has copied. A rank that does not
    arrive ends the package's kernel with a CUDA error after `timeout`, which says no rank and which the next call of
    CUDA raises.
    """

    transport = "ltx_kernels"

    def __init__(self, package: ModuleType, rest: Collectives) -> None:
        super().__init__(rest.rank, rest.world_size, timeout=rest.timeout)
        self.group, self.device = rest.group, rest.device
        self._package, self._rest = package, rest
        self._pairs: dict[torch.dtype, _Pair] = {}
        self._said = False

    @classmethod
    def open(cls, group: dist.ProcessGroup, device: torch.device, open_rest: Callable[[], Collectives]) -> Self:
        """Opens the exchange of a group, and by `open_rest` what moves the rest, with its timeout. Collective.

        Raises ExchangeError where any rank lacks the package.
        """
        package, reason = None, ""
        try:
            package = importlib.import_module("ltx_kernels")
        except ImportError as error:
            reason = _why_missing(error)
        if package is not None and not hasattr(package, "All2All"):
            reason = "the installed package ltx_kernels has no All2All"
        if device.type == "cuda" and device.index != dist.get_rank(group):
            reason = f"ltx_kernels wants GPU {dist.get_rank(group)} for rank {dist.get_rank(group)}, not {device}"
        gather_or_fail(group, reason)
        return cls(package, open_rest())

    def close(self) -> None:
        for pair in self._pairs.values():
            pair.destroy()
        self._pairs.clear()
        self._rest.close()

    def _start(self, geometry: Geometry, x: Tensor) -> Pending:
        self._rest.timeout = self.timeout
        refuse_capture(self.transport)  # whose turn it is would be the same in every replay
        if not _fits(geometry, x):
            self._say_once(geometry, x)
            return self._rest._start(geometry, x)
        self._rest.begin(geometry, x.dtype)
        try:
            return Done(self._move(geometry, x.detach().contiguous()))
        except (TypeError, AttributeError) as error:
            raise ExchangeError(f"the installed package ltx_kernels has another interface: {error}") from error

    def _move(self, geometry: Geometry, x: Tensor) -> Tensor:
        pair = self._pairs.get(x.dtype)
        if pair is None:
            pair = self._pairs[x.dtype] = _Pair(self, x.dtype)
        instance = pair.next(geometry, x)
        if geometry.move is Move.SEND_RECV_HEADS:
            return instance.send_recv_heads(x, copy_out=True)
        if geometry.move is Move.GATHER_HEADS:
            return instance.gather_heads(x, copy_out=True)
        result = instance.allgather(x.flatten(2).unsqueeze(2), copy_out=True)
        return result.view(result_shape(geometry, self.rank, x))

    def _say_once(self, geometry: Geometry, x: Tensor) -> None:
        if not self._said and self.rank == 0:
            log.info(
                "exchange: ltx_kernels takes no %s with tokens %s and heads %s; such go through %s",
                x.dtype,
                list(geometry.tokens),
                list(geometry.heads),
                self._rest.description,
            )
        self._said = True


class _Pair:
    """Two instances of the package's class for one dtype, made as large as needed."""

    def __init__(self, exchange: LTXKernels, dtype: torch.dtype) -> None:
        self._exchange, self._dtype = exchange, dtype
        self._instances: list[Any] = []
        self._outgrown: list[Any] = []  # peers may still have their memory mapped
        self._room = 0  # elements
        self._turn = 0
        self._told: dict[int, tuple[float, tuple[int, ...]]] = {}

    def next(self, geometry: Geometry, x: Tensor) -> Any:
        """Returns the instance whose turn it is, with room for the exchange. Collective where it must grow."""
        largest = max(geometry.result_bytes(rank) for rank in range(geometry.world_size)) // x.element_size()
        if largest > self._room:
            self._grow(largest, x.shape[2:].numel() * geometry.world_size)
        self._turn = 1 - self._turn
        instance = self._instances[self._turn]
        told = (self._exchange.timeout, geometry.tokens)
        if self._told.get(self._turn) != told:
            if hasattr(instance, "set_timeout_seconds"):
                instance.set_timeout_seconds(self._exchange.timeout)
            if hasattr(instance, "set_rank_tokens"):  # versions that do not take the counts from the tensor
                instance.set_rank_tokens(list(geometry.tokens))
            self._told[self._turn] = told
        return instance

    def _grow(self, elements: int, width: int) -> None:
        exchange = self._exchange
        self._outgrown += self._instances
        tokens = -(-max(elements, 2 * self._room) // width)
        self._room = tokens * width
        self._told.clear()
        self._instances = [
            exchange._package.All2All(
                exchange.rank,
                exchange.world_size,
                tokens,
                width,
                _num_sms(exchange.device),
                self._dtype,
                group=exchange.group,
            )
            for _ in range(2)
        ]

    def destroy(self) -> None:
        for instance in self._outgrown + self._instances:
            instance.destroy()
        self._outgrown, self._instances = [], []


def _fits(geometry: Geometry, x: Tensor) -> bool:
    even = len(set(geometry.tokens)) == 1 and len(set(geometry.heads)) == 1
    row = x.shape[3:].numel() if geometry.move is not Move.ALLGATHER else x.shape[2:].numel()
    return even and x.numel() > 0 and x.dtype in DTYPES and row * x.element_size() % _ACCESS == 0


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _why_missing(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "ltx_kernels":
        return "the package ltx_kernels is not installed"
    return f"the package ltx_kernels cannot be loaded: {error}"
