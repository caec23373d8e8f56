"""Which part of a tensor goes where, as views: for transports that move tensors rather than bytes at addresses."""

import torch
from torch import Tensor

from .layout import Geometry, Move, starts


def sent_to(geometry: Geometry, x: Tensor, receiver: int) -> Tensor:
    """Returns the part of a sender's tensor that goes to `receiver`."""
    if geometry.move is Move.SEND_RECV_HEADS:
        return x.narrow(2, starts(geometry.heads)[receiver], geometry.heads[receiver])
    if geometry.move is Move.GATHER_HEADS:
        return x.narrow(1, starts(geometry.tokens)[receiver], geometry.tokens[receiver])
    return x


def got_from(geometry: Geometry, result: Tensor, sender: int) -> Tensor:
    """Returns the part of a receiver's result that comes from `sender`."""
    if geometry.move is Move.GATHER_HEADS:
        return result.narrow(2, starts(geometry.heads)[sender], geometry.heads[sender])
    return result.narrow(1, starts(geometry.tokens)[sender], geometry.tokens[sender])


def input_shape(geometry: Geometry, rank: int, x: Tensor) -> torch.Size:
    """Returns the shape of what a rank gives; x is what this rank gives, with the same dims behind tokens and heads."""
    batch, tokens, heads = geometry.input_shape(rank)
    if geometry.move is Move.ALLGATHER:
        return torch.Size((batch, tokens, *x.shape[2:]))
    return torch.Size((batch, tokens, heads, *x.shape[3:]))
