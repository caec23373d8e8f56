"""torch.compile over the exchange: no graph break, one graph for all token counts, the results of eager."""

import dataclasses
import shutil
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

from mgpu_runtime.models import transformer as transformer_module
from mgpu_runtime.models.block import BlockStream, run_block
from mgpu_runtime.parallel.attention_manager import AttentionManager
from mgpu_runtime.parallel.sequence_parallel import SequenceParallelModelWrapper
from tests.goldens import relative_error
from tests.spawn import run
from tests.test_sequence_parallel import _streams
from tests.tiny import random_transformer

HEADS = 6
TOKEN_COUNTS = (100, 200, 130, 70)  # full shares on the first ranks, partly filled ones on the last
# where tokens lie in the tensors of a BlockStream; every other dim is of one size for a model and a batch
TOKEN_DIMS = {
    "hidden": (1,),
    "modulation": (1,),
    "embedded_timestep": (1,),
    "cross_modulation": (1,),
    "rotary": (-2,),
    "cross_rotary": (-2,),
    "context": (1,),
    "self_bias": (2, 3),
    "context_bias": (3,),
}


def _mark(stream: BlockStream) -> None:
    """Tells the compiler which dims never change: symbolic channels would make it many times slower."""
    for field in dataclasses.fields(stream):
        value = getattr(stream, field.name)
        for x in value if isinstance(value, tuple) else (value,):
            if x is not None:
                tokens = {dim % x.dim() for dim in TOKEN_DIMS.get(field.name, ())}
                torch._dynamo.mark_static(x, [dim for dim in range(x.dim()) if dim not in tokens])


def _compiled_block(backend: str):
    compiled = torch.compile(run_block, fullgraph=True, dynamic=True, backend=backend)

    def step(block, video: BlockStream, audio: BlockStream, keep, before) -> None:
        assert before is None  # a compiled block leaves nothing unfinished
        for stream in (video, audio):
            # the first block gets a view from a Linear: dynamo guards on what it is a view of, which is None later
            stream.hidden = stream.hidden.clone()
            _mark(stream)
        return compiled(block, video, audio, keep)

    return step


def _both_ways(rank: int, group, backend: str) -> tuple[list[tuple], int]:
    """Returns (eager, compiled) velocities for every token count, and how many graphs were compiled."""
    model = random_transformer(num_heads=HEADS)
    manager = AttentionManager(4096, HEADS, 16, torch.float32, None if dist.get_world_size(group) == 1 else group)
    parallel = SequenceParallelModelWrapper(model, manager)
    cases = [_streams(count, 7) for count in TOKEN_COUNTS]
    # floats of the layers (epsilons) are constants: as symbols they would have each graph made twice
    with torch.no_grad(), torch._dynamo.config.patch(specialize_float=True):
        eager = [parallel.predict(*streams) for streams in cases]
        torch._dynamo.utils.counters.clear()
        with patch.object(transformer_module, "run_block", _compiled_block(backend)), manager.exchange.patience(600):
            compiled = [parallel.predict(*streams) for streams in cases]
    manager.close()
    return list(zip(eager, compiled, strict=True)), torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_block_is_one_graph_for_every_token_count(world_size: int) -> None:
    for results, graphs in run(_both_ways, world_size, "aot_eager"):
        assert graphs == 1
        for eager, compiled in results:
            for one, other in zip(eager, compiled, strict=True):
                assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor on the CPU needs g++")
def test_inductor_gives_the_same_within_rounding() -> None:
    for results, graphs in run(_both_ways, 2, "inductor"):
        assert graphs == 1
        for eager, compiled in results:
            for one, other in zip(eager, compiled, strict=True):
                assert relative_error(other, one) < 1e-5
