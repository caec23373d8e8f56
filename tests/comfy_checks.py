"""Runs the checks of a program that needs ComfyUI's modules, in a process of its own that has them."""

import json
import re
import subprocess
import sys
from pathlib import Path

from comfy_host import comfy_path


def checks_in(program: Path) -> list[str]:
    """Lists the names of a program's checks."""
    return re.findall(r"^def (check_\w+)", program.read_text(encoding="utf-8"), re.MULTILINE)


def run_checks(program: Path) -> dict[str, str | None]:
    """Runs all checks of a program and gives their tracebacks by name, None for one that passed."""
    command = [sys.executable, str(program), str(comfy_path())]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=180, cwd="/")
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
