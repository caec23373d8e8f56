"""The conformance program tells right from wrong on a golden directory of any content."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.conformance import main
from tests.goldens import GOLDEN
from tests.weights_files import read_all


def _changed(source: Path, target: Path, change) -> None:
    tensors, metadata = read_all(source)
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, target, metadata=metadata)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with one good case; its checkpoints have another style's name."""
    (tmp_path / "golden").mkdir()
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(GOLDEN / "golden" / "steppers.safetensors", tmp_path / "golden")
    for name in ("tiny_ltx23", "tiny_upsampler_x2"):
        target = name.replace("23", "renamed")
        shutil.copy(GOLDEN / "checkpoints" / f"{name}.safetensors", tmp_path / "checkpoints" / f"{target}.safetensors")
    return tmp_path


def test_a_case_that_cannot_be_checked_fails_and_hides_no_other(directory: Path, capsys: pytest.CaptureFixture) -> None:
    golden = directory / "golden"
    (golden / "sp_99.safetensors").write_bytes(b"")
    shutil.copy(GOLDEN / "golden" / "sp_23.safetensors", golden / "sp_23.safetensors")  # its checkpoint is not there
    nothing = {name: torch.zeros(1) for name in ("sample", "denoised", "sigmas", "noise")}
    save_file(nothing, golden / "steppers_of_nothing.safetensors")
    _changed(golden / "steppers.safetensors", golden / "guidance.safetensors", lambda tensors: tensors)
    code, table = main([str(directory)]), capsys.readouterr().out
    rows = {line.split()[0]: line for line in table.splitlines()}
    assert code == 1 and "ok" in rows["steppers"]
    assert "FAIL" in rows["sp_99"] and "FAIL" in rows["sp_23"] and "FAIL" in rows["guidance"]
    assert "not covered" in rows["steppers_of_nothing"]


def test_expected_values_that_are_not_finite_fail_wherever_they_stand(
    directory: Path, capsys: pytest.CaptureFixture
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        later = sorted(name for name in tensors if name.startswith("out.euler"))[1:]
        assert later
        return tensors | {name: torch.full_like(tensors[name], float("nan")) for name in later}

    path = directory / "golden" / "steppers.safetensors"
    _changed(path, path, spoil)
    code, table = main([str(directory)]), capsys.readouterr().out
    assert code == 1 and "FAIL" in next(line for line in table.splitlines() if "  euler" in line)


def test_a_directory_in_which_nothing_was_checked_is_no_success(directory: Path, capsys: pytest.CaptureFixture) -> None:
    (directory / "golden" / "steppers.safetensors").rename(directory / "golden" / "mystery.safetensors")
    (directory / "golden" / "riddle.json").write_text(json.dumps({}), encoding="utf-8")
    code, table = main([str(directory)]), capsys.readouterr().out
    assert code == 1 and table.count("not covered") >= 2
