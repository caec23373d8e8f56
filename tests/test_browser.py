"""The shipped workflows in ComfyUI's real front end, in headless Chromium, with the old and the new node display."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from comfy_host import ROOT, ComfyHost
from screenshot import api_graph, find_chromium, load_workflow, open_page
from tests.host_fixtures import UI_WORKFLOW, furnished

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium was found: apt-get install chromium, or set CHROMIUM to its path"
)

UI_FILES = sorted((ROOT / "workflows").glob("*.json"))
RELEASED = sorted((ROOT / "tests" / "released").glob("*/*.json"))


@pytest.fixture(scope="module", params=[False, True], ids=["nodes 1", "nodes 2.0"])
def front_end(request: pytest.FixtureRequest) -> Iterator[tuple[ComfyHost, Page, list[str]]]:
    """Gives a server, its page and the page's uncaught errors, once per kind of node display."""
    host = furnished(ComfyHost(settings={"Comfy.VueNodes.Enabled": request.param}))
    with host, open_page(host) as (page, errors):
        yield host, page, errors


@pytest.mark.parametrize("path", UI_FILES, ids=lambda path: path.stem)
def test_workflow_loads_without_missing_node_or_warning(
    front_end: tuple[ComfyHost, Page, list[str]], path: Path
) -> None:
    _, page, errors = front_end
    load_workflow(page, _read(path))
    assert page.evaluate("() => app.graph.nodes.every(node => LiteGraph.registered_node_types[node.type])")
    assert page.evaluate("() => app.graph.nodes.length") == len(_read(path)["nodes"])
    assert page.locator(".comfy-missing-nodes").count() == 0
    assert page.locator(".p-dialog").count() == 0
    assert page.locator(".p-toast-message-error, .p-toast-message-warn").count() == 0
    assert not errors, errors


@pytest.mark.parametrize("path", UI_FILES, ids=lambda path: path.stem)
def test_front_end_turns_the_ui_file_into_the_api_twin(
    front_end: tuple[ComfyHost, Page, list[str]], path: Path
) -> None:
    _, page, _ = front_end
    load_workflow(page, _read(path))
    assert _without_titles(api_graph(page)) == _without_titles(_read(path.parent / "api" / path.name))


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_b131_front_end_reads_every_value_of_a_released_file(
    front_end: tuple[ComfyHost, Page, list[str]], path: Path
) -> None:
    _, page, _ = front_end
    load_workflow(page, _read(path))
    graph, released = api_graph(page), _read(path.parent / "api" / path.name)
    assert graph.keys() == released.keys()
    for key, node in released.items():
        assert graph[key]["inputs"].items() >= node["inputs"].items(), node["class_type"]


def test_node_shows_its_error_after_a_bad_input(front_end: tuple[ComfyHost, Page, list[str]]) -> None:
    host, page, _ = front_end
    workflow = _read(UI_WORKFLOW)
    empty = next(node for node in workflow["nodes"] if node["type"] == "EmptyLTXVLatentVideo")
    empty["widgets_values"][0] = 200
    load_workflow(page, workflow)
    host.post("/history", {"clear": True})
    page.evaluate("() => window.app.queuePrompt(0, 1)")
    while not host.get("/history"):
        page.wait_for_timeout(200)
    page.get_by_text("width must be a multiple of 32, got 200").first.wait_for(timeout=10_000)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _without_titles(graph: dict[str, Any]) -> dict[str, Any]:
    return {key: {name: part for name, part in node.items() if name != "_meta"} for key, node in graph.items()}
