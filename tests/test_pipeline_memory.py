"""Who makes room for whom on the workers' devices."""

import pytest
import torch

from mgpu_runtime.fleet import RankInfo, RunnerError
from mgpu_runtime.pipeline import models as pipeline_models
from mgpu_runtime.pipeline.first_rank import on_every_rank, on_first_rank
from mgpu_runtime.pipeline.models import LTXModels
from mgpu_runtime.pipeline.settings import LTXSettings
from mgpu_runtime.weights.facts import describe
from tests.weights_files import GEMMA, TOY_23


def _models(device: str, precision: str = "auto") -> LTXModels:
    settings = LTXSettings(str(TOY_23), str(GEMMA), precision=precision)
    info = RankInfo(0, 1, torch.device(device), None)
    return LTXModels(settings, describe(settings.checkpoint_files(), None, settings.text_encoder), info)


@pytest.mark.parametrize(("precision", "bytes_each"), [("bf16", 2), ("fp32", 4), ("fp8", 1)])
def test_the_text_encoder_leaves_where_the_transformer_would_not_fit(
    precision: str, bytes_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = _models("cuda:0", precision)
    released: list[bool] = []
    monkeypatch.setattr(models.text, "release", lambda: released.append(True))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    needed = models.facts.parameters * bytes_each + pipeline_models.ROOM_BYTES
    for free, is_released in ((needed + 1000, False), (needed - 1000, True)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, free))
        released.clear()
        models.make_room()
        assert bool(released) == is_released, (precision, free - needed)


def test_on_the_cpu_nothing_has_to_leave() -> None:
    models = _models("cpu")
    models.text.release = lambda: pytest.fail("the text encoder was released")
    models.make_room()


@pytest.mark.parametrize("run", [on_first_rank, on_every_rank])
def test_out_of_memory_names_the_device_and_what_to_do(run) -> None:
    def work() -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    info = RankInfo(0, 1, torch.device("cpu"), None)
    with pytest.raises(RunnerError, match=r"^cpu is out of memory: .*2 GiB.* Choose a lower precision"):
        run(info, work)
