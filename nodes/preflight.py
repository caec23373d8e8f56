"""Checks a stage before the text encoder or any weight is loaded: ComfyUI asks the node which inputs it needs first.

The stage's prompts are lazy inputs. ComfyUI evaluates the others, calls `check_lazy_status`, and only then runs the
nodes behind the prompts; a ValueError raised in between stops the graph while it is still cheap.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from mgpu_runtime.pipeline.checks import check_components, check_sound, check_tdp, token_limit
from mgpu_runtime.pipeline.condition_checks import check_conditions
from mgpu_runtime.pipeline.conditions import Conditions
from mgpu_runtime.pipeline.jobs import SPStage, TDPStage
from mgpu_runtime.pipeline.tensors import check_audio_latent, check_video_latent

from .graph import Graph, check_asked_size, followers, loader_link, lora_chain
from .handle import LTXHandle
from .lora import check_lora_inputs
from .wires import Latent, read_latents

Job = TypeVar("Job", SPStage, TDPStage)

TDP_NODE = "LTXMGPUTDPUpscaleStage"
TDP_MODES = {"tdp (audio kept)": "tdp", "sp (audio follows)": "sp"}


def check_sp_stage(
    graph: Graph,
    node_id: str,
    ltx: LTXHandle,
    latent: Latent,
    audio_latent: Latent | None,
    job: SPStage,
    conditions: Conditions = (),
) -> None:
    """Raises ValueError for a size, a latent, a condition or a following upscale stage that could not run."""
    check_asked_size(graph, node_id, "latent")
    start = read_latents(latent, audio_latent)
    facts = ltx.client.check()
    grid = check_video_latent(start.video, facts, ltx.settings.sp_max_tokens)
    if start.audio is not None:
        check_audio_latent(start.audio, facts)
    check_sound(job, start.audio, start.audio_mask)
    has_sound = job.sound != "none"
    check_conditions(conditions, facts, grid, has_sound=has_sound, max_tokens=ltx.settings.sp_max_tokens)
    check_components(_with(job, conditions), facts, ltx.settings)
    own = graph.get(node_id, {}).get("inputs", {})
    for inputs in followers(graph, node_id, 0, TDP_NODE, "latent"):
        if loader_link(graph, inputs) == loader_link(graph, own):
            shared = conditions if inputs.get("conditions") == own.get("conditions") else ()
            _check_follower(inputs, ltx, start.video, shared, has_sound=has_sound)
            for lora in lora_chain(graph, inputs)[1]:
                check_lora_inputs(ltx, lora)


def check_tdp_stage(
    ltx: LTXHandle, latent: Latent, audio_latent: Latent | None, job: TDPStage, conditions: Conditions = ()
) -> None:
    """Raises ValueError for latents, tiles or conditions that could not run."""
    start = read_latents(latent, audio_latent)
    if start.audio is not None:
        check_audio_latent(start.audio, ltx.client.check())
    _check_tdp(job, start.video, ltx, conditions, has_sound=start.audio is not None)


def tdp_mode(choice: str) -> str:
    """Returns the mode of a choice in the list; raises ValueError for another text."""
    if choice not in TDP_MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, TDP_MODES))}, got {choice!r}")
    return TDP_MODES[choice]


def _check_follower(
    inputs: dict[str, Any], ltx: LTXHandle, video: Tensor, conditions: Conditions, *, has_sound: bool
) -> None:
    """Checks an upscale stage by its widgets, as far as they are plain values; a linked one is checked when it runs."""
    names = ("upscale", "tiles", "overlap", "mode")
    widgets = {name: inputs[name] for name in names if name in inputs and not isinstance(inputs[name], list)}
    if "mode" in widgets:
        widgets["mode"] = tdp_mode(widgets["mode"])
    has_sound = has_sound and inputs.get("audio_latent") is not None
    try:
        _check_tdp(TDPStage(seed=0, fps=24.0, **widgets), video, ltx, conditions, has_sound=has_sound)
    except ValueError as error:  # it is shown on the stage that is about to run
        raise ValueError(f"TDP Upscale Stage: {error}") from error


def _check_tdp(job: TDPStage, video: Tensor, ltx: LTXHandle, conditions: Conditions, *, has_sound: bool) -> None:
    facts = ltx.client.check()
    grid = check_tdp(_with(job, conditions), video, facts, ltx.settings)
    check_conditions(conditions, facts, grid, has_sound=has_sound, max_tokens=token_limit(job, ltx.settings))


def _with(job: Job, conditions: Conditions) -> Job:
    """Returns a stage with its conditions in it, as the client will send it."""
    return replace(job, conditions=tuple(condition for condition, _ in conditions))
