"""The one file that touches ComfyUI: model folders, progress, previews, interrupt, memory.

Every call here runs in ComfyUI's execution thread unless its docstring says otherwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

import comfy.model_management as model_management
import folder_paths
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP
from comfy.utils import ProgressBar
from PIL import Image

try:  # the numbered API is the one a pack should name; the file of the newest ComfyUI may move it
    from comfy_api.v0_0_2 import ComfyExtension, io
except ImportError:
    from comfy_api.latest import ComfyExtension, io

from mgpu_runtime.fleet import Event, FleetError, JobCancelled
from mgpu_runtime.pipeline.client import Watch

__all__ = ["ComfyExtension", "io", "LTX_MGPU", "LTX_MGPU_CONDITIONS", "LTX_MGPU_GUIDANCE", "MemoryGuard", "run_job"]

LTX_MGPU = io.Custom("LTX_MGPU")
LTX_MGPU_CONDITIONS = io.Custom("LTX_MGPU_CONDITIONS")
LTX_MGPU_GUIDANCE = io.Custom("LTX_MGPU_GUIDANCE")

_PREVIEW_SIDE = 512
_T = TypeVar("_T")


# Model folders


def model_names(*kinds: str) -> list[str]:
    """Returns the files of model folders as ComfyUI lists them, folder by folder; a folder it lacks has none."""
    known = [kind for kind in kinds if kind in folder_paths.folder_names_and_paths]
    return list(dict.fromkeys(name for kind in known for name in folder_paths.get_filename_list(kind)))


def model_path(kinds: str | tuple[str, ...], name: str) -> str:
    """Returns the absolute path of a listed model file, from the first folder that has it.

    Raises ValueError when there is none of that name.
    """
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    known = [kind for kind in kinds if name and kind in folder_paths.folder_names_and_paths]
    path = next(filter(None, (folder_paths.get_full_path(kind, name) for kind in known)), None)
    if path is None:
        folders = " or ".join(f"models/{kind}" for kind in kinds)
        raise ValueError(
            f"No file {name!r} under {folders}. Put it there, press R to refresh the lists, and choose it again."
        )
    return os.path.abspath(path)


def text_encoder_names() -> list[str]:
    """Returns the Gemma folders (those with a config.json) under text_encoders, then the single files."""
    return sorted(_text_encoder_folders()) + text_encoder_files()


def text_encoder_files() -> list[str]:
    """Returns the single files under text_encoders, without those inside Gemma folders."""
    inside = tuple(name + os.sep for name in _text_encoder_folders())
    return [name for name in model_names("text_encoders") if not name.startswith(inside)]


def text_encoder_path(name: str) -> str:
    """Returns the absolute path of a listed Gemma folder or file; raises ValueError when there is none."""
    folder = _text_encoder_folders().get(name)
    return folder if folder is not None else model_path("text_encoders", name)


def _text_encoder_folders() -> dict[str, str]:
    found: dict[str, str] = {}
    for root in folder_paths.get_folder_paths("text_encoders"):
        for folder, subfolders, files in os.walk(root, followlinks=True):
            if "config.json" in files and folder != root:
                found.setdefault(os.path.relpath(folder, root), os.path.abspath(folder))
                subfolders.clear()
    return found


# Memory


class LTXMGPUFleet(torch.nn.Module):
    """Stands for the fleet in ComfyUI's list of loaded models: it holds no weights here."""


def on_host_gpu(devices: list[str]) -> bool:
    """Tells whether one of a fleet's devices is the GPU that ComfyUI itself uses."""
    own = model_management.get_torch_device()
    return own.type == "cuda" and f"cuda:{own.index or 0}" in devices


class MemoryGuard:
    """Lets ComfyUI ask for the fleet's memory back: on "free memory", and when another model needs the GPU."""

    def __init__(self, release: Callable[[], None], num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._patcher = ModelPatcher(
            LTXMGPUFleet(), load_device=model_management.get_torch_device(), offload_device=torch.device("cpu")
        )

        def on_detach(patcher: ModelPatcher, unpatch_all: bool) -> None:
            if unpatch_all:  # false while ComfyUI merely reorders its list
                release()

        self._patcher.add_callback(CallbacksMP.ON_DETACH, on_detach)

    def claim(self) -> None:
        """Enters ComfyUI's list of loaded models, which makes room for the weights on its own GPU."""
        if self._patcher not in model_management.loaded_models():
            model_management.load_models_gpu([self._patcher], memory_required=self._num_bytes)


# Jobs


def run_job(node_id: str, heading: str, guard: MemoryGuard, job: Callable[[Watch], _T]) -> _T:
    """Runs a job of the fleet while showing its progress on the node and looking for the Cancel button.

    The result holds ordinary tensors: ComfyUI's inference mode is left for the time of the job.
    """
    guard.claim()
    display = _Display(node_id, heading)
    try:
        with torch.inference_mode(False), torch.no_grad():
            return job(Watch(on_event=display.show, should_stop=display.should_stop))
    except JobCancelled:
        model_management.throw_exception_if_processing_interrupted()
        if display.interrupted:  # the progress bar saw the flag first, and cleared it
            raise model_management.InterruptProcessingException() from None
        raise
    except FleetError as error:
        if "out of memory" in str(error).lower():  # the type by which ComfyUI knows to unload its own models
            raise torch.cuda.OutOfMemoryError(str(error)) from error
        raise


class _Display:
    """Shows the events of one job on its node: progress bar, preview, one line of text."""

    def __init__(self, node_id: str, heading: str) -> None:
        self.interrupted = False
        self._node_id = node_id
        self._heading = heading
        self._bar: ProgressBar | None = None
        self._stage = ""
        self._first: tuple[int, float] | None = None
        self._done = (0, 1)
        self._say("waiting for the workers")

    def should_stop(self) -> bool:
        return self.interrupted or model_management.processing_interrupted()

    def show(self, event: Event) -> None:
        if event.kind == "progress":
            self._progress(event.data["stage"], event.data["step"], event.data["of"])
        elif event.kind == "preview":
            self._draw(Image.fromarray(event.data["image"].numpy()))
        elif event.kind == "log":
            self._say(event.data["text"])

    def _progress(self, stage: str, step: int, of: int) -> None:
        if stage != self._stage:
            self._stage, self._first, self._done = stage, None, (0, of)
        step = max(step, self._done[0])  # ranks report on their own, so a slower one may speak last
        self._done = (step, of)
        self._draw(None)
        self._say(f"{stage} {step}/{of}{self._pace(step)}")

    def _pace(self, step: int) -> str:
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        steps = step - self._first[0]
        return f" · {(now - self._first[1]) / steps:.2f} s/step" if steps and self._done[1] > 1 else ""

    def _draw(self, image: Image.Image | None) -> None:
        step, of = self._done
        self._bar = self._bar or ProgressBar(of, node_id=self._node_id)
        preview = None if image is None else ("JPEG", image, _PREVIEW_SIDE)
        try:
            self._bar.update_absolute(step, of, preview)
        except model_management.InterruptProcessingException:
            self.interrupted = True  # the job is cancelled at the next look, on all ranks at one step

    def _say(self, text: str) -> None:
        """Writes the line of text under the node; without a server (tests, scripts) nothing is written."""
        from server import PromptServer  # a name that exists only inside a running ComfyUI

        server = getattr(PromptServer, "instance", None)
        if server is not None:
            server.send_progress_text(f"{self._heading} · {text}", self._node_id, server.client_id)
