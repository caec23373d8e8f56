"""What a real ComfyUI server needs for the tests, and the process-level facts that they ask about it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from comfy_host import ROOT, ComfyHost, comfy_path

API_WORKFLOW = ROOT / "workflows" / "api" / "ltx_mgpu_two_stage_t2v.json"
SOUND, TONE_HZ = "sound.wav", 500.0
UI_WORKFLOW = ROOT / "workflows" / "ltx_mgpu_two_stage_t2v.json"

IMAGE_WORKFLOW = API_WORKFLOW.with_name("ltx_mgpu_two_stage_i2v.json")
SOUND_WORKFLOW = API_WORKFLOW.with_name("ltx_mgpu_audio_to_video.json")

# Node ids of the bundled workflow from text.
LOAD, ENCODE, EMPTY, SP, TDP, DECODE, CREATE, SAVE = map(str, range(1, 9))


def furnished(host: ComfyHost) -> ComfyHost:
    """Gives a server that was not started yet what the workflows expect of a real one.

    That is the picture that Load Image shows at first, a sound for Load Audio, and audio nodes that load.
    """
    inputs, packs = host.base / "input", host.base / "custom_nodes"
    for folder in (inputs, packs):
        folder.mkdir(parents=True, exist_ok=True)
    (inputs / "example.png").symlink_to(comfy_path() / "input" / "example.png")
    write_tone(inputs / SOUND, TONE_HZ)
    (packs / "no_torchaudio").symlink_to(ROOT / "tests" / "stand_ins" / "no_torchaudio", target_is_directory=True)
    return host


def write_tone(path: Path, pitch: float, *, seconds: float = 1.0, rate: int = 48000) -> None:
    """Writes a stereo sound file of one steady tone, Hz."""
    wave_N = 0.3 * np.sin(2 * np.pi * pitch * np.arange(round(seconds * rate)) / rate)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((wave_N * 32767).astype("<i2").repeat(2).tobytes())


def workflow_graph(path: Path = API_WORKFLOW, **changes: dict[str, Any]) -> dict[str, Any]:
    """Returns a graph in API format; `n4={"seed": 1}` changes inputs of node 4, a value None removes one."""
    graph = json.loads(path.read_text(encoding="utf-8"))
    for node, inputs in changes.items():
        target = graph[node.removeprefix("n")]["inputs"]
        target.update(inputs)
        for name in [name for name, value in inputs.items() if value is None]:
            del target[name]
    return copy.deepcopy(graph)


def fleet_processes(server_pid: int) -> list[psutil.Process]:
    """Returns the supervisor and the workers that a server has started."""
    return psutil.Process(server_pid).children(recursive=True)


def fleet_pids(server_pid: int) -> set[int]:
    """Returns the pids of the supervisor and the workers."""
    return {process.pid for process in fleet_processes(server_pid)}


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Waits for a condition and says whether it came true in time."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


LOAD_PACK = f"""
import importlib.util, sys

def load_pack(name, folder={str(ROOT)!r}):
    # As ComfyUI loads a pack: by path, under a name that is a path.
    spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
"""

_PRELUDE = f"""
{LOAD_PACK}
import asyncio
sys.path.insert(0, {str(comfy_path())!r})
sys.argv = ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()

def pack_nodes(pack):
    extension = asyncio.run(pack.comfy_entrypoint())
    return asyncio.run(extension.get_node_list())
"""


def run_in_comfy(code: str, *, env: dict[str, str] | None = None, timeout: float = 120) -> str:
    """Runs code in a process that can import ComfyUI but runs no server; returns what it printed."""
    return run_python(_PRELUDE + code, env=env, timeout=timeout)


def run_python(code: str, *, env: dict[str, str] | None = None, timeout: float = 120) -> str:
    """Runs code in a fresh interpreter, with UTF-8 mode and PYTHON variables as given only; returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", code], capture_output=True, timeout=timeout, env=env, cwd="/"
    )
    assert result.returncode == 0, result.stderr.decode(errors="replace")[-4000:]
    return result.stdout.decode()
