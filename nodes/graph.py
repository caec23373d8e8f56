"""Looks at the queued graph (API format) for mistakes that other nodes hide. Knows no ComfyUI module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Graph = dict[str, dict[str, Any]]

# Core nodes that make a video latent and silently round its size down.
_LATENT_MAKERS = ("EmptyLTXVLatentVideo", "LTXVImgToVideo")
LORA_NODE = "LTXMGPULoRA"
ENCODE_VIDEO_NODE = "LTXMGPUEncodeVideo"


def check_asked_size(graph: Graph, node_id: str, input_id: str) -> None:
    """Raises ValueError when the node that makes this input's latent was asked for a size that it would round down."""
    maker = source(graph, node_id, input_id)
    if maker is None or maker["class_type"] not in _LATENT_MAKERS:
        return
    asked = maker["inputs"]
    for name in ("width", "height"):
        _refuse_rounding(name, asked.get(name), step=32, first=0, rule="a multiple of 32")
    _refuse_rounding("length", asked.get("length"), step=8, first=1, rule="8 n + 1")


def _refuse_rounding(name: str, asked: Any, *, step: int, first: int, rule: str) -> None:
    if not isinstance(asked, int) or (asked - first) % step == 0:
        return
    below = asked - (asked - first) % step
    raise ValueError(
        f"{name} must be {rule}, got {asked}. The empty latent would quietly become {below}: "
        f"ask for {below} or {below + step}."
    )


def source(graph: Graph, node_id: str, input_id: str) -> dict[str, Any] | None:
    """Returns the node whose output is linked to an input, or None when it is not linked."""
    link = graph.get(node_id, {}).get("inputs", {}).get(input_id)
    return graph.get(str(link[0])) if isinstance(link, list) else None


def loader_link(graph: Graph, inputs: dict[str, Any]) -> Any:
    """Returns the link to the loader behind a node's `ltx` input; nodes that add a LoRA are passed over."""
    return lora_chain(graph, inputs)[0]


def lora_chain(graph: Graph, inputs: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    """Returns the link to the loader behind a node's `ltx` input, and the inputs of the LoRA nodes on the way."""
    link = inputs.get("ltx")
    passed: dict[str, dict[str, Any]] = {}
    while isinstance(link, list) and str(link[0]) not in passed:
        node = graph.get(str(link[0]), {})
        if node.get("class_type") != LORA_NODE:
            break
        passed[str(link[0])] = node.get("inputs", {})
        link = node.get("inputs", {}).get("ltx")
    return link, list(passed.values())


def condition_chain(graph: Graph, link: Any, until: Any) -> tuple[list[dict[str, Any]], bool]:
    """Returns the nodes of a chain of conditions that ends in `link`, first to last, and whether it begins at `until`.

    The node behind `until` and those before it are left out.
    """
    passed: dict[str, dict[str, Any]] = {}
    while link != until and isinstance(link, list) and str(link[0]) in graph and str(link[0]) not in passed:
        passed[str(link[0])] = graph[str(link[0])]
        link = passed[str(link[0])].get("inputs", {}).get("conditions")
    return list(passed.values())[::-1], link == until


def made_size(graph: Graph, link: Any) -> tuple[int, int] | None:
    """Returns the height and width in pixels that the node behind a latent's link is asked for, None where unknown."""
    node = graph.get(str(link[0]), {}) if isinstance(link, list) else {}
    if node.get("class_type") not in (*_LATENT_MAKERS, ENCODE_VIDEO_NODE):
        return None
    height, width = (node.get("inputs", {}).get(name) for name in ("height", "width"))
    return (height, width) if isinstance(height, int) and isinstance(width, int) and height and width else None


def followers(
    graph: Graph, node_id: str, output: int, class_type: str, input_id: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the id and the inputs of every node of a class that takes this output on the given input."""
    for follower_id, node in graph.items():
        inputs = node.get("inputs", {})
        if node.get("class_type") == class_type and inputs.get(input_id) == [node_id, output]:
            yield follower_id, inputs
