"""Loads a workflow into ComfyUI's real front end in headless Chromium, and takes its picture for the README."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, Route, sync_playwright

from comfy_host import ROOT, ComfyHost, comfy_path

WORKFLOW = ROOT / "workflows" / "ltx_mgpu_two_stage_t2v.json"
PICTURE = ROOT / "docs" / "images" / "graph.png"

# The README's picture: the canvas at full size, without the bars around it.
_VIEW = {"width": 2300, "height": 1250}
_CLIP = {"x": 60, "y": 140, "width": 2170, "height": 950}
_CLEAN = {
    "Comfy.Minimap.Visible": False,
    "Comfy.Graph.CanvasInfo": False,
}

_RUN_SECONDS = 300

_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find_chromium() -> str | None:
    """Returns the path of a Chromium (CHROMIUM names one), or None."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((path for path in map(shutil.which, names) if path), None)


@contextmanager
def open_page(host: ComfyHost, *, width: int = 1600, height: int = 900) -> Iterator[tuple[Page, list[str]]]:
    """Gives the front end's page with all nodes known, and the list of its uncaught errors as they come."""
    chromium = find_chromium()
    if chromium is None:
        raise FileNotFoundError("no Chromium was found: apt-get install chromium, or set CHROMIUM to its path")
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as profile, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=chromium,
            headless=True,
            args=_FLAGS,
            viewport={"width": width, "height": height},
        )
        page = context.pages[0]
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.route("**/*", lambda route: _stay_home(route, host))
        page.goto(host.url)
        page.wait_for_function(
            "() => window.app?.graph && window.LiteGraph?.registered_node_types['LTXMGPUDistributedDecode']"
        )
        try:
            yield page, errors
        finally:
            context.close()


def load_workflow(page: Page, workflow: dict[str, Any]) -> None:
    """Loads a graph in UI format into the page."""
    page.evaluate("workflow => window.app.loadGraphData(workflow, true, true, 'workflow')", workflow)
    page.wait_for_timeout(1000)


def api_graph(page: Page) -> dict[str, Any]:
    """Returns the loaded graph in API format, as the front end would queue it."""
    return page.evaluate("async () => (await window.app.graphToPrompt()).output")


def _stay_home(route: Route, host: ComfyHost) -> None:
    """Lets no request leave the server under test, so that nothing waits for fonts and news."""
    if route.request.url.startswith((host.url, "data:", "blob:")):
        route.continue_()
    else:
        route.abort()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workflow", type=Path, default=WORKFLOW)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--api", type=Path, help="also write the graph in API format there")
    parser.add_argument("--run", action="store_true", help="queue the graph first, so that the clip is in the picture")
    options = parser.parse_args()
    workflow = json.loads(options.workflow.read_text(encoding="utf-8"))
    host = ComfyHost(settings=_CLEAN)
    (host.base / "input").mkdir(parents=True, exist_ok=True)
    (host.base / "input" / "example.png").symlink_to(
        comfy_path() / "input" / "example.png"
    )  # Load Image's first choice
    with host, open_page(host, **_VIEW) as (page, _):
        load_workflow(page, workflow)
        graph = api_graph(page)
        if options.api:
            options.api.write_text(json.dumps(graph, indent=2) + "\n", encoding="utf-8")
        if options.run:
            _run_in_page(host, page)
        _take_picture(page, options.picture)
    print(options.picture)


def _take_picture(page: Page, path: Path) -> None:
    """Fits the graph to the canvas and saves the part of the page that shows it."""
    page.evaluate(
        """() => {
            const canvas = window.app.canvas;
            canvas.deselectAll();
            canvas.ds.scale = 1;
            canvas.ds.offset = [40, 110];
            canvas.setDirty(true, true);
        }"""
    )
    page.wait_for_timeout(1500)
    path.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=path, clip=_CLIP)


def _run_in_page(host: ComfyHost, page: Page) -> None:
    """Queues the loaded graph with the page's own button code and waits for its end."""
    page.evaluate("() => window.app.queuePrompt(0, 1)")
    deadline = time.monotonic() + _RUN_SECONDS
    while not host.get("/history"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the graph did not end within {_RUN_SECONDS} s: the server may have refused it")
        page.wait_for_timeout(500)
    page.wait_for_timeout(12_000)  # until the page's own notices are gone


if __name__ == "__main__":
    main()
