"""Conformance checks of the models: transformer, text connectors, autoencoders, vocoder, upsampler."""

import re
from collections.abc import Iterator

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed

from mgpu_runtime.models import audio_vae, connectors, mel, upsampler, vocoder
from mgpu_runtime.models.lora import LoRAFuser, read_deltas
from mgpu_runtime.weights.audio_configs import MelLayout
from mgpu_runtime.weights.lora import LoRAFile
from mgpu_runtime.weights.lora_targets import lora_targets, match_lora
from tests.conformance_bench import Bench, Triple
from tests.goldens import Case

PUBLISHED_MEL = MelLayout(rate=16000, window=1024, hop=160, bins=64)  # of the goldens' spectrograms


def check_transformer(case: Case, bench: Bench, checkpoint: str = "{style}") -> Iterator[Triple]:
    model = bench.sequence_parallel(checkpoint.format(style=_style(case)))
    velocities = model.predict(case.stream("video"), case.stream("audio"), case.get("perturbation_keep_mask"))
    for stream, velocity in zip(("video", "audio"), velocities, strict=True):
        for prefix in ("out", "out.unsharded"):
            expected = case.get(f"{prefix}.{stream}_velocity")
            if expected is not None:
                yield f"{stream} velocity", velocity, expected


def check_fp8(case: Case, bench: Bench) -> Iterator[Triple]:
    yield from check_transformer(case, bench, "{style}_fp8")


def _style(case: Case) -> str:
    """Returns the style a case's facts name, else the second part of its own name."""
    return case.facts.get("style") or case.name.split("_")[1]


def check_lora(case: Case, bench: Bench) -> Iterator[Triple]:
    """The LoRA of the case's style, fused by both rules, and the model as it was before and after."""
    style, strength = case.facts["style"], case.facts["strength"]
    path = bench.checkpoint(style)
    model = bench.sequence_parallel(style)
    file = LoRAFile(bench.directory / "checkpoints" / f"tiny_lora_ltx{style}.safetensors")
    match = match_lora(file, lora_targets(bench.registry.checkpoint(path)))
    deltas = read_deltas([(match, strength)], "transformer")
    rules = {"out": LoRAFuser(model.model, rule="float32"), "bf16rule": LoRAFuser(model.model, rule="bf16")}
    for prefix in ("base", "out", "bf16rule", "base"):
        fuser = rules.get(prefix)
        if fuser is not None:
            fuser.fuse(deltas)
        velocities = model.predict(case.stream("video"), case.stream("audio"))
        if fuser is not None:
            fuser.fuse({})
        for stream, velocity in zip(("video", "audio"), velocities, strict=True):
            if case.get(f"{prefix}.{stream}_velocity") is not None:
                yield f"{prefix} {stream} velocity", velocity, case[f"{prefix}.{stream}_velocity"]


def check_rope(case: Case, bench: Bench) -> Iterator[Triple]:
    for name in sorted({key.rsplit(".", 1)[0] for key in case.tensors if key.endswith(".cos")}):
        stream, rope_type, precision = name.split(".")
        cos, sin = case[f"{name}.cos"], case[f"{name}.sin"]
        split = rope_type == "split"
        table = LTX2AudioVideoRotaryPosEmbed(
            dim=2 * cos.shape[1] * cos.shape[3] if split else cos.shape[2],
            modality="audio" if stream == "audio" else "video",
            scale_factors=(4,) if stream == "audio" else (8, 32, 32),
            double_precision=precision == "float64",
            rope_type=rope_type,
            num_attention_heads=cos.shape[1] if split else 1,
        )
        actual = table(case[f"{stream}.positions"])
        yield f"{stream} rotary table", torch.stack(actual), torch.stack([cos, sin])


def check_connectors(case: Case, bench: Bench) -> Iterator[Triple]:
    path = bench.checkpoint(case.facts["style"])
    module = bench.build(connectors.build_connectors, path, dtype=torch.float32)
    contexts = connectors.connect(module, case["hidden_states"], case["attention_mask"])
    yield "video context", contexts.video, case["out.video_context"]
    yield "audio context", contexts.audio, case["out.audio_context"]
    yield "mask", contexts.mask, case["out.mask"]


def check_vae_decode(case: Case, bench: Bench) -> Iterator[Triple]:
    yield "video decode", bench.vae(case.facts["style"]).decode(case["latent"]), case["out.pixels"]


def check_vae_encode(case: Case, bench: Bench) -> Iterator[Triple]:
    vae = bench.vae(case.facts["style"])
    yield "video encode", vae.encode(case["pixels"]), case["out.latent"]
    yield "image encode", vae.encode(case["image"]), case["out.image_latent"]


def check_vae_statistics(case: Case, bench: Bench) -> Iterator[Triple]:
    vae = bench.vae(case.facts["style"])
    yield "statistics", torch.stack([vae.latents_mean, vae.latents_std]), torch.stack([case["mean"], case["std"]])
    yield "normalize", vae.normalize(case["x"]), case["out.normalize"]
    yield "un-normalize", vae.un_normalize(case["x"]), case["out.un_normalize"]


def check_audio_decode(case: Case, bench: Bench) -> Iterator[Triple]:
    path = bench.checkpoint(case.facts["style"])
    decoded = audio_vae.decode_mel(bench.build(audio_vae.build_audio_vae, path, dtype=torch.float32), case["latent"])
    yield "audio decode", decoded, case["out.mel"]
    module = bench.build(vocoder.build_vocoder, path)
    yield "vocoder", vocoder.synthesize(module, case["out.mel"])[0], case["out.waveform"]
    rate = torch.tensor(vocoder.sample_rate(module))
    yield "sample rate", rate, torch.tensor(case.facts["sampling_rate"])
    if case.get("out.low_rate_waveform") is not None:
        yield "first vocoder", module.vocoder(case["out.mel"]), case["out.low_rate_waveform"]


def check_audio_encode(case: Case, bench: Bench) -> Iterator[Triple]:
    module = bench.build(audio_vae.build_audio_vae, bench.checkpoint(case.facts["style"]), dtype=torch.float32)
    yield "audio encode", audio_vae.encode_mel(module, case["mel"]), case["out.latent"]


def check_audio_mel(case: Case, bench: Bench) -> Iterator[Triple]:
    for name in sorted(name for name in case.tensors if name.startswith("waveform")):
        rate = int(name.removeprefix("waveform_")) if "_" in name else PUBLISHED_MEL.rate
        expected = case["out.mel" if "_" not in name else f"out.mel_from_{rate}"]
        yield f"log-mel from {rate} Hz", mel.log_mel(case[name], rate, PUBLISHED_MEL), expected


def check_upsampler(case: Case, bench: Bench) -> Iterator[Triple]:
    path = bench.directory / "checkpoints" / f"tiny_{case.name}.safetensors"
    module = bench.build(upsampler.build_upsampler, path, dtype=torch.float32)
    yield "upsampler", module(case["latent"]), case["out.raw"]
    wrapped = upsampler.upsample(module, bench.vae(_statistics_style(case, bench)), case["latent"])
    yield "upsampler with statistics", wrapped, case["out.wrapped"]


def _statistics_style(case: Case, bench: Bench) -> str:
    """Tells whose autoencoder's statistics the goldens' upsampler stands between: its sentence names a version."""
    told = re.search(r"(\d)\.(\d) VAE", case.facts.get("what", ""))
    if told and bench.checkpoint(told[1] + told[2]).exists():
        return told[1] + told[2]
    prefix = bench.checkpoint("").stem
    styles = [path.stem.removeprefix(prefix) for path in sorted(bench.checkpoint("").parent.glob(f"{prefix}*"))]
    width = case["latent"].shape[1]
    fitting = [style for style in styles if bench.latent_width(style) == width]
    if not fitting:
        raise ValueError(f"no checkpoint has a video autoencoder of {width} latent channels for its statistics")
    return fitting[-1]
