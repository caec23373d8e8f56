"""The attention processor of every LTX attention layer, with one seam: who attends.

Letters: B batch, T query tokens, S key tokens, H heads, D channels of a head, C channels of a token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2Attention,
    apply_interleaved_rotary_emb,
    apply_split_rotary_emb,
)
from torch import Tensor

from .streams import Keep

RotaryTable = tuple[Tensor, Tensor]


def attend_locally(q_BTHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, bias: Tensor | None) -> Tensor:
    """Attends within this process, by the attention backend chosen in diffusers. Returns (B, T, H, D).

    `bias` broadcasts to (B, H, T, S).
    """
    return dispatch_attention_fn(q_BTHD, k_BSHD, v_BSHD, attn_mask=bias, dropout_p=0.0, is_causal=False)


class Attend:
    """Attends within this process. Parallel execution overrides these methods, and only them.

    Values, then keys, then queries are handed over as soon as they are made, so that they can travel while the rest is
    computed, and whatever stands between the begin of an attention and its attending; so can the result until its end.
    """

    def send(self, x_BSHD: Tensor) -> Any:
        """Takes values, then keys; returns what stands for them in the call that follows."""
        return x_BSHD

    def send_queries(self, q_BTHD: Tensor) -> Any:
        """Takes queries, after the keys; returns what stands for them in the call that follows."""
        return q_BTHD

    def __call__(self, sent_q: Any, sent_k: Any, sent_v: Any, bias: Tensor | None) -> Any:
        """Attends, from what the other methods gave for queries, keys and values; returns what stands for the result.

        `bias` broadcasts to (B, H, T, S).
        """
        return attend_locally(sent_q, sent_k, sent_v, bias)

    def receive(self, attended: Any) -> Tensor:
        """Returns the result, (B, T, H, D), from what the call gave."""
        return attended


LOCAL = Attend()


def rotate(x_BTC: Tensor, table: RotaryTable, rope_type: str) -> Tensor:
    """Applies a rotary table, (B, T, C) for "interleaved" or (B, H, T, D/2) for "split", to projected tokens."""
    if rope_type == "interleaved":
        return apply_interleaved_rotary_emb(x_BTC, table)
    return apply_split_rotary_emb(x_BTC, table)


@dataclass(frozen=True)
class Begun:
    """An attention after its begin: projected, and on its way to whoever attends."""

    hidden_BTC: Tensor
    v_BSHD: Tensor
    sent: tuple[Any, Any, Any] | None  # queries, keys, values; None where no sample attends
    bias: Tensor | None
    keep: Keep | None


@dataclass(frozen=True)
class Attended:
    """An attention that has attended: its result is on its way back."""

    begun: Begun
    sent: Any  # the result; None where no sample attends


class LTXAttentionProcessor:
    """Projects, rotates, attends, gates and projects out, as every attention of LTX-2 does.

    `attend` is the only thing parallel execution changes. `keep` holds spatio-temporal guidance: a sample that is not
    kept passes its value projection through instead of attending (it is still gated and projected out). Where none is
    kept nothing is sent, on every rank alike.

    A call is `begin`, `proceed` and `end`; who waits for other ranks has other work to do between these.
    """

    # diffusers sets these two on a processor when a user picks a backend or its own context parallelism
    _attention_backend = None
    _parallel_config = None

    def __init__(self, attend: Attend = LOCAL) -> None:
        self.attend = attend

    def __call__(
        self,
        attn: LTX2Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        query_rotary_emb: RotaryTable | None = None,
        key_rotary_emb: RotaryTable | None = None,
        keep: Keep | None = None,
    ) -> Tensor:
        begun = self.begin(
            attn, hidden_states, encoder_hidden_states, attention_mask, query_rotary_emb, key_rotary_emb, keep
        )
        return self.end(attn, self.proceed(begun))

    def begin(
        self,
        attn: LTX2Attention,
        hidden_BTC: Tensor,
        source_BSC: Tensor | None = None,
        bias: Tensor | None = None,
        query_table: RotaryTable | None = None,
        key_table: RotaryTable | None = None,
        keep: Keep | None = None,
    ) -> Begun:
        """Projects and sends. Without a source it attends to itself."""
        source = hidden_BTC if source_BSC is None else source_BSC
        v = attn.to_v(source).unflatten(2, (attn.heads, -1))
        if keep is not None and not keep.any:
            return Begun(hidden_BTC, v, None, bias, keep)
        sent_v = self.attend.send(v)
        key_table = query_table if key_table is None else key_table
        sent_k = self.attend.send(_heads(attn, attn.norm_k(attn.to_k(source)), key_table))
        sent_q = self.attend.send_queries(_heads(attn, attn.norm_q(attn.to_q(hidden_BTC)), query_table))
        return Begun(hidden_BTC, v, (sent_q, sent_k, sent_v), bias, keep)

    def proceed(self, begun: Begun) -> Attended:
        """Waits for what was sent and attends."""
        return Attended(begun, None if begun.sent is None else self.attend(*begun.sent, begun.bias))

    def end(self, attn: LTX2Attention, attended: Attended) -> Tensor:
        """Waits for the result, gates and projects out: (B, T, C)."""
        begun = attended.begun
        out = begun.v_BSHD
        if begun.sent is not None:
            out = self.attend.receive(attended.sent)
            if begun.keep is not None:
                out = torch.where(begun.keep.mask[:, None, None, None], out, begun.v_BSHD)
        if attn.to_gate_logits is not None:
            out = out * (2.0 * torch.sigmoid(attn.to_gate_logits(begun.hidden_BTC))).unsqueeze(-1)
        return attn.to_out[0](out.flatten(2, 3))


def _heads(attn: LTX2Attention, x_BTC: Tensor, table: RotaryTable | None) -> Tensor:
    """Turns normalised queries or keys by their positions and splits them into heads, (B, T, H, D)."""
    if table is not None:
        x_BTC = rotate(x_BTC, table, attn.rope_type)
    return x_BTC.unflatten(2, (attn.heads, -1))
