"""Checks a stage before the text encoder or any weight is loaded: ComfyUI asks the node which inputs it needs first.

The stage's prompts are lazy inputs. ComfyUI evaluates the others, calls `check_lazy_status`, and only then runs the
nodes behind the prompts; a ValueError raised in between stops the graph while it is still cheap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mgpu_runtime.pipeline.checks import check_components, check_decode, check_sound, check_tdp, token_limit
from mgpu_runtime.pipeline.condition_checks import Grid, check_conditions
from mgpu_runtime.pipeline.conditions import Conditions, ImageCondition, LatentCondition
from mgpu_runtime.pipeline.jobs import Decode, SPStage, TDPStage
from mgpu_runtime.pipeline.tensors import (
    check_audio_latent,
    check_audio_length,
    check_video_latent,
    num_audio_frames,
)

from .graph import Graph, check_asked_size, condition_chain, followers, loader_link, lora_chain, made_size
from .handle import LTXHandle
from .lora import check_lora_inputs
from .wires import Latent, StageStart, read_latents, read_sigmas

Job = TypeVar("Job", SPStage, TDPStage)

TDP_NODE = "LTXMGPUTDPUpscaleStage"
DECODE_NODE = "LTXMGPUDistributedDecode"
TDP_MODES = {"tdp (audio kept)": "tdp", "sp (audio follows)": "sp"}
FPS_OF_LATENT = 0.0

# Stands for a widget of a following stage that is linked or left out: what is never refused.
_STAND_INS = {"seed": 0, "upscale": False, "mode": next(iter(TDP_MODES)), "fps": FPS_OF_LATENT, "sampler": "auto"}
_CONDITIONS = {"LTXMGPUImageCondition": ImageCondition, "LTXMGPULatentCondition": LatentCondition}


@dataclass(frozen=True)
class _FirstStage:
    """Holds what an SP Stage takes and will give, for the checks of the stages behind it."""

    node_id: str
    inputs: dict[str, Any]
    start: StageStart
    job: SPStage
    conditions: Conditions


def check_sp_stage(
    graph: Graph,
    node_id: str,
    ltx: LTXHandle,
    latent: Latent,
    audio_latent: Latent | None,
    job: SPStage,
    conditions: Conditions = (),
) -> None:
    """Raises ValueError for a size, a latent or a condition that could not run, and for a stage or decode behind it."""
    check_asked_size(graph, node_id, "latent")
    start = read_latents(latent, audio_latent)
    facts = ltx.client.check()
    grid = check_video_latent(start.video, facts, ltx.settings.sp_max_tokens)
    if start.audio is not None:
        check_audio_latent(start.audio, facts)
        check_audio_length(start.audio.shape[2], grid[0], job.fps, facts)
    check_sound(job, start.audio, start.audio_mask)
    has_sound = job.sound != "none"
    check_conditions(conditions, facts, grid, has_sound=has_sound, max_tokens=ltx.settings.sp_max_tokens)
    check_components(_with(job, conditions), facts, ltx.settings)
    own = graph.get(node_id, {}).get("inputs", {})
    first = _FirstStage(node_id, own, start, job, conditions)
    _check_decodes(graph, node_id, ltx, grid, [[node_id, 1]] if has_sound else [])
    for follower_id, inputs in followers(graph, node_id, 0, TDP_NODE, "latent"):
        if loader_link(graph, inputs) == loader_link(graph, own):
            _check_follower(graph, follower_id, inputs, ltx, first)
            for lora in lora_chain(graph, inputs)[1]:
                check_lora_inputs(ltx, lora)


def check_tdp_stage(
    graph: Graph,
    node_id: str,
    ltx: LTXHandle,
    latent: Latent,
    audio_latent: Latent | None,
    job: TDPStage,
    conditions: Conditions = (),
) -> None:
    """Raises ValueError for latents, tiles or conditions that could not run, and for a decode behind the stage."""
    start, facts = read_latents(latent, audio_latent), ltx.client.check()
    has_sound = start.audio is not None
    if has_sound:
        check_audio_latent(start.audio, facts)
    grid = check_tdp(_with(job, conditions), start.video, facts, ltx.settings)
    if has_sound:
        check_audio_length(start.audio.shape[2], grid[0], job.fps, facts)
    check_conditions(conditions, facts, grid, has_sound=has_sound, max_tokens=token_limit(job, ltx.settings))
    _check_decodes(graph, node_id, ltx, grid, [[node_id, 1]] if has_sound else [])


def tdp_job(own_fps: float | None, *, fps: float, mode: str, sigmas: Tensor | None = None, **fields: Any) -> TDPStage:
    """Returns the job of an upscale stage's widgets for a latent of `own_fps`, which None leaves unknown.

    Raises ValueError for widgets that make no job.
    """
    frame_rate = own_fps if fps == FPS_OF_LATENT else fps
    if frame_rate is None:
        raise ValueError(
            "fps is 0 (take it from the latent), but this latent carries no frame rate: set fps, or connect the video "
            "latent of SP Stage"
        )
    if mode not in TDP_MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, TDP_MODES))}, got {mode!r}")
    return TDPStage(fps=frame_rate, mode=TDP_MODES[mode], sigmas=read_sigmas(sigmas), **fields)


def _check_follower(graph: Graph, node_id: str, inputs: dict[str, Any], ltx: LTXHandle, first: _FirstStage) -> None:
    """Checks an upscale stage by its widgets, as far as they are plain values; a linked one is checked when it runs."""
    facts = ltx.client.check()
    linked = {name for name, value in inputs.items() if isinstance(value, list)}
    widgets = {name: _plain(inputs, name, stand_in) for name, stand_in in _STAND_INS.items()}
    tiles = {} if linked & {"upscale", "mode"} else _tiles(inputs)
    try:
        job = tdp_job(first.job.fps, **widgets, **tiles)
        grid = check_tdp(job, first.start.video, facts, ltx.settings)
        sound_length, has_sound = _sound(inputs, ltx, first)
        if sound_length is not None and "fps" not in linked:
            check_audio_length(sound_length, grid[0], job.fps, facts)
        if "upscale" in linked:
            return  # nothing more is known of a clip without a size
        conditions = _following_conditions(graph, inputs, ltx, first, grid)
        check_components(_with(job, conditions), facts, ltx.settings)
        limit = None if "mode" in linked else token_limit(job, ltx.settings)
        check_conditions(conditions, facts, grid, has_sound=has_sound, max_tokens=limit)
    except ValueError as error:  # it is shown on the stage that is about to run
        raise ValueError(f"TDP Upscale Stage: {error}") from error
    sounds = [[first.node_id, 1]] if first.job.sound != "none" else []
    _check_decodes(graph, node_id, ltx, grid, [*sounds, [node_id, 1]] if sound_length is not None else sounds)


def _check_decodes(graph: Graph, node_id: str, ltx: LTXHandle, grid: Grid, sounds: list[Any]) -> None:
    """Checks the decodes of a stage's clip (F, H, W) by their widgets; `sounds` are the links that will carry sound."""
    facts, loader = ltx.client.check(), loader_link(graph, graph.get(node_id, {}).get("inputs", {}))
    for _, inputs in followers(graph, node_id, 0, DECODE_NODE, "latent"):
        if loader_link(graph, inputs) != loader:
            continue
        with_sound = inputs.get("audio_latent") in sounds
        try:
            job, latent = Decode(**_tiles(inputs)), torch.zeros(1, facts.video_channels, *grid)
            check_decode(job, latent, facts, ltx.settings, with_sound=with_sound)
        except ValueError as error:  # it is shown on the stage that is about to run
            raise ValueError(f"Distributed Decode: {error}") from error


def _sound(inputs: dict[str, Any], ltx: LTXHandle, first: _FirstStage) -> tuple[int | None, bool]:
    """Returns how many audio latents an upscale stage will get, None where unknown, and whether it may get any."""
    link, facts = inputs.get("audio_latent"), ltx.client.check()
    if link == [first.node_id, 1]:
        has_sound = first.job.sound != "none"
        return num_audio_frames(first.start.video.shape[2], first.job.fps, facts) if has_sound else None, has_sound
    if link is not None and link == first.inputs.get("audio_latent") and first.start.audio is not None:
        return first.start.audio.shape[2], True
    return None, link is not None


def _following_conditions(
    graph: Graph, inputs: dict[str, Any], ltx: LTXHandle, first: _FirstStage, grid: Grid
) -> Conditions:
    """Returns the conditions of an upscale stage: those it shares with the first, then others by their widgets.

    What is not known of one is as the clip (F, H, W) would have it: a single frame of the right size.
    """
    nodes, is_shared = condition_chain(graph, inputs.get("conditions"), first.inputs.get("conditions"))
    found = list(first.conditions) if is_shared else []
    for node in nodes:
        kind, widgets = _CONDITIONS.get(node.get("class_type")), node.get("inputs", {})
        cells = _cells(graph, widgets.get("latent"), ltx, first) if kind is LatentCondition else None
        latent = torch.zeros(1, ltx.client.check().video_channels, 1, *(cells or grid[1:]))
        if kind is None:
            found.append((LatentCondition(0, strength=0.0), latent))
            continue
        condition = kind(_plain(widgets, "frame", 0), _plain(widgets, "strength", 1.0))
        found.append((condition, latent if kind is LatentCondition else torch.zeros(1, 32, 32, 3)))
    return tuple(found)


def _cells(graph: Graph, link: Any, ltx: LTXHandle, first: _FirstStage) -> tuple[int, int] | None:
    """Returns the rows and columns of a linked latent, None where the graph does not tell."""
    if link is not None and link in ([first.node_id, 0], first.inputs.get("latent")):
        return tuple(first.start.video.shape[3:])
    size = made_size(graph, link)
    if size is None:
        return None
    _, *factors = ltx.client.check().scale_factors
    return size[0] // factors[0], size[1] // factors[1]


def _tiles(inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the tiles and the overlap of a node where both are plain values, else none: auto always fits."""
    given = {name: inputs[name] for name in ("tiles", "overlap") if name in inputs}
    return {} if any(isinstance(value, list) for value in given.values()) else given


def _plain(inputs: dict[str, Any], name: str, stand_in: Any) -> Any:
    """Returns the value of a widget, or what stands for one that is linked or left out."""
    value = inputs.get(name, stand_in)
    return stand_in if isinstance(value, list) else value


def _with(job: Job, conditions: Conditions) -> Job:
    """Returns a stage with its conditions in it, as the client will send it."""
    return replace(job, conditions=tuple(condition for condition, _ in conditions))
