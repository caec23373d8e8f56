"""Turns the `config` of a checkpoint into constructor arguments of the audio autoencoder and the vocoder."""

from typing import Any, NamedTuple

from .bundle import Checkpoint
from .configs import require, warn_unknown
from .sections import Section, filled, subsection

_AUDIO_DEFAULTS = {
    "ch": 128,
    "out_ch": 2,
    "in_channels": 2,
    "ch_mult": [1, 2, 4],
    "num_res_blocks": 2,
    # These two official defaults differ from what every published file says.
    "attn_resolutions": [8, 16, 32],
    "mid_block_add_attention": True,
    "resolution": 256,
    "z_channels": 8,
    "double_z": True,
    "norm_type": "pixel",
    "causality_axis": "height",
    "dropout": 0.0,
    "mel_bins": 64,
}
_STFT_DEFAULTS = {"filter_length": 1024, "hop_length": 160, "causal": True}
_GENERATOR_DEFAULTS = {
    "upsample_initial_channel": 1024,
    "upsample_rates": [6, 5, 2, 2, 2],
    "upsample_kernel_sizes": [16, 15, 8, 4, 4],
    "resblock_kernel_sizes": [3, 7, 11],
    "resblock_dilation_sizes": [[1, 3, 5]] * 3,
    "use_tanh_at_final": True,
    "use_bias_at_final": True,
}
_BWE_DEFAULTS = {
    "n_fft": 512,
    "hop_length": 80,
    "num_mels": 64,
    "input_sampling_rate": 16000,
    "output_sampling_rate": 48000,
}
_LATENT_MEL_FACTOR = 4  # three levels, two of them downsample; `diffusers` has it fixed


class MelLayout(NamedTuple):
    """How sound becomes the spectrogram that the audio autoencoder takes: samples per second, window, hop, mel bins."""

    rate: int
    window: int
    hop: int
    bins: int


def audio_vae_kwargs(file: Checkpoint) -> dict[str, Any]:
    """Returns the constructor arguments of AutoencoderKLLTX2Audio."""
    section = file.config_section("audio_vae")
    model = subsection(file, "audio_vae", section, "model")
    params = subsection(file, "audio_vae.model", model, "params")
    if params.get("ddconfig") is None:
        raise ValueError(f"{file.path}: the config has no audio_vae.model.params.ddconfig. Choose the original file.")
    net = subsection(file, "audio_vae.model.params", params, "ddconfig")
    where = f"{file.path}: audio_vae ddconfig"
    warn_unknown(file, "audio_vae ddconfig", net, _AUDIO_DEFAULTS)
    values = filled(file, "audio_vae.model.params.ddconfig", net, _AUDIO_DEFAULTS, or_zero={"attn_resolutions"})
    stft = _stft(file)
    mel_bins, latent = values["mel_bins"], values["z_channels"]
    channels, multipliers = values["ch"], values["ch_mult"]
    if 2 ** (len(multipliers) - 1) != _LATENT_MEL_FACTOR:
        raise ValueError(f"{where} has {len(multipliers)} levels (ch_mult {multipliers}), but only 3 are supported.")
    if channels * _LATENT_MEL_FACTOR != latent * mel_bins:
        raise ValueError(
            f"{where}: ch is {channels}, but the latent statistics need z_channels * mel_bins / 4 = "
            f"{latent * mel_bins // _LATENT_MEL_FACTOR}."
        )
    return {
        "base_channels": channels,
        "output_channels": values["out_ch"],
        "ch_mult": tuple(multipliers),
        "attn_resolutions": tuple(values["attn_resolutions"]) or None,
        "latent_channels": latent,
        **{
            name: values[name]
            for name in (
                "in_channels num_res_blocks mid_block_add_attention resolution double_z norm_type causality_axis "
                "dropout mel_bins"
            ).split()
        },
        "sample_rate": filled(file, "audio_vae.model.params", params, {"sampling_rate": 16000})["sampling_rate"],
        "mel_hop_length": stft["hop_length"],
        "is_causal": stft["causal"],
    }


def mel_layout(file: Checkpoint) -> MelLayout:
    """Returns how sound must be turned into a spectrogram for this file's audio autoencoder."""
    kwargs = audio_vae_kwargs(file)
    window = _stft(file)["filter_length"]
    return MelLayout(kwargs["sample_rate"], window, kwargs["mel_hop_length"], kwargs["mel_bins"])


def _stft(file: Checkpoint) -> dict[str, Any]:
    """Returns how the spectrogram is made, with defaults filled in."""
    preprocessing = subsection(file, "audio_vae", file.config_section("audio_vae"), "preprocessing")
    stft = subsection(file, "audio_vae.preprocessing", preprocessing, "stft")
    return filled(file, "audio_vae.preprocessing.stft", stft, _STFT_DEFAULTS)


def has_bandwidth_extension(file: Checkpoint) -> bool:
    """Tells LTX-2.3's two-stage vocoder (16 to 48 kHz) from LTX-2.0's plain one."""
    return "bwe" in file.config_section("vocoder")


def vocoder_kwargs(file: Checkpoint) -> dict[str, Any]:
    """Returns the constructor arguments of LTX2VocoderWithBWE or LTX2Vocoder, see has_bandwidth_extension."""
    section = file.config_section("vocoder")
    if "bwe" not in section:
        kwargs = _generator_kwargs(file, "vocoder", section, bounded=True)
        return {**kwargs, **filled(file, "vocoder", section, {"output_sampling_rate": 24000})}
    bwe = subsection(file, "vocoder", section, "bwe")
    # Officially the first generator's sound is clamped to -1..1 and the extension's is not.
    first = _generator_kwargs(file, "vocoder.vocoder", subsection(file, "vocoder", section, "vocoder"), bounded=True)
    second = _generator_kwargs(file, "vocoder.bwe", bwe, bounded=False)
    values = filled(file, "vocoder.bwe", bwe, _BWE_DEFAULTS)
    return {
        **first,
        **{f"bwe_{name}": value for name, value in second.items()},
        "filter_length": values["n_fft"],
        "window_length": values["n_fft"],
        "hop_length": values["hop_length"],
        "num_mel_channels": values["num_mels"],
        "input_sampling_rate": values["input_sampling_rate"],
        "output_sampling_rate": values["output_sampling_rate"],
    }


def vocoder_sample_rate(file: Checkpoint) -> int:
    """Returns the samples per second of the finished sound."""
    return vocoder_kwargs(file)["output_sampling_rate"]


def _generator_kwargs(file: Checkpoint, part: str, section: Section, *, bounded: bool) -> dict[str, Any]:
    """Returns the arguments of one waveform generator; `bounded` clamps to -1..1 where there is no tanh."""
    where = f"{file.path}: {part}"
    kind = section.get("resblock", "1")
    if kind not in ("1", "AMP1"):
        raise ValueError(f"{where}.resblock is {kind!r}, but only '1' and 'AMP1' are supported.")
    require(section, {"stereo": True, **({"activation": "snakebeta"} if kind == "AMP1" else {})}, where)
    known = {*_GENERATOR_DEFAULTS, *_BWE_DEFAULTS, "resblock", "stereo", "activation"}
    known |= {"win_size", "apply_final_activation"}  # present in files, officially ignored
    warn_unknown(file, part, section, known)
    values = filled(file, part, section, _GENERATOR_DEFAULTS)
    unbounded = "clamp" if bounded else None
    return {
        "in_channels": 128,
        "out_channels": 2,
        "hidden_channels": values["upsample_initial_channel"],
        "upsample_factors": values["upsample_rates"],
        "upsample_kernel_sizes": values["upsample_kernel_sizes"],
        "resnet_kernel_sizes": values["resblock_kernel_sizes"],
        "resnet_dilations": values["resblock_dilation_sizes"],
        "act_fn": "leaky_relu" if kind == "1" else "snakebeta",
        "antialias": kind == "AMP1",
        "final_act_fn": "tanh" if values["use_tanh_at_final"] else unbounded,
        "final_bias": values["use_bias_at_final"],
    }
