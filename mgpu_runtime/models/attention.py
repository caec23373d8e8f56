"""The attention processor of every LTX attention layer, with one seam: who attends.

Letters: B batch, T query tokens, S key tokens, H heads, D channels of a head, C channels of a token.
"""

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
    """Attends within this process. Parallel execution overrides both methods, and only them.

    Values, then keys are handed over as soon as they are made, so that they can travel while the rest is computed.
    """

    def send(self, x_BSHD: Tensor) -> Any:
        """Takes keys or values and returns what stands for them in the call that follows."""
        return x_BSHD

    def __call__(self, q_BTHD: Tensor, sent_k: Any, sent_v: Any, bias: Tensor | None) -> Tensor:
        """Returns (B, T, H, D); keys and values are what `send` gave for them, the values sent before the keys."""
        return attend_locally(q_BTHD, sent_k, sent_v, bias)


LOCAL = Attend()


def rotate(x_BTC: Tensor, table: RotaryTable, rope_type: str) -> Tensor:
    """Applies a rotary table, (B, T, C) for "interleaved" or (B, H, T, D/2) for "split", to projected tokens."""
    if rope_type == "interleaved":
        return apply_interleaved_rotary_emb(x_BTC, table)
    return apply_split_rotary_emb(x_BTC, table)


class LTXAttentionProcessor:
    """Projects, rotates, attends, gates and projects out, as every attention of LTX-2 does.

    `attend` is the only thing parallel execution changes. Keyword `keep` holds spatio-temporal guidance: a sample
    that is not kept passes its value projection through instead of attending (it is still gated and projected out).
    Where none is kept nothing is sent, on every rank alike.
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
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        v = attn.to_v(source).unflatten(2, (attn.heads, -1))
        if keep is not None and not keep.any:
            out = v
        else:
            sent_v = self.attend.send(v)
            key_table = query_rotary_emb if key_rotary_emb is None else key_rotary_emb
            sent_k = self.attend.send(_heads(attn, attn.norm_k(attn.to_k(source)), key_table))
            q = _heads(attn, attn.norm_q(attn.to_q(hidden_states)), query_rotary_emb)
            out = self.attend(q, sent_k, sent_v, attention_mask)
            if keep is not None:
                out = torch.where(keep.mask[:, None, None, None], out, v)
        if attn.to_gate_logits is not None:
            out = out * (2.0 * torch.sigmoid(attn.to_gate_logits(hidden_states))).unsqueeze(-1)
        return attn.to_out[0](out.flatten(2, 3))


def _heads(attn: LTX2Attention, x_BTC: Tensor, table: RotaryTable | None) -> Tensor:
    """Turns normalised queries or keys by their positions and splits them into heads, (B, T, H, D)."""
    if table is not None:
        x_BTC = rotate(x_BTC, table, attn.rope_type)
    return x_BTC.unflatten(2, (attn.heads, -1))
