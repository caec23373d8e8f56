"""The length of a clip as a prompt asks for it: the duration head of LTX-2.5, and the rounding to frames."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from mgpu_runtime.fleet import JobContext, RankInfo
from mgpu_runtime.models.duration_head import DurationHeadBuilder, predict_seconds
from mgpu_runtime.pipeline.checks import check_components, needed_components
from mgpu_runtime.pipeline.jobs import PredictLength, from_record, to_record
from mgpu_runtime.pipeline.runner import LTXRunner
from mgpu_runtime.pipeline.settings import LTXSettings
from mgpu_runtime.pipeline.text_length import clip_length
from mgpu_runtime.weights.facts import describe
from mgpu_runtime.weights.registry import StateDictRegistry
from tests.weights_files import TOY_23

VIDEO, AUDIO, HIDDEN, QUERIES, MLP = 192, 64, 16, 2, 12  # the toy's widths
NAMES = ("positive_video", "positive_audio")
TRANSFORMER = {"cross_attention_dim": VIDEO, "audio_cross_attention_dim": AUDIO}


def tensors() -> dict[str, Tensor]:
    """Makes the published names with random values."""
    shapes = {
        "video_input_proj.weight": (HIDDEN, VIDEO),
        "video_input_proj.bias": (HIDDEN,),
        "video_modality_emb": (HIDDEN,),
        "audio_input_proj.weight": (HIDDEN, AUDIO),
        "audio_input_proj.bias": (HIDDEN,),
        "audio_modality_emb": (HIDDEN,),
        "attention_pooler.query_tokens": (QUERIES, HIDDEN),
        "attention_pooler.cross_attn.in_proj_weight": (3 * HIDDEN, HIDDEN),
        "attention_pooler.cross_attn.in_proj_bias": (3 * HIDDEN,),
        "attention_pooler.cross_attn.out_proj.weight": (HIDDEN, HIDDEN),
        "attention_pooler.cross_attn.out_proj.bias": (HIDDEN,),
        "mlp_hidden.weight": (MLP, HIDDEN * QUERIES),
        "mlp_hidden.bias": (MLP,),
        "mlp_out.weight": (1, MLP),
        "mlp_out.bias": (1,),
    }
    torch.manual_seed(5)
    return {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}


def write_head(path: Path, section: dict | None = None, changed: dict[str, Tensor | None] | None = None) -> Path:
    kept = {name: tensor for name, tensor in {**tensors(), **(changed or {})}.items() if tensor is not None}
    metadata = {"config": json.dumps({"transformer": TRANSFORMER, "duration_head": section})}
    named = {f"duration_head.{name}": tensor for name, tensor in kept.items()}
    save_file(named, path, metadata=metadata if section is not None else None)
    return path


def contexts() -> tuple[Tensor, Tensor]:
    torch.manual_seed(6)
    return torch.randn(1, 128, VIDEO), torch.randn(1, 128, AUDIO)


def reference(num_heads: int) -> float:
    """Computes the head with torch's own multi-head attention, whose layout the file has."""
    given, (video, audio) = tensors(), contexts()
    pooler = nn.MultiheadAttention(HIDDEN, num_heads, batch_first=True)
    prefix = "attention_pooler.cross_attn."
    pooler.load_state_dict({name.removeprefix(prefix): t for name, t in given.items() if name.startswith(prefix)})
    streams = [
        F.linear(tokens, given[f"{name}_input_proj.weight"], given[f"{name}_input_proj.bias"])
        + given[f"{name}_modality_emb"]
        for name, tokens in (("video", video), ("audio", audio))
    ]
    tokens = torch.cat(streams, dim=1)
    with torch.no_grad():
        pooled, _ = pooler(given["attention_pooler.query_tokens"][None], tokens, tokens)
    hidden = F.linear(pooled.flatten(1), given["mlp_hidden.weight"], given["mlp_hidden.bias"])
    hidden = F.gelu(hidden, approximate="tanh")
    return math.exp(F.linear(hidden, given["mlp_out.weight"], given["mlp_out.bias"]).item())


@pytest.mark.parametrize(
    ("section", "num_heads"), [({}, 4), ({"num_pooler_heads": 2}, 2), ({"mlp_hidden": MLP}, 4), (None, 4)]
)
def test_seconds_are_those_of_the_formula(tmp_path: Path, section: dict | None, num_heads: int) -> None:
    path = write_head(tmp_path / "head.safetensors", section)
    head = DurationHeadBuilder(path, registry=StateDictRegistry()).build("cpu", torch.float32)
    assert predict_seconds(head, *contexts()) == pytest.approx(reference(num_heads), rel=1e-5)


def test_a_head_that_does_not_fit_its_config_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    for section, changed, match in (
        ({"pooler_hidden_dim": 32}, {}, "of another shape"),
        ({}, {"mlp_out.bias": None}, "1 missing .mlp_out.bias"),
        ({}, {"attention_pooler.cross_attn.in_proj_bias": None}, "3 missing .attention_pooler.to_k.bias"),
        ({}, {"mlp_out.bias": torch.full((1,), float("nan"))}, "'mlp_out.bias' holds numbers that are not finite"),
    ):
        write_head(path, section, changed)
        with pytest.raises(ValueError, match=match):
            DurationHeadBuilder(path, registry=StateDictRegistry()).build("cpu", torch.float32)


def test_the_job_needs_a_head_and_runs_on_the_runner(tmp_path: Path) -> None:
    assert from_record(*to_record(PredictLength())) == PredictLength()
    assert needed_components(PredictLength(), with_sound=False) == ("duration_head",)
    bare = LTXSettings(str(TOY_23))
    with pytest.raises(ValueError, match="only LTX-2.5 has one"):
        check_components(PredictLength(), describe(bare.checkpoint_files()), bare)
    settings = LTXSettings(str(TOY_23), duration_head=str(write_head(tmp_path / "head.safetensors", {})))
    facts = describe(settings.checkpoint_files())
    check_components(PredictLength(), facts, settings)
    runner = LTXRunner()
    runner.info = RankInfo(0, 1, torch.device("cpu"), None)
    runner.setup(settings=asdict(settings))
    name, fields = to_record(PredictLength())
    job = {"name": name, "fields": fields, "tensors": dict(zip(NAMES, contexts(), strict=True))}
    runner.check(**job)
    result = runner(JobContext("1", runner.info, lambda frame: True, lambda: False), **job)
    assert result["seconds"] == pytest.approx(reference(4), rel=1e-5) and result["files_read"] == 1


@pytest.mark.parametrize(
    ("seconds", "fps", "most", "frames"),
    [(5.0, 24, 20, 121), (5.1, 24, 20, 129), (0.01, 24, 20, 1), (60.0, 24, 20, 473), (3.0, 25, 0.01, 1), (1, 8, 1, 1)],
)
def test_b27_the_length_is_rounded_up_within_the_limit(seconds: float, fps: float, most: float, frames: int) -> None:
    assert clip_length(seconds, fps, most) == frames


@given(st.floats(0.01, 100), st.floats(1, 240), st.floats(0.1, 60), st.sampled_from([1, 4, 8]))
def test_lengths_are_whole_latents_within_the_limit(seconds: float, fps: float, most: float, factor: int) -> None:
    frames = clip_length(seconds, fps, most, factor)
    assert frames >= 1 and (frames - 1) % factor == 0
    assert frames <= max(1, round(most * fps)) and frames < round(seconds * fps) + factor + 1
    assert frames >= min(round(seconds * fps), round(most * fps) - factor + 1)


@pytest.mark.parametrize("wrong", [(0, 24, 20), (1, float("nan"), 20), (1, 24, -1)])
def test_numbers_that_are_no_lengths_are_refused(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        clip_length(*wrong)
