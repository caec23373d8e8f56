"""Posts the collectives that an exchange is made of, and makes its result of what they bring. Bytes throughout."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .all2all import result_shape
from .layout import Geometry, Move
from .parts import got_from, input_shape, sent_to


@dataclass(frozen=True)
class Sent:
    """A collective that was posted: what to wait for, and what then makes the result, once."""

    work: dist.Work
    result: Callable[[], Tensor]


class Scratch:
    """Keeps the last `keep` buffers for the next exchange: fresh memory of the CPU costs more than the copy into it."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._buffers: list[Tensor] = []
        self._lent: set[int] = set()  # addresses

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Returns a flat tensor of like's dtype and device, with anything in it."""
        size = numel * like.element_size()
        fitting = [buffer for buffer in self._buffers if size <= buffer.numel() <= 2 * size]
        if not fitting:
            with torch.inference_mode(False):  # else it could not be written to outside of that mode
                fresh = like.new_empty(numel)
            if self._keep:
                self._lent.add(fresh.data_ptr())
            return fresh
        best = min(fitting, key=Tensor.numel)
        self._buffers = [buffer for buffer in self._buffers if buffer is not best]
        self._lent.add(best.data_ptr())
        return best[:size].view(like.dtype)

    def give(self, *buffers: Tensor) -> None:
        """Takes buffers back that nobody uses any more; those that it has back already it leaves alone."""
        lent = [buffer for buffer in buffers if buffer.data_ptr() in self._lent]
        self._lent.difference_update(buffer.data_ptr() for buffer in lent)
        with torch.inference_mode(False):
            whole = [torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage()) for buffer in lent]
        self._buffers = (self._buffers + whole)[-self._keep :]


def trade(group: dist.ProcessGroup, geometry: Geometry, rank: int, x: Tensor, scratch: Scratch) -> Sent:
    """Posts an all-to-all of the blocks."""
    ranks = range(geometry.world_size)
    parts = [sent_to(geometry, x, receiver) for receiver in ranks]
    sent_sizes = [part.numel() for part in parts]
    used: list[Tensor] = []
    if geometry.move is Move.GATHER_HEADS and x.shape[0] == 1:
        sent = x.contiguous()  # tokens of one sample lie one after another: nothing to sort
    else:
        sent = scratch.take(sum(sent_sizes), x)
        used.append(sent)
        for part, room in zip(parts, sent.split(sent_sizes), strict=True):
            room.view(part.shape).copy_(part)
    result = x.new_empty(result_shape(geometry, rank, x))
    places = [got_from(geometry, result, sender) for sender in ranks]
    sizes = [place.numel() for place in places]
    sorted_already = geometry.move is Move.SEND_RECV_HEADS and x.shape[0] == 1
    received = result if sorted_already else scratch.take(result.numel(), x)
    if not sorted_already:
        used.append(received)
    size = x.element_size()
    work = dist.all_to_all_single(
        _as_bytes(received),
        _as_bytes(sent),
        [count * size for count in sizes],
        [count * size for count in sent_sizes],
        group=group,
        async_op=True,
    )

    def finish() -> Tensor:
        if not sorted_already:
            for place, block in zip(places, received.split(sizes), strict=True):
                place.copy_(block.view(place.shape))
        scratch.give(*used)
        return result

    return Sent(work, finish)


def collect(group: dist.ProcessGroup, geometry: Geometry, rank: int, x: Tensor, scratch: Scratch) -> Sent:
    """Posts an all-gather of every rank's whole tensor; each rank then cuts its blocks out of it."""
    shapes = [input_shape(geometry, sender, x) for sender in range(geometry.world_size)]
    longest = max(shape.numel() for shape in shapes)
    sent = x.contiguous().flatten()
    if sent.numel() < longest:
        sent = torch.cat([sent, sent.new_empty(longest - sent.numel())])
    result = x.new_empty(result_shape(geometry, rank, x))
    sorted_already = geometry.move is Move.ALLGATHER and x.shape[0] == 1 and len(set(geometry.tokens)) == 1
    received = result.flatten() if sorted_already else scratch.take(geometry.world_size * longest, x)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.14
    work = gather(_as_bytes(received), _as_bytes(sent), group=group, async_op=True)

    def finish() -> Tensor:
        if not sorted_already:
            for sender, (shape, whole) in enumerate(zip(shapes, received.split(longest), strict=True)):
                block = sent_to(geometry, whole[: shape.numel()].view(shape), rank)
                got_from(geometry, result, sender).copy_(block)
            scratch.give(received)
        return result

    return Sent(work, finish)


def _as_bytes(x: Tensor) -> Tensor:
    """Views a contiguous tensor as bytes: a collective then takes every dtype, also those it cannot add."""
    return x.flatten().view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)
