"""The LoRA node: checks that need ComfyUI's modules run in one process that has them, each reported as a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.comfy_checks import checks_in, run_checks

PROGRAM = Path(__file__).with_name("lora_in_comfy.py")


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    return run_checks(PROGRAM)


@pytest.mark.parametrize("check", checks_in(PROGRAM))
def test_in_comfy(results: dict[str, str | None], check: str) -> None:
    assert results[check] is None, results[check]
