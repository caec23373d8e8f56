"""The text encoder spread over devices or replicated on ranks, and the prompts that are known already."""

import logging
import os
import shutil
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import cpu_offload

from mgpu_runtime.fleet import JobContext, RankInfo, RunnerError
from mgpu_runtime.models.connectors import build_connectors
from mgpu_runtime.models.text_encoder import DamagedStatesError, Device, GemmaBuilder, GemmaEncoder
from mgpu_runtime.models.text_tower import empty_tower, tower_config
from mgpu_runtime.parallel.text_encoder import AccelerateGemmaBuilder, spread_evenly
from mgpu_runtime.pipeline.jobs import Encode, PromptContext, to_record
from mgpu_runtime.pipeline.runner import LTXRunner
from mgpu_runtime.pipeline.settings import LTXSettings
from mgpu_runtime.pipeline.text_models import ContextCache, TextModels
from mgpu_runtime.weights.registry import StateDictRegistry
from mgpu_runtime.weights.text_file import GEMMA_3_12B, GEMMA_4_12B
from tests.spawn import run
from tests.text_files import write_gemma_4
from tests.weights_files import GEMMA, TOY_23

PROMPTS = ("a red ball moving right on a dark background", "", "a blue square")
FLOAT32 = {"device": "cpu", "dtype": torch.float32}
GIGABYTE = 10**9
MODES = ("first", "sharded", "replicated")


@pytest.mark.parametrize("config", [GEMMA_3_12B, GEMMA_4_12B], ids=["gemma3", "gemma4"])
def test_layers_are_spread_evenly_over_gpus(config: dict) -> None:
    tower = empty_tower(tower_config({**config, "vocab_size": 262144}, "x"))
    places = spread_evenly(tower, {2: 14 * GIGABYTE, 5: 14 * GIGABYTE}, torch.bfloat16)
    layers = [places[f"layers.{number}"] for number in range(48)]
    assert layers == sorted(layers) and set(Counter(layers)) == {2, 5} and min(Counter(layers).values()) > 18
    assert places["embed_tokens"] == 2 and places["norm"] == 5
    assert spread_evenly(tower, {0: 80 * GIGABYTE}, torch.bfloat16) == {"": 0}
    linear = [name for name, _ in tower.named_parameters() if "_proj" in name]
    in_8_bit = spread_evenly(tower, {0: 8 * GIGABYTE, 1: 8 * GIGABYTE}, torch.bfloat16, linear)
    assert set(in_8_bit.values()) == {0, 1}
    with pytest.raises(ValueError, match=r"needs 2[34]\.\d GB, but 2 GPUs have 14.4 GB for it together"):
        spread_evenly(tower, {0: 8 * GIGABYTE, 1: 8 * GIGABYTE}, torch.bfloat16)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_spread_layers_give_what_one_device_gives(tmp_path: Path, kind: str) -> None:
    builder = GemmaBuilder(GEMMA if kind == "gemma3" else write_gemma_4(tmp_path / "gemma"))
    whole = builder.build(**FLOAT32).encode(PROMPTS, max_length=128)
    spread = AccelerateGemmaBuilder(builder, ["cpu", "cpu"]).build(**FLOAT32)
    assert all(hasattr(layer, "_hf_hook") for layer in spread.encoder.model.layers)
    states = spread.encode(PROMPTS, max_length=128)
    assert torch.equal(states.hidden, whole.hidden) and torch.equal(states.mask, whole.mask)


def test_b83_an_offloaded_embedding_still_gets_its_inputs() -> None:
    """The weights are nowhere until they are used, the states are collected where it was said."""
    whole = GemmaBuilder(GEMMA).build("cpu", torch.bfloat16)
    expected = whole.encode(PROMPTS, max_length=128)
    cpu_offload(whole.model, execution_device=torch.device("cpu"))
    assert whole.model.get_input_embeddings().weight.is_meta
    states = whole.encode(PROMPTS, max_length=128)
    assert torch.equal(states.hidden, expected.hidden) and states.hidden.device == whole.device


class _Faulty(GemmaBuilder):
    """Loses the last state where the layers are spread, as a broken copy between GPUs does."""

    def build_on(self, places: Mapping[str, Device], dtype: torch.dtype, *, device: Device) -> GemmaEncoder:
        encoder = super().build_on(places, dtype, device=device)
        if len(places) > 1 or self.registry is None:
            encoder.model.norm.weight.fill_(-1)
        return encoder


def test_b82_lost_states_fall_back_to_one_device(caplog: pytest.LogCaptureFixture) -> None:
    expected = GemmaBuilder(GEMMA).build(**FLOAT32).encode(PROMPTS, max_length=128)
    spread = AccelerateGemmaBuilder(_Faulty(GEMMA, registry=StateDictRegistry()), ["cpu", "cpu"]).build(**FLOAT32)
    with caplog.at_level(logging.WARNING, logger="mgpu"):
        states = spread.encode(PROMPTS, max_length=128)
    assert torch.equal(states.hidden, expected.hidden)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "mgpu"]
    assert "only zeros in 1 of 4 hidden states" in message and "loaded again on cpu alone" in message
    assert torch.equal(spread.encode(PROMPTS, max_length=128).hidden, expected.hidden)
    everywhere = AccelerateGemmaBuilder(_Faulty(GEMMA), ["cpu", "cpu"]).build(**FLOAT32)
    with pytest.raises(DamagedStatesError):  # one device does no better
        everywhere.encode(PROMPTS, max_length=128)


def models(info: RankInfo, text_encoder: Path = GEMMA, *, failing: bool = False) -> TextModels:
    """Makes the text side of one rank with the toy's connectors, which may fail."""
    registry = StateDictRegistry()

    @cache
    def load_connectors() -> torch.nn.Module:
        if failing:
            raise ValueError("no connectors here")
        return build_connectors(TOY_23, registry=registry, **FLOAT32)

    return TextModels(
        LTXSettings(str(TOY_23), str(text_encoder), devices=f"cpu:{info.world_size}"),
        info,
        torch.float32,
        registry=registry,
        load_connectors=load_connectors,
        announce=lambda component: None,
    )


def _alone(text_encoder: Path = GEMMA) -> TextModels:
    return models(RankInfo(0, 1, torch.device("cpu"), None), text_encoder)


def _on_rank(rank: int, group: dist.ProcessGroup) -> dict[str, object]:
    """Encodes the prompts in every mode and returns what this rank has to show."""
    info = RankInfo(rank, dist.get_world_size(), torch.device("cpu"), group)
    text = models(info)
    shown: dict[str, object] = {}
    for mode in MODES[-1:] if info.world_size == 1 else MODES:
        text.cache = ContextCache()
        before = text.num_encoded
        contexts = text.encode(Encode(PROMPTS, 128, mode=mode))
        shown[mode] = [(context.video, context.audio) for context in contexts]
        shown[f"{mode} encoded"] = text.num_encoded - before
    shown["states"] = text._encoder.encode(PROMPTS[:2], max_length=128)
    if info.world_size > 1:
        with pytest.raises(RunnerError, match="Rank 1: no connectors here") as refusal:
            models(info, failing=rank == 1).encode(Encode(PROMPTS[:2], 128, mode="replicated"))
        shown["refusal"] = str(refusal.value)
    return shown


def test_every_mode_gives_the_same_on_1_2_and_3_ranks() -> None:
    """B89: one encoder for the fleet, unless it is replicated; a failure on any rank is told to all alike."""
    ranks = {world_size: run(_on_rank, world_size) for world_size in (1, 2, 3)}
    expected = ranks[1][0]["replicated"]
    assert len(expected) == 3 and expected[0][0].shape == (1, 128, 192)
    for world_size, shown in list(ranks.items())[1:]:
        for mode in MODES:
            for pair, one in zip(shown[0][mode], expected, strict=True):
                assert torch.equal(pair[0], one[0]) and torch.equal(pair[1], one[1]), (world_size, mode)
            assert all(other[mode] == [] for other in shown[1:])
        counts = [[rank[f"{mode} encoded"] for rank in shown] for mode in MODES]
        assert counts == [[3, 0, 0][:world_size]] * 2 + [[[2, 1], [1, 1, 1]][world_size - 2]]
        for rank in shown:  # every rank has the states of all prompts
            for states, alone in zip(rank["states"], ranks[1][0]["states"], strict=True):
                assert torch.equal(states[0], alone[0]) and torch.equal(states[1], alone[1])
        assert len({rank["refusal"] for rank in shown}) == 1


def test_a_known_prompt_is_not_encoded_again() -> None:
    text = _alone()
    first = text.encode(Encode((PROMPTS[0], ""), 128))
    assert text.num_encoded == 2 and text._registry.files_read == 2  # the text encoder, the connectors
    again = text.encode(Encode(("", f"  {PROMPTS[0]}\n"), 128))
    assert text.num_encoded == 2
    assert torch.equal(again[1].video, first[0].video) and torch.equal(again[0].audio, first[1].audio)
    text.encode(Encode((PROMPTS[0],), 256))
    assert text.num_encoded == 3  # of another length
    text.encode(Encode(("new", "new"), 128))
    assert text.num_encoded == 4 and text._registry.files_read == 2


def test_release_frees_the_encoder_and_keeps_what_is_known() -> None:
    text = _alone()
    first = text.encode(Encode((PROMPTS[0], ""), 128))
    model = weakref.ref(text._encoder.model)
    text.encode(Encode((PROMPTS[0], ""), 128, release=True))
    assert model() is None and text.num_encoded == 2
    read = text._registry.files_read
    again = text.encode(Encode((PROMPTS[0], ""), 128))
    assert torch.equal(again[0].video, first[0].video)
    assert text.num_encoded == 2 and text._registry.files_read == read  # Gemma was not even loaded
    text.encode(Encode(("new",), 128, mode="sharded"))
    spread = weakref.ref(text._encoder.encoder.model)
    text.encode(Encode(("new",), 128, release=True))
    assert spread() is None and text._encoder is None
    assert text.num_encoded == 3 and text._registry.files_read == read + 1


def test_a_changed_text_encoder_makes_prompts_new(tmp_path: Path) -> None:
    folder = tmp_path / "gemma"
    shutil.copytree(GEMMA, folder)
    text = _alone(folder)
    text.encode(Encode(("",), 128))
    os.utime(folder / "model.safetensors", ns=(1, 1))
    text.encode(Encode(("",), 128))
    assert text.num_encoded == 2


def test_what_is_kept_is_bounded() -> None:
    context = PromptContext(torch.zeros(1, 128, 192), torch.zeros(1, 128, 64))
    size = 128 * (192 + 64) * 4
    cache = ContextCache(max_bytes=3 * size - 1)
    for key in "abc":
        cache.put((key,), context)
        cache.get(("a",))
    assert [cache.get((key,)) is not None for key in "abc"] == [True, False, True]
    assert cache.num_bytes == 2 * size
    cache.put(("a",), context)
    assert cache.num_bytes == 2 * size
    small = ContextCache(max_bytes=size - 1)
    small.put(("a",), context)
    assert small.num_bytes == 0 and small.get(("a",)) is None


def test_the_encode_job_runs_on_the_runner(tmp_path: Path) -> None:
    """A text encoder of other shapes is refused before any rank starts; every option gives the same contexts."""
    runner = _runner(GEMMA)
    results = []
    for options in ({}, {"mode": "sharded", "release": True}, {"mode": "replicated"}):
        name, fields = to_record(Encode((PROMPTS[0], ""), 128, **options))
        runner.check(name=name, fields=fields, tensors={})
        runner.models.text.cache = ContextCache()
        context = JobContext("1", runner.info, lambda frame: True, lambda: False)
        results.append(runner(context, name=name, fields=fields, tensors={}))
    assert [result["num_encoded"] for result in results] == [2, 4, 6]
    for result in results[1:]:
        for context, first in zip(result["contexts"], results[0]["contexts"], strict=True):
            assert torch.equal(context["video"], first["video"]) and torch.equal(context["audio"], first["audio"])
    with pytest.raises(ValueError, match="mode must be one of auto, first, sharded, replicated, got 'all'"):
        Encode(("",), 128, mode="all")
    other = tmp_path / "gemma"
    shutil.copytree(GEMMA, other)
    config = (other / "config.json").read_text(encoding="utf-8")
    (other / "config.json").write_text(config.replace('"intermediate_size": 128', '"intermediate_size": 96'))
    with pytest.raises(ValueError, match="9 of another shape .layers.0.mlp.down_proj.weight"):
        _runner(other).check(name="Encode", fields={"prompts": ("",), "max_length": 128}, tensors={})


def _runner(text_encoder: Path) -> LTXRunner:
    runner = LTXRunner()
    runner.info = RankInfo(0, 1, torch.device("cpu"), None)
    runner.setup(settings=asdict(LTXSettings(str(TOY_23), str(text_encoder), devices="cpu:1")))
    return runner
