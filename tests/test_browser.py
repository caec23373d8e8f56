"""The shipped workflows in ComfyUI's real front end, in headless Chromium, with the old and the new node display."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from comfy_host import ROOT, ComfyHost
from screenshot import api_graph, find_chromium, load_workflow, open_page
from tests.host_fixtures import UI_WORKFLOW

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium was found: apt-get install chromium, or set CHROMIUM to its path"
)

UI_FILES = sorted((ROOT / "workflows").glob("*.json"))
RELEASED = sorted((ROOT / "tests" / "released").glob("*/*.json"))
COMPLAINTS = (".comfy-missing-nodes", ".p-dialog", ".p-toast-message-error, .p-toast-message-warn")


@dataclass(frozen=True)
class Seen:
    """What the page holds and shows after a file was loaded."""

    num_nodes: int
    all_registered: bool
    complaints: dict[str, int]  # how many there are, by selector
    errors: list[str]
    graph: dict[str, Any]  # in API format


@dataclass
class FrontEnd:
    """A server, its page, the page's uncaught errors, and what was seen of each file."""

    host: ComfyHost
    page: Page
    errors: list[str]
    seen: dict[Path, Seen] = field(default_factory=dict)

    def look(self, path: Path) -> Seen:
        """Loads a file once, however many tests ask for it."""
        if path not in self.seen:
            page = self.page
            load_workflow(page, _read(path))
            self.seen[path] = Seen(
                page.evaluate("() => app.graph.nodes.length"),
                page.evaluate("() => app.graph.nodes.every(node => LiteGraph.registered_node_types[node.type])"),
                {selector: page.locator(selector).count() for selector in COMPLAINTS},
                list(self.errors),
                api_graph(page),
            )
        return self.seen[path]


@pytest.fixture(scope="module", params=[False, True], ids=["nodes 1", "nodes 2.0"])
def front_end(request: pytest.FixtureRequest, host: ComfyHost) -> Iterator[FrontEnd]:
    """Gives a server's page, once per kind of node display."""
    host.post("/settings", {"Comfy.VueNodes.Enabled": request.param})
    with open_page(host) as (page, errors):
        setting = page.evaluate("() => app.extensionManager.setting.get('Comfy.VueNodes.Enabled')")
        assert setting is request.param
        yield FrontEnd(host, page, errors)


@pytest.mark.parametrize("path", UI_FILES, ids=lambda path: path.stem)
def test_workflow_loads_without_missing_node_or_warning(front_end: FrontEnd, path: Path) -> None:
    seen = front_end.look(path)
    assert seen.all_registered and seen.num_nodes == len(_read(path)["nodes"])
    assert seen.complaints == dict.fromkeys(COMPLAINTS, 0)
    assert not seen.errors, seen.errors


@pytest.mark.parametrize("path", UI_FILES, ids=lambda path: path.stem)
def test_front_end_turns_the_ui_file_into_the_api_twin(front_end: FrontEnd, path: Path) -> None:
    assert _without_titles(front_end.look(path).graph) == _without_titles(_read(path.parent / "api" / path.name))


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_b131_front_end_reads_every_value_of_a_released_file(front_end: FrontEnd, path: Path) -> None:
    graph, released = front_end.look(path).graph, _read(path.parent / "api" / path.name)
    assert graph.keys() == released.keys()
    for key, node in released.items():
        assert graph[key]["inputs"].items() >= node["inputs"].items(), node["class_type"]


def test_node_shows_its_error_after_a_bad_input(front_end: FrontEnd) -> None:
    host, page = front_end.host, front_end.page
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
