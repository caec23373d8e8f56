"""Latents to tokens and back.

Letters: B batch, C channels, F frames, H height, W width (latent cells), T tokens or audio frames, M mel bins.
"""

from torch import Tensor


def video_tokens(latent_BCFHW: Tensor) -> Tensor:
    """Lays a video latent (B, C, F, H, W) out as tokens (B, F*H*W, C), ordered frames, rows, columns."""
    return latent_BCFHW.flatten(2).transpose(1, 2).contiguous()


def video_latent(tokens_BTC: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Puts the first F*H*W tokens (B, T, C) back into a video latent (B, C, F, H, W); appended tokens are dropped."""
    frames, height, width = grid
    generated = tokens_BTC[:, : frames * height * width]
    return generated.transpose(1, 2).unflatten(2, grid).contiguous()


def audio_tokens(latent_BCTM: Tensor) -> Tensor:
    """Lays an audio latent (B, C, T, M) out as tokens (B, T, C*M); entry channel*M + bin."""
    return latent_BCTM.transpose(1, 2).flatten(2).contiguous()


def audio_latent(tokens_BTD: Tensor, channels: int) -> Tensor:
    """Puts audio tokens (B, T, C*M) back into a latent (B, C, T, M)."""
    return tokens_BTD.unflatten(2, (channels, -1)).transpose(1, 2).contiguous()
