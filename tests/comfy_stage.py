"""The pack inside ComfyUI's modules, and a stage around a client that only records. For the *_in_comfy.py checks."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.model_management as mm
import comfy.utils
import torch

ROOT = Path(__file__).resolve().parent.parent


def load_pack() -> types.ModuleType:
    """Loads the pack as ComfyUI does: by path."""
    spec = importlib.util.spec_from_file_location("pack", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    module = importlib.util.module_from_spec(spec)
    sys.modules["pack"] = module
    spec.loader.exec_module(module)
    extension = asyncio.run(module.comfy_entrypoint())
    module.by_id = {node.GET_SCHEMA().node_id: node for node in asyncio.run(extension.get_node_list())}
    return module


pack = load_pack()

from mgpu_runtime.fleet import JobCancelled  # noqa: E402 (the pack makes the runtime importable)
from mgpu_runtime.pipeline.jobs import Decoded, StageLatents  # noqa: E402
from mgpu_runtime.pipeline.settings import LTXSettings  # noqa: E402

Hidden = pack.nodes.comfy.io.Hidden

PROMPT = [[torch.zeros(1, 128, 192), {"ltx_mgpu_audio_context": torch.zeros(1, 128, 64)}]]
EMPTY = {"samples": torch.zeros(1, 128, 3, 4, 6)}
SP = {
    "fps": 24.0,
    "seed": 7,
    "schedule": "distilled",
    "steps": 0,
    "video_cfg": -1.0,
    "audio_cfg": -1.0,
    "video_stg": -1.0,
    "audio_stg": -1.0,
    "stg_block": -1,
    "rescale": -1.0,
    "modality_scale": -1.0,
}
TDP = {
    "seed": 7,
    "upscale": True,
    "mode": "tdp (audio kept)",
    "tiles": "1x2",
    "overlap": 5,
    "normalize_positions": True,
    "fps": 0.0,
}
FACTS = types.SimpleNamespace(
    version="2.3.0",
    version_tuple=(2, 3, 0),
    scale_factors=(8, 32, 32),
    has_video_encoder=True,
    has_audio_encoder=True,
    audio_latent_rate=25.0,
    decode_min_cells=1,
    has_diffusion_decoder=False,
    num_layers=48,
    is_distilled=False,
    video_channels=128,
    audio_channels=8,
    audio_mel_bins=16,
    upsample_scale=2.0,
    num_heads=32,
    require=lambda component: None,  # the file holds everything
)


class Client:
    """Records the jobs it is given, reports three steps, and stops when asked."""

    devices = ["cpu", "cpu"]

    def __init__(self, settings: LTXSettings | None = None) -> None:
        self.settings = settings or LTXSettings("/m/ltx.safetensors", "/m/gemma", "/m/up.safetensors", "cpu:2")
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def check(self) -> types.SimpleNamespace:
        return FACTS

    def sp_stage(self, *given: Any, watch: Any, **more: Any) -> StageLatents:
        self.calls.append((given, more))
        for step in range(3):
            watch.on_event(event("progress", stage="stage", step=step, of=2, sigma=None))
            watch.on_event(event("preview", image=torch.zeros(16, 16, 3, dtype=torch.uint8)))
            if watch.should_stop():
                raise JobCancelled("cancelled")
        return StageLatents(torch.ones(1, 128, 3, 4, 6), torch.ones(1, 8, 18, 16))

    tdp_stage = sp_stage

    def decode(self, *given: Any, watch: Any, **more: Any) -> Decoded:
        self.calls.append((given, more))
        return Decoded(torch.zeros(17, 8, 8, 3), torch.zeros(1, 2, 100), 48000)

    def encode_video(self, *given: Any, watch: Any, **more: Any) -> torch.Tensor:
        self.calls.append((given, more))
        return torch.zeros(1, 128, 3, 4, 6)

    def encode_audio(self, *given: Any, watch: Any, **more: Any) -> torch.Tensor:
        self.calls.append((given, more))
        return torch.zeros(1, 8, 18, 16)

    @property
    def last_job(self) -> Any:
        return self.calls[-1][0][0]


class Stage:
    """Holds a handle around a recording client, and what its jobs have shown."""

    def __init__(self) -> None:
        self.client = Client()
        self.released = 0
        self.guard = pack.nodes.comfy.MemoryGuard(self._release, 0)
        self.ltx = pack.nodes.handle.LTXHandle(self.client, self.guard, None)
        self.bars: list[tuple[Any, ...]] = []
        self.texts: list[str] = []
        server = types.SimpleNamespace(client_id="someone", send_progress_text=self._send_text)
        sys.modules["server"] = types.SimpleNamespace(PromptServer=types.SimpleNamespace(instance=server))
        comfy.utils.set_progress_bar_global_hook(self._hook)

    def ready(self, node_id: str, graph: dict[str, Any] | None = None) -> Any:
        """Returns a node class as ComfyUI prepares it for a run."""
        return pack.by_id[node_id].PREPARE_CLASS_CLONE({Hidden.unique_id: "4", Hidden.prompt: graph or {}})

    def run_sp(self, **changes: Any) -> Any:
        return self.ready("LTXMGPUSPStage").execute(ltx=self.ltx, positive=PROMPT, latent=EMPTY, **{**SP, **changes})

    def _release(self) -> None:
        self.released += 1

    def _send_text(self, text: str, node_id: str, client_id: str) -> None:
        assert (node_id, client_id) == ("4", "someone")
        self.texts.append(text)

    def _hook(self, value: int, total: int, preview: Any, node_id: str | None = None) -> None:
        mm.throw_exception_if_processing_interrupted()  # as the server's own hook begins
        self.bars.append((value, total, preview, node_id))


def event(kind: str, **data: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(kind=kind, job_id="1", rank=0, data=data)


def refusal(call: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    """Returns the text of the error that a call must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was refused")
