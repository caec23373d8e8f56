"""What a stream is shown beside its noise: tokens put in the clip's own place, or appended behind them.

Every function takes a state before its noise is mixed in and returns another. An appended token starts from nothing,
holds its content as what the mask keeps, and is dropped at the end; it draws noise like every other token.

Letters: B batch, C channels, f h w latent frames, rows and columns, T tokens before, N new tokens, M mel bins.
"""

from dataclasses import replace

import torch
from torch import Tensor

from .patchify import audio_tokens, video_tokens
from .positions import keyframe_positions, reference_audio_positions, reference_positions
from .sizes import LTX_SCALE, ScaleFactors
from .state import StreamState


def place_latent(video: StreamState, latent_BCfhw: Tensor, strength: float) -> StreamState:
    """Puts an encoded picture or clip, (1 or B, C, f, h, w), in the place of the clip's first f latent frames.

    At noise level s its tokens then have level (1 - strength) * s. The latent must have the clip's rows and columns.
    """
    tokens = _for_batch(video_tokens(latent_BCfhw.float()), video)
    count = tokens.shape[1]
    assert count <= video.num_own, f"{count} tokens do not fit a clip of {video.num_own}"
    mask = video.denoise_mask.clone()
    mask[:, :count] = 1.0 - strength
    return replace(
        video,
        latent=torch.cat([tokens, video.latent[:, count:]], dim=1),
        clean=torch.cat([tokens, video.clean[:, count:]], dim=1),
        denoise_mask=mask,
        generates_all=bool((mask == 1).all()),
    )


def append_keyframe(
    video: StreamState,
    latent_BCfhw: Tensor,
    frame: int,
    strength: float,
    fps: float,
    *,
    attention: float | None = None,
    scale: ScaleFactors = LTX_SCALE,
) -> StreamState:
    """Appends an encoded picture or clip, (1 or B, C, f, h, w), that starts at a frame; see keyframe_positions."""
    positions = keyframe_positions(tuple(latent_BCfhw.shape[2:]), frame, fps, scale=scale)
    return _append(video, video_tokens(latent_BCfhw.float()), positions, strength, attention)


def append_reference(
    video: StreamState,
    latent_BCfhw: Tensor,
    strength: float,
    fps: float,
    *,
    downscale: int = 1,
    time_scale: int = 1,
    attention: float | None = None,
    scale: ScaleFactors = LTX_SCALE,
) -> StreamState:
    """Appends an encoded reference clip, (1 or B, C, f, h, w), laid over the whole clip; see reference_positions."""
    grid = tuple(latent_BCfhw.shape[2:])
    positions = reference_positions(grid, fps, downscale=downscale, time_scale=time_scale, scale=scale)
    return _append(video, video_tokens(latent_BCfhw.float()), positions, strength, attention)


def append_reference_audio(audio: StreamState, latent_BCTM: Tensor, strength: float) -> StreamState:
    """Appends a sound, (1 or B, C, T, M), heard before the clip begins; see reference_audio_positions."""
    tokens = audio_tokens(latent_BCTM.float())
    return _append(audio, tokens, reference_audio_positions(tokens.shape[1]), strength, None)


def _append(
    state: StreamState, tokens_BNC: Tensor, positions_BANx2: Tensor, strength: float, attention: float | None
) -> StreamState:
    tokens = _for_batch(tokens_BNC, state)
    count = tokens.shape[1]
    mask = torch.cat([state.denoise_mask, torch.full_like(tokens[:, :, :1], 1.0 - strength)], dim=1)
    keyframes = state.keyframes_mask
    return replace(
        state,
        latent=torch.cat([state.latent, torch.zeros_like(tokens)], dim=1),
        clean=torch.cat([state.clean, tokens], dim=1),
        denoise_mask=mask,
        positions=torch.cat([state.positions, positions_BANx2.expand(state.batch, -1, -1, -1)], dim=2),
        # a given picture is guidance, not one of the single frames that the model's embedding marks
        keyframes_mask=None if keyframes is None else torch.nn.functional.pad(keyframes, (0, 0, 0, count)),
        attention_mask=grow_attention(state, count, attention),
        generates_all=state.generates_all and strength == 0.0,
        num_appended=state.num_appended + count,
    )


def grow_attention(state: StreamState, num_new: int, strength: float | None) -> Tensor | None:
    """Gives the self-attention weights (1 or B, T + N, T + N) of a state that is about to get N more tokens.

    They see each other, see the clip's own tokens and are seen by them as strongly as `strength` says (None: fully),
    and neither see nor are seen by tokens appended before. No mask (all see all) stays none while no strength is given.
    Source: the official attention strength of conditioning items.
    """
    before = state.attention_mask
    if before is None and strength is None:
        return None
    num_before = state.latent.shape[1]
    batch = 1 if before is None else before.shape[0]
    mask = torch.zeros(batch, num_before + num_new, num_before + num_new)
    mask[:, :num_before, :num_before] = 1.0 if before is None else before
    mask[:, num_before:, num_before:] = 1.0
    mutual = 1.0 if strength is None else strength
    mask[:, : state.num_own, num_before:] = mutual
    mask[:, num_before:, : state.num_own] = mutual
    return mask


def _for_batch(tokens_BNC: Tensor, state: StreamState) -> Tensor:
    """Repeats the tokens of one for all clips of a batch."""
    assert tokens_BNC.shape[0] in (1, state.batch), f"{tokens_BNC.shape[0]} conditions for {state.batch} clips"
    return tokens_BNC.to(state.latent.device).expand(state.batch, -1, -1)
