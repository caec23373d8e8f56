"""Video autoencoder: pixels (B, 3, F, H, W) about -1..1, and latents (B, C, f, h, w) as the transformer sees them."""

from collections.abc import Mapping

import torch
from diffusers import AutoencoderKLLTX2Video
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import LTX2VideoCausalConv3d
from diffusers.models.autoencoders.ltx2_diffusion_decoder import LTX2VideoDiffusionDecoder3d
from torch import Tensor, nn

from ..tiling import Grid, TilePlace
from ..weights.bundle import Checkpoint, Paths
from ..weights.diffusion_vae import (
    diffusion_decoder_kwargs,
    diffusion_decoder_state,
    diffusion_min_grid,
    has_diffusion_decoder,
)
from ..weights.registry import StateDictRegistry
from ..weights.vae_configs import decode_min_cells, encoded_channels, scale_factors, video_vae_kwargs
from .builder import ComponentBuilder
from .loading import WeightTracker
from .stored import compute_dtype
from .video_decoder import decode_by_diffusion, make_diffusion_decoder, pixel_noise

DECODE_TIMESTEP, DECODE_NOISE = 0.05, 0.025  # of decoders conditioned on a timestep; the same for all files


class VideoVAE(nn.Module):
    """A convolutional video encoder and a decoder, convolutional or by diffusion, over one latent space.

    Attributes:
        scale_factors: frames, rows and columns of pixels per latent cell.
        min_cells: the smallest side, in latent cells, of a tile that the decoder can take.
        pads_clips: whether a whole clip may be smaller than that.
        latents_mean, latents_std: statistics per channel, float32.
    """

    def __init__(
        self,
        encoder: nn.Module | None,
        decoder: nn.Module,
        *,
        latent_channels: int,
        scale_factors: Grid,
        min_cells: int = 1,
        min_grid: Grid = (1, 1, 1),
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.scale_factors = scale_factors
        self.min_cells = min_cells
        self.pads_clips = isinstance(decoder, LTX2VideoDiffusionDecoder3d)
        self._min_grid = min_grid
        self.register_buffer("latents_mean", torch.zeros(latent_channels))
        self.register_buffer("latents_std", torch.ones(latent_channels))

    @property
    def device(self) -> torch.device:
        """The device of weights and results."""
        return self.latents_mean.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that encoder and decoder compute in."""
        return compute_dtype(self.decoder)

    def normalize(self, latent_BCFHW: Tensor) -> Tensor:
        """Returns (latent - mean) / std per channel, in float32: what the transformer works on."""
        return (latent_BCFHW.float() - _per_channel(self.latents_mean)) / _per_channel(self.latents_std)

    def un_normalize(self, latent_BCFHW: Tensor) -> Tensor:
        """Returns latent * std + mean per channel, in float32: what autoencoder and upsampler work on."""
        return latent_BCFHW.float() * _per_channel(self.latents_std) + _per_channel(self.latents_mean)

    @torch.no_grad()
    def decode(self, latent_BCFHW: Tensor, *, place: TilePlace | None = None, seed: int = 0) -> Tensor:
        """Decodes a normalised latent to pixels about -1..1, not clamped, in the autoencoder's dtype.

        The result has (f - 1) * 8 + 1 frames and 32 times the rows and columns (by the file's scale factors). Decoders
        that draw noise draw that of clip k of a batch from seed + k; `place` says where a tile lies, so that it gets
        its part of the clip's noise. None takes the latent for whole clips.
        """
        latent = latent_BCFHW.to(self.device)
        if not self.draws_noise:
            return self.decoder(self.un_normalize(latent).to(self.dtype), None)
        first = place or TilePlace(0, (0, 0, 0), tuple(latent.shape[2:]))
        places = [first._replace(item=first.item + number) for number in range(latent.shape[0])]
        decode = self._decode_by_diffusion if self.pads_clips else self._decode_with_timestep
        return torch.cat([decode(item, at, seed) for item, at in zip(latent.split(1), places, strict=True)])

    @property
    def draws_noise(self) -> bool:
        """Whether decoding depends on a seed."""
        return self.pads_clips or self.decoder.timestep_scale_multiplier is not None

    @torch.no_grad()
    def encode(self, pixels_BCFHW: Tensor) -> Tensor:
        """Encodes pixels in -1..1 (8k+1 frames) to the normalised mean of the latent, float32."""
        if self.encoder is None:
            raise ValueError("The video autoencoder's file holds no encoder. Choose the file that has both parts.")
        frames, rows, columns = pixels_BCFHW.shape[2:]
        time, height, width = self.scale_factors
        if frames % time != 1 % time or rows % height or columns % width:
            raise ValueError(
                f"A clip to encode needs {time}k+1 frames and sides that are multiples of {height}, "
                f"got {frames} frames of {rows}x{columns}."
            )
        moments = self.encoder(pixels_BCFHW.to(device=self.device, dtype=self.dtype))
        return self.normalize(moments[:, : self.latents_mean.shape[0]])  # what follows says how sure the means are

    def _decode_by_diffusion(self, latent: Tensor, place: TilePlace, seed: int) -> Tensor:
        return decode_by_diffusion(
            self.decoder,
            self.un_normalize(latent).to(self.dtype),
            min_grid=self._min_grid,
            factors=self.scale_factors,
            place=place,
            seed=seed,
        )

    def _decode_with_timestep(self, latent: Tensor, place: TilePlace, seed: int) -> Tensor:
        """Adds a little noise to the latent, as its decoder was trained to remove at this timestep."""
        frames, rows, columns = (range(at, at + side) for at, side in zip(place.first, latent.shape[2:], strict=True))
        noise = pixel_noise(
            seed + place.item,
            (latent.shape[1], *place.grid[1:]),
            frames=frames,
            rows=slice(rows.start, rows.stop),
            columns=slice(columns.start, columns.stop),
            like=latent,
        )
        noisy = self.un_normalize(DECODE_NOISE * noise + (1 - DECODE_NOISE) * latent).to(self.dtype)
        return self.decoder(noisy, torch.full((1,), DECODE_TIMESTEP, device=self.device, dtype=self.dtype))


class VideoVAEBuilder(ComponentBuilder):
    """Builds a VideoVAE of either kind; its latent statistics stay float32."""

    component = "video_vae"

    def construct(self, file: Checkpoint) -> VideoVAE:
        """Makes the autoencoder that the file's config describes, without encoder where the file has none."""
        kwargs = video_vae_kwargs(file)
        whole = AutoencoderKLLTX2Video(**kwargs)
        has_encoder = any(name.startswith("encoder.") for name in file.component("video_vae"))
        decoder, min_grid = whole.decoder, (1, 1, 1)
        if has_diffusion_decoder(file):
            decoder_kwargs = diffusion_decoder_kwargs(file)
            decoder, min_grid = make_diffusion_decoder(decoder_kwargs), diffusion_min_grid(decoder_kwargs)
        return VideoVAE(
            _with_outputs(whole.encoder, encoded_channels(file), kwargs) if has_encoder else None,
            decoder,
            latent_channels=kwargs["latent_channels"],
            scale_factors=scale_factors(file),
            min_cells=decode_min_cells(file),
            min_grid=min_grid,
        )

    def arrange(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Turns a diffusion decoder's tensors into the module's; leaves those of a convolutional one."""
        return diffusion_decoder_state(state) if "decoder.conv_in_x_t.weight" in state else state


def build_video_vae(
    checkpoint: Paths,
    *,
    registry: StateDictRegistry,
    device: torch.device | str,
    dtype: torch.dtype,
    tracker: WeightTracker | None = None,
) -> VideoVAE:
    """Builds the video autoencoder; raises ValueError with one sentence when the file lacks it."""
    return VideoVAEBuilder(checkpoint, registry=registry, tracker=tracker).build(device, dtype)


def _with_outputs(encoder: nn.Module, channels: int, kwargs: Mapping[str, object]) -> nn.Module:
    """Gives an encoder another number of output channels: `diffusers` has one for the variance of all, always."""
    out = encoder.conv_out.conv
    if out.out_channels != channels:
        mode = kwargs["encoder_spatial_padding_mode"]
        encoder.conv_out = LTX2VideoCausalConv3d(out.in_channels, channels, 3, 1, spatial_padding_mode=mode)
    return encoder


def _per_channel(statistic: Tensor) -> Tensor:
    return statistic.float().view(1, -1, 1, 1, 1)
