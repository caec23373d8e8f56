"""Checks the exchange, then replays the toy model's clips on 1, 2, 4 and 8 GPUs as far as they are there.

See gpu_check.sh. The exchange's checks, in gpu_exchange.py, also run several processes on one GPU.

The reference clip is held against stored results; a clip with a picture, guidance, a LoRA and res_2s against this
machine's CPU; weights rounded to fp8 against bf16.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import gpu_exchange  # noqa: E402
import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from mgpu_runtime.fleet import stop  # noqa: E402
from mgpu_runtime.pipeline.client import LTXClient  # noqa: E402
from mgpu_runtime.pipeline.conditions import ImageCondition  # noqa: E402
from mgpu_runtime.pipeline.jobs import Decode, LoRASpec, SPStage, TDPStage  # noqa: E402
from mgpu_runtime.pipeline.settings import LTXSettings  # noqa: E402
from mgpu_runtime.sampling.guidance import GuiderParams  # noqa: E402
from mgpu_runtime.sampling.patchify import audio_tokens, video_tokens  # noqa: E402

TOY = ROOT / "assets" / "toy"
# fp32 differs from the CPU by the order of sums; bf16 keeps 8 bits, over 11 steps
LIMITS = {"fp32": 1e-3, "bf16": 0.2}
FEATURES_LIMIT, FP8_LIMIT = 1e-2, 0.2  # guidance enlarges what sums differ by; fp8 keeps 4 bits
WORKERS = (1, 2, 4, 8)


def main() -> int:
    """Prints one line per run; returns 1 if one is off, 2 without a GPU."""
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        sys.stdout.write("gpu_check: no CUDA device is visible to this Python's torch\n")
        return 2
    failed = gpu_exchange.main() != 0
    for precision, limit in LIMITS.items():
        for num_workers in [n for n in WORKERS if n <= num_gpus]:
            errors, seconds = replay(num_workers, precision)
            what = f"{precision}, {num_workers} worker(s), warm run {seconds:.1f} s"
            failed = not verdict(what, errors, limit) or failed
    with tempfile.TemporaryDirectory() as folder:
        lora = write_lora(Path(folder) / "lora.safetensors")
        expected = conditioned(_client("cpu", "fp32"), lora)
        for num_workers in [n for n in WORKERS if n <= num_gpus]:
            errors = _errors(conditioned(_client(_gpus(num_workers), "fp32"), lora), expected)
            failed = not verdict(f"conditioned clip, {num_workers} worker(s)", errors, FEATURES_LIMIT) or failed
        wide = conditioned(_client(_gpus(1), "bf16"), lora)
        errors = _errors(conditioned(_client(_gpus(1), "fp8"), lora), wide)
        failed = not verdict("fp8 against bf16", errors, FP8_LIMIT) or failed
    stop()
    return int(failed)


def verdict(what: str, errors: dict[str, float], limit: float) -> bool:
    """Prints relative errors as a line and tells whether all keep within the limit."""
    bad = [name for name, error in errors.items() if not error <= limit]
    figures = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    sys.stdout.write(f"{what}: {figures}: {f'FAIL ({chr(44).join(bad)})' if bad else 'ok'}\n")
    return not bad


def write_lora(path: Path) -> str:
    """Writes a small random LoRA for every query projection of the toy's video self-attention."""
    numbers = torch.Generator().manual_seed(0)
    tensors = {}
    with safe_open(TOY / "ltx-toy-23.safetensors", framework="pt") as file:
        for name in [name for name in file.keys() if name.endswith("attn1.to_q.weight") and ".connector" not in name]:
            height, width = file.get_slice(name).get_shape()
            module = name.removeprefix("model.").removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"] = torch.randn(4, width, generator=numbers) * 0.05
            tensors[f"{module}.lora_B.weight"] = torch.randn(height, 4, generator=numbers) * 0.05
    save_file({name: tensor for name, tensor in tensors.items() if "embeddings_connector" not in name}, path)
    return str(path)


def conditioned(client: LTXClient, lora: str) -> dict[str, torch.Tensor]:
    """Makes a clip with a first picture, guidance, a LoRA and res_2s in stage 1, and a refinement without LoRA."""
    guider = GuiderParams(cfg=2.0, stg=1.0, stg_blocks=(1,), rescale=0.7, modality=1.5)
    picture = torch.linspace(0, 1, 128 * 128 * 3).view(1, 128, 128, 3)
    start = [(ImageCondition(crf=0), picture), (ImageCondition(frame=-1, strength=0.8, attention=0.5, crf=0), picture)]
    positive, negative = client.encode("a red ball moving right on a dark background", "", 128)
    levels = (1.0, 0.725, 0.421875, 0.0)
    first = client.sp_stage(
        SPStage(1, 24.0, sigmas=levels, video=guider, audio=guider, sampler="res_2s", eta=0.0, loras=(LoRASpec(lora),)),
        positive,
        negative,
        torch.zeros(1, 128, 3, 4, 4),
        conditions=start,
    )
    second = client.tdp_stage(
        TDPStage(1, 24.0, tiles="1x2", overlap=2), positive, first.video, audio_latent=first.audio, conditions=start
    )
    sound = client.encode_audio(torch.sin(torch.arange(16000) * 0.1)[None, None], 16000)
    return {"stage 1": first.video, "its sound": first.audio, "stage 2": second.video, "encoded sound": sound}


def replay(num_workers: int, precision: str) -> tuple[dict[str, float], float]:
    """Runs the reference clip twice; returns relative errors of the latents and the second run's seconds."""
    client = _client(_gpus(num_workers), precision)
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
    return _errors(made, stored), seconds


def _client(devices: str, precision: str) -> LTXClient:
    return LTXClient(
        LTXSettings(
            checkpoint=str(TOY / "ltx-toy-23.safetensors"),
            text_encoder=str(TOY / "gemma-toy"),
            upsampler=str(TOY / "ltx-toy-upsampler-x2.safetensors"),
            devices=devices,
            precision=precision,
        )
    )


def _gpus(num_workers: int) -> str:
    return ",".join(str(index) for index in range(num_workers))


def _errors(made: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: _relative(tensor, expected[name]) for name, tensor in made.items()}


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    sys.exit(main())
