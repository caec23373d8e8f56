"""Checks a stage before the text encoder or any weight is loaded: ComfyUI asks the node which inputs it needs first.

The stage's prompts are lazy inputs. ComfyUI evaluates the others, calls `check_lazy_status`, and only then runs the
nodes behind the prompts; a ValueError raised in between stops the graph while it is still cheap.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mgpu_runtime.pipeline.checks import check_tdp
from mgpu_runtime.pipeline.jobs import TDPStage
from mgpu_runtime.pipeline.tensors import check_audio_latent, check_video_latent

from .graph import Graph, check_asked_size, followers
from .handle import LTXHandle
from .wires import Latent, read_latents

TDP_NODE = "LTXMGPUTDPUpscaleStage"
TDP_MODES = {"tdp (audio kept)": "tdp", "sp (audio follows)": "sp"}


def check_sp_stage(graph: Graph, node_id: str, ltx: LTXHandle, latent: Latent, audio_latent: Latent | None) -> None:
    """Raises ValueError for a size, a latent or a following upscale stage that could not run."""
    check_asked_size(graph, node_id, "latent")
    start = read_latents(latent, audio_latent)
    facts = ltx.client.check()
    check_video_latent(start.video, facts, ltx.settings.sp_max_tokens)
    if start.audio is not None:
        check_audio_latent(start.audio, facts)
    own_fleet = graph.get(node_id, {}).get("inputs", {}).get("ltx")
    for inputs in followers(graph, node_id, 0, TDP_NODE, "latent"):
        if inputs.get("ltx") == own_fleet:
            _check_follower(inputs, ltx, start.video)


def check_tdp_stage(ltx: LTXHandle, latent: Latent, audio_latent: Latent | None, job: TDPStage) -> None:
    """Raises ValueError for latents or tiles that could not run."""
    start = read_latents(latent, audio_latent)
    facts = ltx.client.check()
    check_tdp(job, start.video, facts, ltx.settings)
    if start.audio is not None:
        check_audio_latent(start.audio, facts)


def tdp_mode(choice: str) -> str:
    """Returns the mode of a choice in the list; raises ValueError for another text."""
    if choice not in TDP_MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, TDP_MODES))}, got {choice!r}")
    return TDP_MODES[choice]


def _check_follower(inputs: dict[str, Any], ltx: LTXHandle, video: Tensor) -> None:
    """Checks an upscale stage by its widgets, as far as they are plain values; a linked one is checked when it runs."""
    names = ("upscale", "tiles", "overlap", "mode")
    widgets = {name: inputs[name] for name in names if name in inputs and not isinstance(inputs[name], list)}
    if "mode" in widgets:
        widgets["mode"] = tdp_mode(widgets["mode"])
    try:
        check_tdp(TDPStage(seed=0, fps=24.0, **widgets), video, ltx.client.check(), ltx.settings)
    except ValueError as error:  # it is shown on the stage that is about to run
        raise ValueError(f"TDP Upscale Stage: {error}") from error
