"""Checks that need ComfyUI's real modules: all run in one process that has them, each is reported as a test."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from comfy_host import comfy_path

TESTS = Path(__file__).parent
MODULES = ("inside_comfy", "conditions_in_comfy", "lora_in_comfy")
CHECKS = [
    (module, name)
    for module in MODULES
    for name in re.findall(r"^def (check_\w+)", (TESTS / f"{module}.py").read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, str | None]]:
    """Gives the tracebacks by module and check, None for one that passed."""
    command = [sys.executable, str(TESTS / "checks_in_comfy.py"), str(comfy_path()), *MODULES]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=180, cwd="/")
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("module", "check"), CHECKS)
def test_in_comfy(results: dict[str, dict[str, str | None]], module: str, check: str) -> None:
    assert results[module][check] is None, results[module][check]
