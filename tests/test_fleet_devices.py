"""What a person may write for devices, and what is said when it does not fit."""

from types import SimpleNamespace

import pytest
import torch

from mgpu_runtime.fleet import MGPUController, parse_devices, serve
from mgpu_runtime.fleet.frames import Frame
from mgpu_runtime.fleet.records import Join, Setup


@pytest.mark.parametrize(
    ("spec", "num_cuda", "expected"),
    [
        ("auto", 0, ["cpu"]),
        ("auto", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        (" Auto ", 1, ["cuda:0"]),
        ("2,3", 4, ["cuda:2", "cuda:3"]),
        ("cuda:1, cuda:0", 2, ["cuda:1", "cuda:0"]),
        ("cpu:2", 0, ["cpu", "cpu"]),
        ("cpu", 8, ["cpu"]),
    ],
)
def test_devices_are_read(spec, num_cuda, expected):
    assert parse_devices(spec, num_cuda=num_cuda) == expected


@pytest.mark.parametrize("spec", ["", "gpu", "0,,1", "0;1", "cuda", "-1", "cpu:x", "0,cpu", "cpu:2,cpu:2", "0.5"])
def test_bad_text_is_refused_with_the_forms(spec):
    with pytest.raises(ValueError, match="'cpu:N'"):
        parse_devices(spec, num_cuda=2)


@pytest.mark.parametrize(("spec", "said"), [("cpu:0", "1 to 64"), ("cpu:65", "1 to 64"), ("1,cuda:1", "twice")])
def test_impossible_counts_are_refused(spec, said):
    with pytest.raises(ValueError, match=said):
        parse_devices(spec, num_cuda=2)


def test_b115_more_devices_than_visible_names_requested_visible_and_allowed():
    with pytest.raises(ValueError) as caught:
        parse_devices("0,1,2,3", num_cuda=2)
    text = str(caught.value)
    assert "ask for 4 GPUs" in text and "cuda:2, cuda:3" in text
    assert "2 CUDA devices are visible" in text and "cuda:0 to cuda:1 are allowed" in text
    with pytest.raises(ValueError, match="ask for 1 GPU, but no GPU is visible here. Choose 'cpu:N'"):
        parse_devices("0", num_cuda=0)
    with pytest.raises(ValueError, match="only cuda:0 is allowed"):
        parse_devices("1", num_cuda=1)


def test_b115_controller_checks_its_devices_before_anything_starts(monkeypatch):
    monkeypatch.setattr("mgpu_runtime.fleet.devices.count_cuda", lambda: 1)
    runner = "tests.fleet_runners:Echo"
    assert MGPUController(runner, num_gpus=1).devices == ["cuda:0"]
    assert MGPUController(runner).devices == ["cuda:0"]
    with pytest.raises(ValueError, match="num_gpus=2 was requested, but 1 CUDA devices.*1 to 1 are"):
        MGPUController(runner, num_gpus=2)
    with pytest.raises(ValueError, match="not visible"):
        MGPUController(runner, devices=["cuda:0", "cuda:3"])
    with pytest.raises(ValueError, match="cannot be read"):
        MGPUController(runner, devices=["cpu", "cuda:0"])
    with pytest.raises(ValueError, match="cannot be read"):
        MGPUController(runner, devices=[])
    with pytest.raises(ValueError, match="both given"):
        MGPUController(runner, num_gpus=1, devices=["cpu"])


def test_runner_that_workers_cannot_import_is_refused():
    class Local:
        """Cannot be found by name."""

    with pytest.raises(ValueError, match="importable|imported by"):
        MGPUController(Local, devices=["cpu"])
    with pytest.raises(ValueError, match="module:Name"):
        MGPUController("tests.fleet_runners", devices=["cpu"])


def test_a_worker_sets_its_device_before_it_imports_the_runner(monkeypatch):
    done = []

    def import_runner(name: str) -> type:
        done.append(name)
        raise ImportError("far enough")

    monkeypatch.setattr(serve, "_import", import_runner)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(str(device)))
    channel = SimpleNamespace(send=lambda frame: True)
    worker = serve.Worker(channel, None, Join(1, 2, "cuda:1", "module:Name", 60.0, 60.0), -1)
    assert not worker.start(Frame(Setup()))
    assert done == ["cuda:1", "module:Name"]
