"""LoRAs on several ranks: all change or none, the fleet stays, clips are those of one worker."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_runtime.fleet import Event, RankInfo, RunnerError, current, stop
from mgpu_runtime.models import lora as fusing
from mgpu_runtime.models.transformer_builder import TransformerBuilder
from mgpu_runtime.pipeline.client import LTXClient, Watch
from mgpu_runtime.pipeline.jobs import LoRASpec, SPStage, TDPStage
from mgpu_runtime.pipeline.loras import LoRASwitch
from mgpu_runtime.weights.registry import StateDictRegistry
from tests.lora_files import random_pair, targets, toy_lora, write_lora
from tests.spawn import run
from tests.toy import toy_client
from tests.weights_files import TINY_23, TOY_23

Loras = tuple[LoRASpec, ...]

TO_Q = "transformer_blocks.0.attn1.to_q"


@pytest.fixture(scope="module", autouse=True)
def no_fleet_left():
    yield
    stop()


def digest(model: nn.Module) -> str:
    """Names the weights of a model by content."""
    content = hashlib.sha256()
    for tensor in model.state_dict().values():
        content.update(tensor.contiguous().numpy().tobytes())
    return content.hexdigest()


class Rank:
    """A transformer of one rank with its switch, and what was said."""

    def __init__(self, rank: int, group: dist.ProcessGroup) -> None:
        registry = StateDictRegistry()
        self.model = TransformerBuilder(TINY_23, registry=registry).build("cpu", torch.float32)
        info = RankInfo(rank, dist.get_world_size(group), torch.device("cpu"), group)
        self.switch = LoRASwitch("transformer", info, registry, TINY_23)
        self.lines: list[str] = []

    def use(self, *specs: LoRASpec) -> str:
        """Returns the digest of the weights after a change, or the error's text."""
        try:
            self.switch.use(specs, lambda: self.model, self.lines.append)
        except RunnerError as error:
            return f"RunnerError: {error}"
        return digest(self.model)


def _failing_at(call: int) -> Callable:
    """Makes a fused_weight that runs out of something at one of its calls."""
    calls = iter(range(100))

    def fail(*given: object, whole: Callable = fusing.fused_weight) -> torch.Tensor:
        if next(calls) == call:
            raise RuntimeError("no more memory")
        return whole(*given)

    return fail


def play(rank: int, group: dist.ProcessGroup, folder: str) -> dict[str, object]:
    """Goes through sets of LoRAs on every rank; some fail on rank 1 alone."""
    style, other, damaged = (LoRASpec(f"{folder}/{name}.safetensors", 0.7) for name in ("style", "other", "damaged"))
    told: dict[str, object] = {"plain": digest((here := Rank(rank, group)).model)}
    told["nothing asked"] = here.use()
    told["strength 0"] = here.use(replace(style, strength=0.0))
    told["style"] = here.use(style)
    told["lines"] = list(here.lines)
    told["style again"] = here.use(style, replace(other, strength=0.0))
    told["no new lines"] = here.lines == told["lines"]
    with mock.patch.object(fusing, "fused_weight", _failing_at(3) if rank == 1 else fusing.fused_weight):
        told["half way on rank 1"] = here.use(style, other)
    told["style after that"] = here.use(style)
    told["both"] = here.use(style, other)
    told["damaged"] = here.use(style, damaged)
    told["left alone"] = digest(here.model)
    told["ranks disagree"] = here.use(replace(style, strength=0.7 + rank))
    told["left alone then"] = digest(here.model)
    told["none"] = here.use()
    fresh = Rank(rank, group)
    told["fresh both"] = fresh.use(style, other)
    dist.barrier(group)
    if rank == 0:
        toy_lora(Path(style.path), TINY_23, seed=50)
        os.utime(style.path, ns=(1, 1))
    dist.barrier(group)
    told["replaced"], told["fresh replaced"] = here.use(style), Rank(rank, group).use(style)
    return told


def test_b65_b68_all_ranks_change_or_none_does(tmp_path: Path) -> None:
    toy_lora(tmp_path / "style.safetensors", TINY_23)
    toy_lora(tmp_path / "other.safetensors", TINY_23, seed=20)
    down, up = random_pair(64, 64)
    write_lora(tmp_path / "damaged.safetensors", {TO_Q: (down * float("inf"), up)})
    told, told_1 = run(play, 2, str(tmp_path))
    assert told == told_1  # every rank has the same weights and the same errors, whoever failed
    plain, style, both = told["plain"], told["style"], told["both"]
    assert len({plain, style, both, told["replaced"]}) == 4
    assert told["nothing asked"] == told["strength 0"] == told["none"] == plain
    assert told["lines"] == ["LoRA style: 12 of 12 modules, rank 2, strength 0.7"]
    assert told["style again"] == style and told["no new lines"]
    assert told["half way on rank 1"] == "RunnerError: Rank 1: RuntimeError: no more memory"
    assert told["style after that"] == style and told["fresh both"] == both
    assert "holds values that are not finite" in told["damaged"] and told["left alone"] == both
    assert "changed while" in told["ranks disagree"] and told["left alone then"] == both
    assert told["replaced"] == told["fresh replaced"]


STAGE = SPStage(10, 24.0, sigmas=(1.0, 0.6, 0.0), schedule="distilled", preview=False)
FINE = TDPStage(11, 24.0, tiles="1x2", overlap=1, preview=False)
START = torch.zeros(1, 128, 2, 2, 3)


def clip(client: LTXClient, said: list[str], *, first: Loras = (), second: Loras = ()) -> dict[str, torch.Tensor]:
    """Makes a prompt and stage 1 with some LoRAs and stage 2 with others; what is said of LoRAs is noted."""

    def note(event: Event) -> None:
        if event.kind == "log" and event.data["text"].startswith("LoRA"):
            said.append(event.data["text"])

    watch = Watch(on_event=note)
    prompt, _ = client.encode("a red ball", "", 128, loras=first)
    one = client.sp_stage(replace(STAGE, loras=first), prompt, None, START, watch=watch)
    two = client.tdp_stage(replace(FINE, loras=second), prompt, one.video, watch=watch)
    return {"prompt": prompt.video, "stage 1": one.video, "stage 2": two.video}


def agree(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[bool]:
    """Tells which results are the same bit for bit."""
    return [torch.equal(one[name], other[name]) for name in ("prompt", "stage 1", "stage 2")]


@pytest.mark.slow
def test_a_lora_works_in_the_stage_that_asks_for_it_and_leaves_no_trace(tmp_path: Path) -> None:
    style = toy_lora(tmp_path / "stil — два.safetensors", TOY_23)
    found, names = targets(TOY_23), ("proj_out", "text_embedding_projection.video_aggregate_embed")
    other = write_lora(tmp_path / "b.safetensors", {name: random_pair(*found.find(name).shape) for name in names})
    specs = (LoRASpec(str(style), 0.8), LoRASpec(str(other), -0.5))
    two, said = toy_client("cpu:2"), []
    plain = clip(two, said)
    pids = current(two._key(), lambda: pytest.fail("the fleet was lost")).worker_pids
    changed = clip(two, said, first=specs, second=specs)
    assert agree(changed, plain) == [False, False, False]
    assert said == [
        "LoRA stil — два: 12 of 12 modules, rank 2, strength 0.8",
        "LoRA b: 1 of 2 modules, rank 2, strength -0.5",
        "LoRA b: 1 more for the text connectors, if Encode Prompt gets it too",
    ]
    late = clip(two, said, second=specs)
    assert agree(late, plain) == [True, True, False] and len(said) == 6
    assert agree(clip(two, said), plain) == [True, True, True] and len(said) == 6
    assert current(two._key(), lambda: pytest.fail("the fleet was lost")).worker_pids == pids
    assert agree(clip(toy_client("cpu:1"), said, first=specs, second=specs), changed) == [True, True, True]
