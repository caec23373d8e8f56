"""Conformance checks of the models: transformer, text connectors, autoencoders, vocoder, upsampler."""

from collections.abc import Iterator

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed

from mgpu_runtime.models import audio_vae, connectors, upsampler, video_vae, vocoder
from tests.conformance_bench import Bench, Triple
from tests.goldens import Case

UPSAMPLER_STATISTICS = "23"  # the goldens' wrapped upsampler uses the statistics of this style's autoencoder


def check_transformer(case: Case, bench: Bench) -> Iterator[Triple]:
    model = bench.sequence_parallel(case.facts["style"])
    velocities = model.predict(case.stream("video"), case.stream("audio"), case.get("perturbation_keep_mask"))
    for stream, velocity in zip(("video", "audio"), velocities, strict=True):
        for prefix in ("out", "out.unsharded"):
            expected = case.get(f"{prefix}.{stream}_velocity")
            if expected is not None:
                yield f"{stream} velocity", velocity, expected


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
    yield "video decode", video_vae.decode(bench.vae(case.facts["style"]), case["latent"]), case["out.pixels"]


def check_vae_encode(case: Case, bench: Bench) -> Iterator[Triple]:
    vae = bench.vae(case.facts["style"])
    yield "video encode", video_vae.encode(vae, case["pixels"]), case["out.latent"]
    yield "image encode", video_vae.encode(vae, case["image"]), case["out.image_latent"]


def check_vae_statistics(case: Case, bench: Bench) -> Iterator[Triple]:
    vae = bench.vae(case.facts["style"])
    yield "statistics", torch.stack([vae.latents_mean, vae.latents_std]), torch.stack([case["mean"], case["std"]])
    yield "normalize", video_vae.normalize(case["x"], vae), case["out.normalize"]
    yield "un-normalize", video_vae.un_normalize(case["x"], vae), case["out.un_normalize"]


def check_audio_decode(case: Case, bench: Bench) -> Iterator[Triple]:
    path = bench.checkpoint(case.facts["style"])
    mel = audio_vae.decode_mel(bench.build(audio_vae.build_audio_vae, path, dtype=torch.float32), case["latent"])
    yield "audio decode", mel, case["out.mel"]
    module = bench.build(vocoder.build_vocoder, path)
    yield "vocoder", vocoder.synthesize(module, case["out.mel"])[0], case["out.waveform"]
    rate = torch.tensor(vocoder.sample_rate(module))
    yield "sample rate", rate, torch.tensor(case.facts["sampling_rate"])
    if case.get("out.low_rate_waveform") is not None:
        yield "first vocoder", module.vocoder(case["out.mel"]), case["out.low_rate_waveform"]


def check_audio_encode(case: Case, bench: Bench) -> Iterator[Triple]:
    module = bench.build(audio_vae.build_audio_vae, bench.checkpoint(case.facts["style"]), dtype=torch.float32)
    yield "audio encode", audio_vae.encode_mel(module, case["mel"]), case["out.latent"]


def check_upsampler(case: Case, bench: Bench) -> Iterator[Triple]:
    path = bench.directory / "checkpoints" / f"tiny_{case.name}.safetensors"
    module = bench.build(upsampler.build_upsampler, path, dtype=torch.float32)
    yield "upsampler", module(case["latent"]), case["out.raw"]
    wrapped = upsampler.upsample(module, bench.vae(UPSAMPLER_STATISTICS), case["latent"])
    yield "upsampler with statistics", wrapped, case["out.wrapped"]
