"""Replays the toy model's reference clip on 1, 2, 4 and 8 GPUs, as far as they are there; see gpu_check.sh."""

import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402

from mgpu_runtime.fleet import stop  # noqa: E402
from mgpu_runtime.pipeline.client import LTXClient  # noqa: E402
from mgpu_runtime.pipeline.jobs import Decode, SPStage, TDPStage  # noqa: E402
from mgpu_runtime.pipeline.settings import LTXSettings  # noqa: E402
from mgpu_runtime.sampling.patchify import audio_tokens, video_tokens  # noqa: E402

TOY = ROOT / "assets" / "toy"
# fp32 differs from the CPU by the order of sums; bf16 keeps 8 bits, over 11 steps
LIMITS = {"fp32": 1e-3, "bf16": 0.2}
WORKERS = (1, 2, 4, 8)


def main() -> int:
    """Prints one line per run; returns 1 if one is off, 2 without a GPU."""
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        sys.stdout.write("gpu_check: no CUDA device is visible to this Python's torch\n")
        return 2
    failed = False
    for precision, limit in LIMITS.items():
        for num_workers in [n for n in WORKERS if n <= num_gpus]:
            errors, seconds = replay(num_workers, precision)
            bad = [name for name, error in errors.items() if not error <= limit]
            failed = failed or bool(bad)
            figures = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
            verdict = f"FAIL ({', '.join(bad)})" if bad else "ok"
            sys.stdout.write(f"{precision}, {num_workers} worker(s): {figures}, warm run {seconds:.1f} s: {verdict}\n")
    stop()
    return int(failed)


def replay(num_workers: int, precision: str) -> tuple[dict[str, float], float]:
    """Runs the reference clip twice; returns relative errors of the latents and the second run's seconds."""
    client = LTXClient(
        LTXSettings(
            checkpoint=str(TOY / "ltx-toy-23.safetensors"),
            text_encoder=str(TOY / "gemma-toy"),
            upsampler=str(TOY / "ltx-toy-upsampler-x2.safetensors"),
            devices=",".join(str(index) for index in range(num_workers)),
            precision=precision,
        )
    )
    with safe_open(TOY / "reference" / "clip0.safetensors", framework="pt") as file:
        facts = json.loads(file.metadata()["case"])
        stored = {name: file.get_tensor(name) for name in file.keys()}
    for _ in range(2):
        began = time.monotonic()
        positive, _ = client.encode(facts["prompt"], "", facts["text_length"])
        first = client.sp_stage(
            SPStage(facts["seed"], facts["fps"], sigmas=tuple(facts["stage1_sigmas"]), schedule="distilled"),
            positive,
            None,
            torch.zeros(1, 128, 3, 4, 4),
            noise=(stored["stage1.video_noise"], stored["stage1.audio_noise"]),
        )
        second = client.tdp_stage(
            TDPStage(facts["seed"], facts["fps"], sigmas=tuple(facts["stage2_sigmas"]), mode="sp"),
            positive,
            first.video,
            audio_latent=first.audio,
            noise=(stored["stage2.video_noise"], stored["stage2.audio_noise"]),
        )
        client.tdp_stage(
            TDPStage(facts["seed"], facts["fps"], tiles="1x2", overlap=2),
            positive,
            first.video,
            audio_latent=first.audio,
        )
        clip = client.decode(Decode("1x2", overlap=1), second.video, audio_latent=second.audio)
        seconds = time.monotonic() - began
    assert torch.isfinite(clip.frames).all() and torch.isfinite(clip.waveform).all()
    made = {
        "stage1.video_latent": video_tokens(first.video),
        "stage1.audio_latent": audio_tokens(first.audio),
        "stage2.video_latent": video_tokens(second.video),
        "stage2.audio_latent": audio_tokens(second.audio),
    }
    return {name: _relative(tensor, stored[name]) for name, tensor in made.items()}, seconds


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    sys.exit(main())
