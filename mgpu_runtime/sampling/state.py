"""A stream between steps: its noisy tokens, what must be kept of it, and where its tokens lie.

Letters: B batch, C channels, F frames, H height, W width (latent cells), T tokens, A position axes.
"""

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .noise import draw_noise
from .patchify import audio_tokens, video_tokens
from .positions import audio_positions, video_positions
from .sizes import LTX_SCALE, ScaleFactors

log = logging.getLogger("mgpu")


@dataclass(frozen=True)
class StreamState:
    """Holds the tokens of one stream (video or audio) in float32.

    Attributes:
        latent: noisy tokens, (B, T, C).
        clean: the tokens that the mask keeps, (B, T, C).
        denoise_mask: 1 generates a token, 0 keeps it, between: kept with strength 1 - mask, (B, T, 1).
        positions: [start, end) of each token, (B, A, T, 2).
        keyframes_mask: 1 on tokens of a single pixel frame, (B, T, 1), or None.
        attention_mask: self-attention weights in [0, 1], (B, T, T) or (1, T, T) for all clips, or None.
        frozen: the stream is only listened to: noise level 0 at every step.
        generates_all: the mask is 1 everywhere, so that one timestep does for all tokens of an item.
        num_appended: how many of the last tokens are no part of the clip (conditioning.py).
    """

    latent: Tensor
    clean: Tensor
    denoise_mask: Tensor
    positions: Tensor
    keyframes_mask: Tensor | None = None
    attention_mask: Tensor | None = None
    frozen: bool = False
    generates_all: bool = False
    num_appended: int = 0

    def __post_init__(self) -> None:
        batch, num_tokens, _ = self.latent.shape
        assert self.clean.shape == self.latent.shape, f"{self.clean.shape} against {self.latent.shape}"
        # without the trailing axis a mask (B, T) would silently multiply channels where T equals C
        assert self.denoise_mask.shape == (batch, num_tokens, 1), f"{self.denoise_mask.shape}"
        assert self.positions.shape[0] == batch and self.positions.shape[2:] == (num_tokens, 2)

    @property
    def batch(self) -> int:
        """The number of clips."""
        return self.latent.shape[0]

    @property
    def num_own(self) -> int:
        """The number of the clip's own tokens, which come first."""
        return self.latent.shape[1] - self.num_appended

    @property
    def token_shape(self) -> tuple[int, int]:
        """(T, C): the shape of one item's noise."""
        return self.latent.shape[1], self.latent.shape[2]

    def with_latent(self, latent: Tensor) -> "StreamState":
        """Returns the state with other noisy tokens (B, T, C)."""
        return replace(self, latent=latent)

    def with_noise(self, noise: Tensor, noise_scale: float) -> "StreamState":
        """Mixes noise (B, T, C) into the tokens: lerp to the noise by noise_scale, then back to clean by the mask.

        A token of mask m then has noise level m*noise_scale, as its timestep says: the strength enters nowhere else.
        """
        noisy = torch.lerp(self.latent, noise.to(self.latent), noise_scale)
        return self.with_latent(torch.lerp(self.clean, noisy, self.denoise_mask))

    def keep_clean(self, tokens: Tensor) -> Tensor:
        """Puts the kept tokens back: tokens*mask + clean*(1-mask), (B, T, C)."""
        if self.generates_all:
            return tokens
        return tokens * self.denoise_mask + self.clean * (1.0 - self.denoise_mask)

    def stream_sigma(self, sigma: float) -> float:
        """Gives the stream's noise level at a step: sigma, or 0 where it is frozen."""
        return 0.0 if self.frozen else sigma

    def timesteps(self, sigma: float) -> Tensor:
        """Gives the noise level of each token, mask*sigma, (B, T); (B, 1) where all tokens share it."""
        if self.frozen or self.generates_all:
            return self.latent.new_full((self.batch, 1), self.stream_sigma(sigma))
        return self.denoise_mask[:, :, 0] * sigma

    def to(self, device: torch.device | str) -> "StreamState":
        """Moves all tensors to a device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def video_state(
    latent_BCFHW: Tensor, fps: float, *, noise_mask: Tensor | None = None, scale: ScaleFactors = LTX_SCALE
) -> StreamState:
    """Builds the video stream from a latent (B, C, F, H, W): it is both the start and what a noise mask keeps.

    `noise_mask` holds 1 where to generate and 0 where to keep; see expand_noise_mask for its shapes. Add noise with
    add_noise. Raises ValueError for a latent that is not 5-D and for a mask that does not fit.
    """
    if latent_BCFHW.dim() != 5:
        raise ValueError(f"A video latent has 5 axes (B, C, F, H, W), got shape {tuple(latent_BCFHW.shape)}.")
    batch, _, frames, height, width = latent_BCFHW.shape
    grid = (frames, height, width)
    tokens = video_tokens(latent_BCFHW.float())
    keyframes = torch.zeros(batch, tokens.shape[1], 1)
    keyframes[:, : height * width] = 1.0  # the first latent frame is one pixel frame
    mask, generates_all = _token_mask(noise_mask, batch, grid)
    return StreamState(
        latent=tokens,
        clean=tokens,
        denoise_mask=mask,
        positions=video_positions(grid, fps, scale=scale, batch=batch),
        keyframes_mask=keyframes,
        generates_all=generates_all,
    ).to(tokens.device)


def audio_state(latent_BCTM: Tensor, *, frozen: bool = False, noise_mask: Tensor | None = None) -> StreamState:
    """Builds the audio stream from a latent (B, C, T, M): both the start and what a mask keeps.

    A frozen one is kept whole and only listened to. `noise_mask` holds 1 where to generate and 0 where to keep; see
    expand_audio_mask for its shapes.
    """
    if latent_BCTM.dim() != 4:
        raise ValueError(f"An audio latent has 4 axes (B, C, T, M), got shape {tuple(latent_BCTM.shape)}.")
    tokens = audio_tokens(latent_BCTM.float())
    batch, num_tokens, _ = tokens.shape
    mask = torch.ones(batch, num_tokens, 1)
    if frozen:
        mask = torch.zeros_like(mask)
    elif noise_mask is not None:
        mask = expand_audio_mask(noise_mask, batch, num_tokens)
    return StreamState(
        latent=tokens,
        clean=tokens,
        denoise_mask=mask,
        positions=audio_positions(num_tokens, batch=batch),
        frozen=frozen,
        generates_all=bool((mask == 1).all()),
    ).to(tokens.device)


def add_noise(
    video: StreamState | None,
    audio: StreamState | None,
    generators: list[torch.Generator],
    noise_scale: float,
) -> tuple[StreamState | None, StreamState | None]:
    """Draws noise for the streams that are generated, video first, and mixes it in at noise_scale (the first sigma).

    `generators` holds one CPU generator per batch item (noise.item_generators).
    """
    streams = [stream for stream in (video, audio) if stream is not None and not stream.frozen]
    noises = draw_noise(generators, [stream.token_shape for stream in streams])
    noisy = {id(stream): stream.with_noise(noise, noise_scale) for stream, noise in zip(streams, noises, strict=True)}
    return noisy.get(id(video), video), noisy.get(id(audio), audio)


def expand_noise_mask(mask: Tensor, batch: int, grid: tuple[int, int, int]) -> Tensor:
    """Expands a noise mask to (B, 1, F, H, W) float32.

    Takes 5 axes (B, 1, F, H, W), or fewer, read as (F, H, W) of all items as ComfyUI does; an axis of 1 is repeated,
    other sizes are resampled. Raises ValueError for another batch, more channels, or values outside 0..1.
    """
    shape = tuple(mask.shape)
    if mask.dim() < 2 or mask.dim() > 5:
        raise ValueError(f"A noise mask has 2 to 5 axes ending in height and width, got shape {shape}.")
    if mask.dim() < 5:
        mask = mask.reshape(1, 1, -1, *shape[-2:])
    if mask.shape[0] not in (1, batch) or mask.shape[1] != 1:
        raise ValueError(f"A noise mask for {batch} clips must be ({batch} or 1, 1, F, H, W), got shape {shape}.")
    mask = _checked_values(mask)
    if any(have not in (1, want) for have, want in zip(mask.shape[2:], grid, strict=True)):
        mask = torch.nn.functional.interpolate(mask, size=grid, mode="trilinear")
    return mask.expand(batch, 1, *grid)


def expand_audio_mask(mask: Tensor, batch: int, num_tokens: int) -> Tensor:
    """Expands a noise mask of a sound to one value per audio latent frame, (B, T, 1) float32.

    Takes (B, T), or 4 axes (B, C, T, M) as ComfyUI's nodes make it; an axis of 1 is repeated. A time axis one off is
    trimmed or repeated, like the latent itself. Raises ValueError for another size, for a mask that differs over
    channels or frequencies (a token is a moment of sound, all of it), and for values outside 0..1.
    """
    shape = tuple(mask.shape)
    if mask.dim() not in (2, 4):
        raise ValueError(
            f"A noise mask of a sound must be (clips, frames) or (clips, C, frames, M), got shape {shape}."
        )
    mask = _checked_values(mask)
    if mask.dim() == 4:
        first = mask[:, :1, :, :1]
        if not torch.equal(mask, first.expand_as(mask)):
            raise ValueError(
                "A noise mask of a sound must be the same over all frequencies and channels: it keeps or generates "
                "whole moments of sound."
            )
        mask = first[:, 0, :, 0]
    if mask.shape[0] not in (1, batch) or (mask.shape[1] != 1 and abs(mask.shape[1] - num_tokens) > 1):
        raise ValueError(
            f"A noise mask for {batch} sounds of {num_tokens} frames (25 a second) must hold {batch} or 1 by "
            f"{num_tokens} or 1 values, got shape {shape}."
        )
    if mask.shape[1] not in (1, num_tokens):
        mask = torch.cat([mask, mask[:, -1:]], dim=1)[:, :num_tokens]
    return mask.expand(batch, num_tokens)[:, :, None].contiguous()


def _checked_values(mask: Tensor) -> Tensor:
    mask = mask.float()
    if not bool(((mask >= 0) & (mask <= 1)).all()):  # also false for NaN
        raise ValueError("A noise mask must hold values from 0 (keep) to 1 (generate) only.")
    return mask


def _token_mask(noise_mask: Tensor | None, batch: int, grid: tuple[int, int, int]) -> tuple[Tensor, bool]:
    if noise_mask is None:
        return torch.ones(batch, grid[0] * grid[1] * grid[2], 1), True
    mask = video_tokens(expand_noise_mask(noise_mask, batch, grid))
    return mask, bool((mask == 1).all())


def fit_audio_latent(latent_BCTM: Tensor, num_frames: int, batch: int) -> Tensor:
    """Fits an incoming audio latent (B, C, T, M) to a clip: one frame off is trimmed or repeated, batch 1 is expanded.

    Raises ValueError for a larger difference in frames, and for another batch size.
    """
    have_batch, _, have_frames, _ = latent_BCTM.shape
    if have_batch not in (1, batch):
        raise ValueError(
            f"The audio latent holds {have_batch} clips but the video latent {batch}. Give one audio latent for all, "
            "or as many as there are videos."
        )
    if abs(have_frames - num_frames) > 1:
        raise ValueError(
            f"The audio latent has {have_frames} frames (25 a second) but this clip needs {num_frames}. "
            "Make it for the same number of video frames and fps."
        )
    if have_frames != num_frames:
        action = "trimmed" if have_frames > num_frames else "repeated"
        log.warning(
            "The audio latent has %d frames, the clip needs %d: the last is %s.", have_frames, num_frames, action
        )
        latent_BCTM = torch.cat([latent_BCTM, latent_BCTM[:, :, -1:]], dim=2)[:, :, :num_frames]
    return latent_BCTM.expand(batch, -1, -1, -1)
