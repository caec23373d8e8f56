"""Conformance checks of sampling: schedules, positions, tokens, guidance, steppers, whole loops."""

import re
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from mgpu_runtime.sampling import patchify, positions, sigmas, sizes, steppers
from mgpu_runtime.sampling.denoiser import GuidedDenoiser
from mgpu_runtime.sampling.guidance import combine
from mgpu_runtime.sampling.loop import denoise_loop
from mgpu_runtime.sampling.res2s import renoise
from mgpu_runtime.sampling.state import StreamState, audio_state, video_state
from tests.conformance_bench import Bench, Triple
from tests.goldens import Case, guider


def check_sigmas(case: Case, bench: Bench) -> Iterator[Triple]:
    fixed = {
        "distilled_stage1": sigmas.DISTILLED_STAGE1,
        "distilled_stage2": sigmas.DISTILLED_STAGE2,
        "tdp_stage2": sigmas.TDP_STAGE2,
    }
    for name, expected in case.tensors.items():
        if name in fixed:
            yield name, torch.tensor(fixed[name]), expected
            continue
        kind, _, rest = name.partition(".steps")
        steps = int(re.match(r"\d+", rest)[0])
        if kind.startswith("linear_quadratic"):
            threshold = re.search(r"threshold([\d.]*\d)", name)
            options = {"linear_end": float(threshold[1])} if threshold else {}
            yield "linear-quadratic schedule", torch.tensor(sigmas.linear_quadratic_sigmas(steps, **options)), expected
            continue
        if kind.startswith("beta"):
            yield "beta schedule", torch.tensor(sigmas.beta_sigmas(steps)), expected
            continue
        tokens = int(re.search(r"\.tokens(?:default)?(\d+)", rest)[1])
        terminal = re.search(r"terminal([\d.]+)", kind)
        options = {"terminal": float(terminal[1])} if terminal else {"stretch": "nostretch" not in kind}
        yield "ltx2 schedule", torch.tensor(sigmas.ltx2_sigmas(steps, tokens, **options)), expected


def check_positions(case: Case, bench: Bench) -> Iterator[Triple]:
    for name, expected in case.tensors.items():
        audio = re.fullmatch(r"audio\.n(\d+)", name)
        if audio:
            yield "audio positions", positions.audio_positions(int(audio[1])), expected
            continue
        frames, height, width, fps = re.fullmatch(r"video\.f(\d+)h(\d+)w(\d+)fps([\d.]+)", name).groups()
        grid = (int(frames), int(height), int(width))
        yield "video positions", positions.video_positions(grid, float(fps)), expected


def check_patchify(case: Case, bench: Bench) -> Iterator[Triple]:
    yield "video tokens", patchify.video_tokens(case["video"]), case["out.video_tokens"]
    yield "audio tokens", patchify.audio_tokens(case["audio"]), case["out.audio_tokens"]
    grid = tuple(case["video"].shape[2:])
    yield "video latent", patchify.video_latent(case["out.video_tokens"], grid), case["video"]
    yield "audio latent", patchify.audio_latent(case["out.audio_tokens"], case["audio"].shape[1]), case["audio"]


def check_guidance(case: Case, bench: Bench) -> Iterator[Triple]:
    passes = {name: case[name] for name in ("cond", "uncond", "perturbed", "isolated")}
    for name, values in case.facts.items():
        yield "guidance", combine(guider(values), **passes), case[f"out.{name}"]


def check_steppers(case: Case, bench: Bench) -> Iterator[Triple]:
    for name, expected in case.tensors.items():
        found = re.fullmatch(r"out\.(euler|ancestral|res_?2s)(?:\.eta([\d.]+))?\.step(\d+)", name)
        if not found:
            continue
        step = int(found[3])
        levels = case["sigmas"][step : step + 2].tolist()
        sample, denoised, noise = case["sample"], case["denoised"], case["noise"]
        if found[1] == "euler":
            yield "euler", steppers.euler(sample, denoised, *levels), expected
        elif found[1] == "ancestral":
            actual = steppers.ancestral(sample, denoised, *levels, noise, float(found[2] or 1.0))
            yield "ancestral euler", actual, expected
        else:
            actual = denoised if levels[1] == 0.0 else renoise(sample, denoised, *levels, noise, float(found[2] or 0.5))
            yield "res_2s noise", actual, expected


def check_loop(case: Case, bench: Bench) -> Iterator[Triple]:
    """Runs both stages of a two-stage case, each from the case's own start and noise."""
    model = bench.sequence_parallel(case.facts["style"])
    context = SimpleNamespace(video=case["video_context"], audio=case["audio_context"], mask=None)
    mel_bins = case["out.stage1.audio"].shape[3]
    channels = case["out.stage1.audio"].shape[1]
    sound = torch.zeros(1, channels, case.facts["audio_frames"], mel_bins)
    for stage in ("stage1", "stage2"):
        grid = tuple(case[f"out.{stage}.video"].shape[2:])
        level = case[f"{stage}.sigmas"][0].item()
        audio = audio_state(sound).with_noise(case[f"{stage}.audio_noise"], level)
        video = _first_state(case, stage, grid).with_noise(case[f"{stage}.video_noise"], level)
        video, audio = denoise_loop(
            video,
            audio,
            case[f"{stage}.sigmas"],
            GuidedDenoiser(model, context),
            stepper=_given_noise(case, stage) if case.get(f"{stage}.step0.video_ancestral_noise") is not None else None,
        )
        sound = patchify.audio_latent(audio.latent, channels)
        yield f"{stage} video", patchify.video_latent(video.latent, grid), case[f"out.{stage}.video"]
        yield f"{stage} audio", sound, case[f"out.{stage}.audio"]
        slots = case.get(f"out.{stage}.generated_keyframes")
        if slots is not None:  # single frames that the model makes beside the clip, in tokens behind it
            tokens = video.latent[:, grid[0] * grid[1] * grid[2] :]
            yield f"{stage} keyframe slots", patchify.video_latent(tokens, tuple(slots.shape[2:])), slots


def _first_state(case: Case, stage: str, grid: tuple[int, int, int]) -> StreamState:
    initial = case.get(f"{stage}.initial_video_latent")
    clean = case[f"{stage}.video_clean_latent"]
    latent = torch.zeros_like(clean)
    if initial is not None:
        latent[:, : grid[0] * grid[1] * grid[2]] = patchify.video_tokens(initial)
    return StreamState(
        latent,
        clean,
        case[f"{stage}.video_denoise_mask"],
        case[f"{stage}.video_positions"],
        case[f"{stage}.video_keyframes_mask"],
        attention_mask=case.get(f"{stage}.video_attention_mask"),
    )


def _given_noise(case: Case, stage: str) -> steppers.Stepper:
    """Steps with the case's noise; a stream is told by its width."""
    width = case[f"{stage}.video_noise"].shape[2]
    levels = case[f"{stage}.sigmas"].tolist()

    def step_once(state: StreamState, denoised: Tensor, sigma: float, sigma_next: float) -> Tensor:
        if sigma_next == 0.0:
            return denoised
        stream = "video" if denoised.shape[2] == width else "audio"
        step = min(range(len(levels)), key=lambda i: abs(levels[i] - sigma))
        noise, eta = case[f"{stage}.step{step}.{stream}_ancestral_noise"], case.facts.get("eta", 1.0)
        return state.keep_clean(steppers.ancestral(state.latent, denoised, sigma, sigma_next, noise, eta))

    return step_once


def check_loop_guided(case: Case, bench: Bench) -> Iterator[Triple]:
    style = case.facts["style"]
    model = bench.sequence_parallel(style)
    latent = torch.zeros_like(case["out.video"])
    mask = torch.ones(1, 1, latent.shape[2], 1, 1)
    if case.get("image_latent_frame0") is not None:
        latent[:, :, :1], mask[:, :, 0] = case["image_latent_frame0"], 0.0
    level = case["sigmas"][0].item()
    contexts = [
        SimpleNamespace(video=case[f"video_context_{sign}"], audio=case[f"audio_context_{sign}"], mask=None)
        for sign in ("positive", "negative")
    ]
    denoise = GuidedDenoiser(
        model,
        *contexts,
        video=guider(case.facts["video_guider"]),
        audio=guider(case.facts["audio_guider"]),
        num_layers=len(model.model.transformer_blocks),
    )
    video, audio = denoise_loop(
        video_state(latent, case.facts["fps"], noise_mask=mask).with_noise(case["video_noise"], level),
        audio_state(torch.zeros_like(case["out.audio"])).with_noise(case["audio_noise"], level),
        case["sigmas"],
        denoise,
    )
    yield "guided video", patchify.video_latent(video.latent, tuple(latent.shape[2:])), case["out.video"]
    yield "guided audio", patchify.audio_latent(audio.latent, case["out.audio"].shape[1]), case["out.audio"]


def check_latent_sizes(table: dict) -> Iterator[Triple]:
    for frames, height, width, fps, *expected in table["rows"]:
        # the table also lists sizes that are no multiple of 32, whose latents it rounds down
        whole = sizes.latent_size(frames, height // 32 * 32, width // 32 * 32, fps)
        yield "latent size", torch.tensor([*whole.grid, whole.audio_frames]), torch.tensor(expected)
