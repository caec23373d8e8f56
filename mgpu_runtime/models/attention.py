"""The attention processor of every LTX attention layer, with one seam: who attends.

Letters: B batch, T query tokens, S key tokens, H heads, D channels of a head, C channels of a token.
"""

from collections.abc import Callable

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
# (q_BTHD, k_BSHD, v_BSHD, bias or None) -> out_BTHD; bias broadcasts to (B, H, T, S)
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def attend_locally(q_BTHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, bias: Tensor | None) -> Tensor:
    """Attends within this process, by the attention backend chosen in diffusers. Returns (B, T, H, D)."""
    return dispatch_attention_fn(q_BTHD, k_BSHD, v_BSHD, attn_mask=bias, dropout_p=0.0, is_causal=False)


def rotate(x_BTC: Tensor, table: RotaryTable, rope_type: str) -> Tensor:
    """Applies a rotary table, (B, T, C) for "interleaved" or (B, H, T, D/2) for "split", to projected tokens."""
    if rope_type == "interleaved":
        return apply_interleaved_rotary_emb(x_BTC, table)
    return apply_split_rotary_emb(x_BTC, table)


class LTXAttentionProcessor:
    """Projects, rotates, attends, gates and projects out, as every attention of LTX-2 does.

    `attend` is the only thing parallel execution changes. Keyword `keep` holds spatio-temporal guidance: a sample
    that is not kept passes its value projection through instead of attending (it is still gated and projected out).
    """

    # diffusers sets these two on a processor when a user picks a backend or its own context parallelism
    _attention_backend = None
    _parallel_config = None

    def __init__(self, attend: Attend = attend_locally) -> None:
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
            q, k = self._queries_and_keys(attn, hidden_states, source, query_rotary_emb, key_rotary_emb)
            out = self.attend(q, k, v, attention_mask)
            if keep is not None:
                out = torch.where(keep.mask[:, None, None, None], out, v)
        if attn.to_gate_logits is not None:
            out = out * (2.0 * torch.sigmoid(attn.to_gate_logits(hidden_states))).unsqueeze(-1)
        return attn.to_out[0](out.flatten(2, 3))

    def _queries_and_keys(
        self,
        attn: LTX2Attention,
        hidden_states: Tensor,
        source: Tensor,
        query_table: RotaryTable | None,
        key_table: RotaryTable | None,
    ) -> tuple[Tensor, Tensor]:
        q = attn.norm_q(attn.to_q(hidden_states))
        k = attn.norm_k(attn.to_k(source))
        if query_table is not None:
            q = rotate(q, query_table, attn.rope_type)
            k = rotate(k, query_table if key_table is None else key_table, attn.rope_type)
        return q.unflatten(2, (attn.heads, -1)), k.unflatten(2, (attn.heads, -1))
