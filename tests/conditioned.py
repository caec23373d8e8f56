"""Clips of the 6-head checkpoint with conditions of every kind, for every worker count."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mgpu_runtime.pipeline.client import LTXClient
from mgpu_runtime.pipeline.conditions import (
    ImageCondition,
    LatentCondition,
    ReferenceAudioCondition,
    ReferenceCondition,
)
from mgpu_runtime.pipeline.jobs import PromptContext, SPStage, TDPStage
from mgpu_runtime.pipeline.settings import LTXSettings
from mgpu_runtime.sampling.guidance import GuiderParams
from tests.goldens import GOLDEN

UPSAMPLER = str(GOLDEN / "checkpoints" / "tiny_upsampler_x2.safetensors")
FPS = 24.0


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pictures(count: int, seed: int = 0) -> Tensor:
    """Pictures (N, 80, 120, 3) of another size and shape than any clip here."""
    return torch.rand(count, 80, 120, 3, generator=torch.Generator().manual_seed(seed))


POSITIVE = PromptContext(noise(1, 7, 96, seed=1), noise(1, 7, 48, seed=2))
NEGATIVE = PromptContext(noise(1, 5, 96, seed=3), noise(1, 5, 48, seed=4))
CLIP = torch.zeros(2, 16, 3, 3, 5)  # 17 frames of 96x160, two of them
SOUND = noise(1, 2, 18, 16, seed=5)
FIRST = (ImageCondition(0, 0.9), pictures(1))
LAST = (ImageCondition(-1, 0.8, crf=0, attention=0.5), pictures(1, seed=1))
REFERENCE = (ReferenceCondition(1.0, time_scale=2, attention=0.6), pictures(9, seed=2))
HEARD = (ReferenceAudioCondition(), noise(1, 2, 4, 16, seed=6))
STAGE = SPStage(3, FPS, "ltx2", steps=2, preview=False)
DISTILLED = SPStage(3, FPS, "distilled", preview=False)
ONE = CLIP[:1]


def six_head_client(checkpoint: Path, num_workers: int, **changes: object) -> LTXClient:
    return LTXClient(
        replace(LTXSettings(str(checkpoint), upsampler=UPSAMPLER, devices=f"cpu:{num_workers}"), **changes)
    )


def conditioned_clips(ltx: LTXClient) -> dict[str, Tensor]:
    """Everything that touches tokens: in place, appended, masked, perturbed, kept; both samplers with fresh noise."""
    mask = torch.ones(1, 18)
    mask[:, 3:7] = 0.0
    guided = ltx.sp_stage(
        replace(STAGE, sampler="res_2s", max_batch_size=4, video_by_sigma=((0.9, GuiderParams(cfg=2.0)),)),
        POSITIVE,
        NEGATIVE,
        CLIP,
        audio_latent=SOUND,
        audio_mask=mask,
        conditions=[FIRST, LAST, REFERENCE, HEARD],
    )
    follows = ltx.sp_stage(
        replace(STAGE, schedule="distilled", steps=0, sampler="ancestral", audio_mode="keep"),
        POSITIVE,
        None,
        CLIP,
        audio_latent=SOUND,
        conditions=[FIRST, (LatentCondition(8), noise(1, 16, 1, 3, 5, seed=7))],
    )
    fine = ltx.tdp_stage(
        TDPStage(4, FPS, tiles="2x3", overlap=1, preview=False),
        POSITIVE,
        guided.video,
        audio_latent=guided.audio,
        conditions=[FIRST, LAST, REFERENCE, HEARD],
    )
    whole = ltx.tdp_stage(
        TDPStage(5, FPS, mode="sp", sampler="res_2s", sigmas=(0.9, 0.4, 0.0), preview=False),
        POSITIVE,
        guided.video,
        audio_latent=guided.audio,
        conditions=[FIRST, LAST],
    )
    return {
        "guided video": guided.video,
        "guided audio": guided.audio,
        "video after sound": follows.video,
        "kept sound": follows.audio,
        "tiled video": fine.video,
        "whole video": whole.video,
        "whole audio": whole.audio,
    }
