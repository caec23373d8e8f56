"""The LoRA node: checks that need ComfyUI's modules run in one process that has them, each reported as a test."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from comfy_host import comfy_path

PROGRAM = Path(__file__).with_name("lora_in_comfy.py")
CHECKS = re.findall(r"^def (check_\w+)", PROGRAM.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    """Runs all checks and gives their tracebacks by name."""
    command = [sys.executable, str(PROGRAM), str(comfy_path())]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=180, cwd="/")
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_in_comfy(results: dict[str, str | None], check: str) -> None:
    assert results[check] is None, results[check]
