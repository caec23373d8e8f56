"""The exchange over PyTorch's symmetric memory: GPU memory that all ranks map, without a compiler."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from .agree import gather_or_fail, gather_texts
from .all2all import DEFAULT_TIMEOUT, All2All, Pending, result_shape
from .board import Board
from .errors import ExchangeError, unusable
from .layout import Banks, Geometry
from .parts import got_from, sent_to
from .processes import Processes
from .stream_order import refuse_capture

_FIRST_ROOM = 1 << 20  # bytes of one bank


class Barrier(Protocol):
    """Orders the ranks on the stream that is current: what each wrote before it can be read behind it by all."""

    def __call__(self, timeout: float) -> None: ...


@dataclass(frozen=True)
class Room:
    """Memory of all ranks: one flat tensor of bytes for each, this rank's among them; two banks of `bank_bytes`."""

    memory: list[Tensor]
    bank_bytes: int
    barrier: Barrier


class SymmetricMemory(All2All):
    """Copies this rank's parts into the peers' results with ordinary copy kernels, on a stream of its own.

    One barrier on the stream ends each exchange; the host never waits. A rank that does not arrive within `timeout`
    makes torch's barrier kernel stop with an error, which names the rank on stderr; the CUDA context is lost then, and
    the next call of CUDA raises. So nothing hangs, but the process must be started anew.
    """

    transport = "symmetric_memory"

    def __init__(
        self,
        rank: int,
        world_size: int,
        make_room: Callable[[int], Room],
        stream: "_Stream | None",
        *,
        device: torch.device,
        timeout: float = DEFAULT_TIMEOUT,
        copy_out: bool = True,
        board: Board | None = None,
    ) -> None:
        """`make_room` makes memory with banks of so many bytes, and is collective; `stream` is None on the CPU."""
        super().__init__(rank, world_size, timeout=timeout, copy_out=copy_out)
        self.description = "symmetric_memory (PyTorch)"
        self.device = device
        self._make_room, self._stream = make_room, stream
        self._banks = Banks(world_size)
        self._rooms = [make_room(_FIRST_ROOM)]  # the last is in use; results may still lie in the others
        self._board = board
        self._count = 0
        self._broken = ""

    @classmethod
    def open(
        cls, group: dist.ProcessGroup, device: torch.device, processes: Processes, *, timeout: float = DEFAULT_TIMEOUT
    ) -> Self:
        """Opens the exchange of a group on CUDA. Collective. Raises ExchangeError where GPUs cannot map each other."""
        return cls(
            dist.get_rank(group),
            dist.get_world_size(group),
            lambda bank_bytes: _torch_room(group, device, bank_bytes),
            _Stream(device),
            device=device,
            timeout=timeout,
            board=Board.of(group, processes, patience=timeout),
        )

    def close(self) -> None:
        self._broken = self._broken or "it has been closed"
        if self._rooms and self._stream is not None:
            self._stream.finish()  # peers may be reading and writing until the last exchange is over
        self._rooms = []
        if self._board is not None:
            self._board.close()
            self._board = None

    def _start(self, geometry: Geometry, x: Tensor) -> Pending:
        if self._broken:
            raise unusable(self._broken)
        if x.device.type != self.device.type:
            raise ValueError(f"{self.transport} moves {self.device.type} tensors, got one on {x.device}")
        refuse_capture(self.transport)
        try:
            self._compare(geometry, x.dtype)
            return self._push(geometry, x.detach())
        except RuntimeError as error:  # the banks of the ranks may be out of step now
            self._broken = str(error)
            raise

    def _compare(self, geometry: Geometry, dtype: torch.dtype) -> None:
        """Counts an exchange. Raises ExchangeError where another rank's is known to be another one."""
        self._count += 1
        if self._board is not None:
            self._board.started(self._count, geometry, dtype)
            self._board.refuse_unlike(self._count, f"{geometry.move.value} number {self._count} over {self.transport}")

    def _push(self, geometry: Geometry, x: Tensor) -> Pending:
        bank, offsets = self._banks.place(geometry)
        room = self._room_for(max(self._banks.used))
        places = [bank * room.bank_bytes + offset for offset in offsets]
        with self._after_current():
            for step in range(1, self.world_size + 1):  # each rank begins with another peer
                receiver = (self.rank + step) % self.world_size
                part = sent_to(geometry, x, receiver)
                if part.numel():
                    result = _result(room, places, geometry, receiver, x)
                    got_from(geometry, result, self.rank).copy_(part)
            room.barrier(self.timeout)
            done = self._stream.mark() if self._stream is not None else None
        return _Arriving(self, done, x, _result(room, places, geometry, self.rank, x))

    def _room_for(self, bank_bytes: int) -> Room:
        """Returns room for banks of so many bytes; all ranks need the same at the same time."""
        if bank_bytes > self._rooms[-1].bank_bytes:
            self._rooms.append(self._make_room(1 << (bank_bytes - 1).bit_length()))
        return self._rooms[-1]

    @contextmanager
    def _after_current(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with self._stream.after_current():
                yield


class _Arriving:
    """An exchange on its way on the side stream. Holds the input until the current stream is behind its reading."""

    def __init__(self, exchange: SymmetricMemory, done: torch.cuda.Event | None, x: Tensor, result: Tensor) -> None:
        self._exchange, self._done, self._x, self._result = exchange, done, x, result

    def wait(self) -> Tensor:
        exchange = self._exchange
        if exchange._stream is not None:
            exchange._stream.let_current_wait(self._done)
        exchange._banks.waited()
        return self._result.clone() if exchange.copy_out else self._result


class _Stream:
    """A stream beside those that compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._readers: set[torch.cuda.Stream] = set()  # of results since the last start

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Runs what is inside on this stream, behind what the current stream and those of readers hold now."""
        for stream in {torch.cuda.current_stream(self._device), *self._readers}:
            self._stream.wait_stream(stream)
        self._readers.clear()
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        return self._stream.record_event()

    def let_current_wait(self, event: torch.cuda.Event) -> None:
        reader = torch.cuda.current_stream(self._device)
        reader.wait_event(event)
        self._readers.add(reader)

    def finish(self) -> None:
        """Waits on the host until this stream is empty."""
        self._stream.synchronize()


def _result(room: Room, places: list[int], geometry: Geometry, rank: int, x: Tensor) -> Tensor:
    """Returns a rank's result of one exchange as a view of its memory."""
    shape = result_shape(geometry, rank, x)
    if shape.numel() == 0:
        return x.new_empty(shape)
    return room.memory[rank].narrow(0, places[rank], geometry.result_bytes(rank)).view(x.dtype).view(shape)


def _torch_room(group: dist.ProcessGroup, device: torch.device, bank_bytes: int) -> Room:
    """Makes symmetric memory. Collective. Raises ExchangeError, on every rank alike, where one cannot."""
    own, reason, size = None, "", (2 * bank_bytes,)
    with torch.inference_mode(False):  # else it could not be written to outside of that mode
        try:
            from torch.distributed import _symmetric_memory as symm_mem

            own = symm_mem.empty(size, dtype=torch.uint8, device=device)
        except (ImportError, AttributeError, RuntimeError) as error:
            reason = f"torch {torch.__version__} cannot make symmetric memory here: {error}"
        gather_or_fail(group, reason)  # a rank that is alone in the rendezvous would wait for minutes
        try:
            handle = symm_mem.rendezvous(own, group)
            if handle is None:
                raise ExchangeError("torch made no handle of the symmetric memory")
            # Later versions of torch take the tensor out of a pool. Its handle is that of the whole block there, and
            # get_buffer counts from the block's beginning, with one offset for all ranks.
            offset = own.data_ptr() - handle.buffer_ptrs[handle.rank]
            memory = [
                own if rank == handle.rank else handle.get_buffer(rank, size, torch.uint8, offset)
                for rank in range(handle.world_size)
            ]
        except RuntimeError as error:
            reason = f"the GPUs cannot map each other's memory: {error}"
    gather_or_fail(group, reason)
    if len(set(gather_texts(group, str(offset)))) > 1:
        raise ExchangeError("torch placed the ranks' symmetric memory unlike: start the workers anew")
    return Room(memory, bank_bytes, lambda timeout: handle.barrier(0, max(1, round(timeout * 1000))))
