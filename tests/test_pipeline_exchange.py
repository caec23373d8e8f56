"""The exchange of a rank's models: opened once, kept over stages, opened anew after a break, refused clearly."""

import logging

import pytest
import torch
import torch.distributed as dist

from mgpu_runtime.exchange import ExchangeError
from mgpu_runtime.fleet import RankInfo, RunnerError
from mgpu_runtime.parallel import attention_manager
from mgpu_runtime.pipeline.models import LTXModels
from mgpu_runtime.pipeline.settings import LTXSettings
from mgpu_runtime.tiling import TileCountConfig
from mgpu_runtime.weights.facts import describe
from tests.goldens import GOLDEN, golden
from tests.log_lines import Lines
from tests.spawn import run

CHECKPOINT = str(GOLDEN / "checkpoints" / "tiny_ltx23.safetensors")
CPU = torch.device("cpu")


def _models(rank: int, group: dist.ProcessGroup | None, **changes: object) -> LTXModels:
    settings = LTXSettings(CHECKPOINT, devices="cpu:2", **changes)
    world_size = 1 if group is None else dist.get_world_size(group)
    return LTXModels(settings, describe(settings.checkpoint_files()), RankInfo(rank, world_size, CPU, group))


@torch.no_grad()
def _over_stages(rank: int, group: dist.ProcessGroup) -> dict[str, object]:
    """Two stages with a tiled one between, a break on one rank alone, one stage more; then transports that fail."""
    log = logging.getLogger("mgpu_runtime.exchange")
    log.setLevel(logging.INFO)
    log.addHandler(said := Lines())
    models = _models(rank, group, exchange_timeout=33.0)
    streams = golden("sp_23").stream("video"), golden("sp_23").stream("audio")
    first = models.sequence_parallel()
    results = [first.predict(*streams)]
    models.tiled(TileCountConfig(), (1, 1, 1), normalize_positions=True)
    second = models.sequence_parallel()
    results.append(second.predict(*streams))
    result = {"kept": first.attn_mgr is second.attn_mgr, "timeout": first.attn_mgr.exchange.timeout}
    second.attn_mgr.is_whole = rank != 1
    third = models.sequence_parallel()
    result["opened anew"] = third.attn_mgr is not second.attn_mgr
    results.append(third.predict(*streams))
    models.close()
    models.close()
    result["equal"] = all(torch.equal(a, b) for later in results[1:] for a, b in zip(results[0], later, strict=True))
    result["said"] = said.lines
    other = _models(rank, group, transport="nccl")
    with pytest.raises(ValueError) as caught:
        other.open_exchange()
    result["for other devices"] = str(caught.value)
    return result


def test_an_exchange_serves_many_stages_and_is_opened_anew_on_every_rank_after_a_break() -> None:
    results = run(_over_stages, 2)
    for result in results:
        assert (result["kept"], result["opened anew"], result["equal"], result["timeout"]) == (True, True, True, 33.0)
        assert "nccl" in result["for other devices"] and "\n" not in result["for other devices"]
    assert len(results[0]["said"]) == 2 and results[1]["said"] == []
    assert all(line.startswith("exchange: ") and "2 workers" in line for line in results[0]["said"])


def test_a_transport_that_cannot_work_is_one_sentence_before_any_weight_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise ExchangeError("transport csrc cannot work here: no C compiler found")

    monkeypatch.setattr(attention_manager, "exchange_for", refuse)
    models = _models(0, None, transport="csrc")
    models.announce = lambda component: pytest.fail(f"{component} was loaded")
    with pytest.raises(RunnerError, match="^transport csrc cannot work here: no C compiler found$"):
        models.sequence_parallel()
