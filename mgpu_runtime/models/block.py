"""One pass of both streams through a `diffusers` LTX-2 block, with each stream optional and perturbed on its own.

Source of the operations: the published LTX-2 architecture as `diffusers` states it; v2a reads the video state from
before a2v of the same block. Their order is our own where the result does not depend on it: an attention that waits for
other ranks has other work between its begin and its end.

Letters: B batch, T tokens, D width of a stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformerBlock
from torch import Tensor

from .attention import Attended, Begun, RotaryTable
from .streams import AUDIO_SELF, AUDIO_TO_VIDEO, VIDEO_SELF, VIDEO_TO_AUDIO, Keep


@dataclass
class BlockStream:
    """Holds one stream on its way through the blocks; only `hidden` changes.

    Modulations are (B, T or 1, rows * D); biases are additive and broadcast to (B, heads, T, keys).
    """

    hidden: Tensor
    context: Tensor
    modulation: Tensor
    embedded_timestep: Tensor
    cross_modulation: Tensor | None
    cross_gate: Tensor | None
    prompt_modulation: Tensor | None
    rotary: RotaryTable
    cross_rotary: RotaryTable
    self_bias: Tensor | None
    context_bias: Tensor | None


@dataclass(frozen=True)
class _Half:
    """Names the layers of one stream's half of a block."""

    norms: tuple[torch.nn.Module, torch.nn.Module, torch.nn.Module]
    self_attention: torch.nn.Module
    text_attention: torch.nn.Module
    feed_forward: torch.nn.Module
    table: Tensor
    prompt_table: Tensor | None


def _video_half(block: LTX2VideoTransformerBlock) -> _Half:
    return _Half(
        norms=(block.norm1, block.norm2, block.norm3),
        self_attention=block.attn1,
        text_attention=block.attn2,
        feed_forward=block.ff,
        table=block.scale_shift_table,
        prompt_table=getattr(block, "prompt_scale_shift_table", None),
    )


def _audio_half(block: LTX2VideoTransformerBlock) -> _Half:
    return _Half(
        norms=(block.audio_norm1, block.audio_norm2, block.audio_norm3),
        self_attention=block.audio_attn1,
        text_attention=block.audio_attn2,
        feed_forward=block.audio_ff,
        table=block.audio_scale_shift_table,
        prompt_table=getattr(block, "audio_prompt_scale_shift_table", None),
    )


@dataclass(frozen=True)
class Unfinished:
    """What is left of a block's audio half. Only audio depends on it, so the next block's video can begin before."""

    block: LTX2VideoTransformerBlock
    audio: BlockStream
    row: Sequence[Tensor]
    to_audio: Attended | None
    keep: Keep | None  # of v2a

    def finish(self) -> None:
        """Advances the audio stream to the end of the block."""
        if self.to_audio is not None:
            _end_video_to_audio(self.block, self.audio, self.to_audio, self.keep)
        _feed_forward(self.audio, _audio_half(self.block), self.row)


def run_block(
    block: LTX2VideoTransformerBlock,
    video: BlockStream | None,
    audio: BlockStream | None,
    keep: Sequence[Keep | None],
    before: Unfinished | None = None,
) -> Unfinished | None:
    """Advances `hidden` of the streams that are there by one block; returns what is left to do for audio.

    That goes into the next block as `before`, and is finished after the last one. A block that is compiled as one graph
    leaves nothing, and takes nothing that an eager one left.

    `keep` holds one entry per kind of perturbation; None keeps all samples.
    """
    halves = _video_half(block), _audio_half(block)
    both = video is not None and audio is not None
    video_rows, audio_rows = (
        s and _rows(half.table, s.modulation) for s, half in zip((video, audio), halves, strict=True)
    )
    begun_self = video and _begin_self(video, halves[0], video_rows, keep[VIDEO_SELF])
    if before is not None:
        before.finish()
    if audio is not None:
        _attend_self(audio, halves[1], audio_rows, keep[AUDIO_SELF])
    attended = begun_self and _proceed(halves[0].self_attention, begun_self)
    if audio is not None:
        _attend_text(audio, halves[1], audio_rows)
    if video is not None:
        _end_self(video, halves[0], video_rows, attended)
        _attend_text(video, halves[0], video_rows)
    begun_to_audio = _attend_across(block, video, audio, keep) if both else None
    if video is not None:
        _feed_forward(video, halves[0], video_rows)
    if audio is None:
        return None
    to_audio = begun_to_audio and _proceed(block.video_to_audio_attn, begun_to_audio)
    unfinished = Unfinished(block, audio, audio_rows, to_audio, keep[VIDEO_TO_AUDIO])
    if torch.compiler.is_compiling():  # nothing overlaps there, and a block that ends by itself needs one graph only
        unfinished.finish()
        return None
    return unfinished


def _rows(table_RD: Tensor, modulation: Tensor) -> tuple[Tensor, ...]:
    """Adds a block's own table to the shared modulation: one (B, T or 1, D) tensor per row."""
    return (table_RD + modulation.unflatten(-1, (table_RD.shape[0], -1))).unbind(2)


def _begin_self(stream: BlockStream, half: _Half, row: Sequence[Tensor], keep: Keep | None) -> Begun:
    shift, scale, _ = row[:3]
    modulated = half.norms[0](stream.hidden) * (1 + scale) + shift
    attention = half.self_attention
    return attention.processor.begin(attention, modulated, bias=stream.self_bias, query_table=stream.rotary, keep=keep)


def _proceed(attention: torch.nn.Module, begun: Begun) -> Attended:
    return attention.processor.proceed(begun)


def _end_self(stream: BlockStream, half: _Half, row: Sequence[Tensor], attended: Attended) -> None:
    attention = half.self_attention
    stream.hidden = stream.hidden + attention.processor.end(attention, attended) * row[2]


def _attend_self(stream: BlockStream, half: _Half, row: Sequence[Tensor], keep: Keep | None) -> None:
    _end_self(stream, half, row, _proceed(half.self_attention, _begin_self(stream, half, row, keep)))


def _feed_forward(stream: BlockStream, half: _Half, row: Sequence[Tensor]) -> None:
    shift, scale, gate = row[3:6]
    modulated = half.norms[2](stream.hidden) * (1 + scale) + shift
    stream.hidden = stream.hidden + half.feed_forward(modulated) * gate


def _attend_text(stream: BlockStream, half: _Half, row: Sequence[Tensor]) -> None:
    query, context = half.norms[1](stream.hidden), stream.context
    if len(row) > 6:  # 2.3 and later also modulate the text attention
        query = query * (1 + row[7]) + row[6]
    if half.prompt_table is not None:
        context = _modulate_prompt(context, half.prompt_table, stream.prompt_modulation)
    attended = half.text_attention(query, encoder_hidden_states=context, attention_mask=stream.context_bias)
    stream.hidden = stream.hidden + (attended * row[8] if len(row) > 6 else attended)


def _modulate_prompt(context: Tensor, table: Tensor, modulation: Tensor | None) -> Tensor:
    # without the prompt's own timestep layer (use_prompt_adaln_single false) only the static table speaks
    shift, scale = table[None, None].to(context.dtype).unbind(2) if modulation is None else _rows(table, modulation)
    return context * (1 + scale) + shift


def _attend_across(
    block: LTX2VideoTransformerBlock, video: BlockStream, audio: BlockStream, keep: Sequence[Keep | None]
) -> Begun | None:
    """Lets video attend to audio, and audio begin to attend to video; returns the latter, None where it does not."""
    to_video, to_audio = (_any_kept(keep[AUDIO_TO_VIDEO]), _any_kept(keep[VIDEO_TO_AUDIO]))
    if not (to_video or to_audio):
        return None
    video_rows = _rows(block.video_a2v_cross_attn_scale_shift_table[:4], video.cross_modulation)
    audio_rows = _rows(block.audio_a2v_cross_attn_scale_shift_table[:4], audio.cross_modulation)
    # both norms are taken before either result is added: v2a must see the video from before a2v
    video_norm, audio_norm = block.audio_to_video_norm(video.hidden), block.video_to_audio_norm(audio.hidden)
    begun = None
    if to_audio:
        attention = block.video_to_audio_attn
        begun = attention.processor.begin(
            attention,
            _scale_shift(audio_norm, audio_rows[2:]),
            _scale_shift(video_norm, video_rows[2:]),
            query_table=audio.cross_rotary,
            key_table=video.cross_rotary,
        )
    if to_video:
        attended = block.audio_to_video_attn(
            _scale_shift(video_norm, video_rows[:2]),
            encoder_hidden_states=_scale_shift(audio_norm, audio_rows[:2]),
            query_rotary_emb=video.cross_rotary,
            key_rotary_emb=audio.cross_rotary,
        )
        (gate,) = _rows(block.video_a2v_cross_attn_scale_shift_table[4:], video.cross_gate)
        video.hidden = video.hidden + gate * _only_kept(attended, keep[AUDIO_TO_VIDEO])
    return begun


def _end_video_to_audio(
    block: LTX2VideoTransformerBlock, audio: BlockStream, attended: Attended, keep: Keep | None
) -> None:
    attention = block.video_to_audio_attn
    (gate,) = _rows(block.audio_a2v_cross_attn_scale_shift_table[4:], audio.cross_gate)
    audio.hidden = audio.hidden + gate * _only_kept(attention.processor.end(attention, attended), keep)


def _scale_shift(x: Tensor, rows: Sequence[Tensor]) -> Tensor:
    scale, shift = rows
    return x * (1 + scale) + shift


def _any_kept(keep: Keep | None) -> bool:
    return keep is None or keep.any


def _only_kept(attended: Tensor, keep: Keep | None) -> Tensor:
    if keep is None:
        return attended
    return attended * keep.mask[:, None, None]
