"""What a transformer forward takes: one record per stream, shapes written once.

Letters: B batch, T tokens of the stream, C channels of a token, S text tokens, D text width, A position axes.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

NUM_PERTURBATION_KINDS = 4
VIDEO_SELF, AUDIO_SELF, AUDIO_TO_VIDEO, VIDEO_TO_AUDIO = range(NUM_PERTURBATION_KINDS)


@dataclass(frozen=True)
class StreamInput:
    """Holds one stream (video or audio) as the transformer sees it at one step.

    Attributes:
        latent: noisy tokens, (B, T, C).
        timesteps: noise level of each token, 0..1, (B, T); (B, 1) when all tokens of a sample share one.
        sigma: noise level of the stream, 0..1, (B,).
        positions: [start, end) of each token, (B, A, T, 2) float32: seconds, pixels, pixels for video, seconds for
            audio.
        context: text tokens, (B, S, D).
        context_mask: 1 keeps, 0 drops a text token, (B, S); None keeps all.
        attention_mask: self-attention weights in [0, 1], (B, T, T), or (1, T, T) for all; None is all ones.
        keyframes_mask: non-zero on tokens of a single pixel frame, (B, T, 1); used by LTX-2.5 only.
    """

    latent: Tensor
    timesteps: Tensor
    sigma: Tensor
    positions: Tensor
    context: Tensor
    context_mask: Tensor | None = None
    attention_mask: Tensor | None = None
    keyframes_mask: Tensor | None = None

    def __post_init__(self) -> None:
        batch, num_tokens, _ = self.latent.shape
        if self.timesteps.shape not in ((batch, num_tokens), (batch, 1)):
            raise ValueError(
                f"timesteps must be ({batch}, {num_tokens}) or ({batch}, 1), got {tuple(self.timesteps.shape)}"
            )
        if self.positions.shape[0] != batch or self.positions.shape[2:] != (num_tokens, 2):
            raise ValueError(f"positions must be ({batch}, axes, {num_tokens}, 2), got {tuple(self.positions.shape)}")

    @property
    def num_tokens(self) -> int:
        return self.latent.shape[1]

    def with_tokens(self, index: slice | Tensor) -> "StreamInput":
        """Returns the stream cut to some of its tokens: every per-token input moves as one unit.

        The self-attention mask is cut on both sides.
        """
        mask = self.attention_mask
        return replace(
            self,
            latent=self.latent[:, index],
            timesteps=self.timesteps if self.timesteps.shape[1] == 1 else self.timesteps[:, index],
            positions=self.positions[:, :, index],
            attention_mask=None if mask is None else mask[:, index][:, :, index],
            keyframes_mask=None if self.keyframes_mask is None else self.keyframes_mask[:, index],
        )


class Keep:
    """Says for each sample of a batch whether an attention is kept (True) or perturbed, on the host and on a device."""

    def __init__(self, flags: tuple[bool, ...], device: torch.device) -> None:
        self.any = any(flags)
        self.mask = torch.tensor(flags, device=device)  # made once: a copy to the device inside a block would wait


def log_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turns attention weights in [0, 1] into an additive bias log(m); 0 becomes the lowest finite value of `dtype`.

    Shape is kept. Source: the official implementation's soft masks (a 0/1 mask gives the usual 0 / minus infinity).
    """
    lowest = torch.finfo(dtype).min
    # in place: a mask of all tokens against all is gigabytes
    return mask.to(torch.float32, copy=True).log_().clamp_(min=lowest).to(dtype)
