"""The shipped workflow files: complete, consistent with the running server's nodes, and served as a template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from comfy_host import PACK_FOLDER, ROOT, ComfyHost

UI_FILES = sorted((ROOT / "workflows").glob("*.json"))
RELEASED = sorted((ROOT / "tests" / "released").glob("*/*.json"))  # as every version shipped them, never changed
WIDGET_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
PLAIN_NODES = {"MarkdownNote", "Note"}  # of the front end alone
# Widgets that the front end adds to core nodes behind those the server knows: a player, a button.
FRONT_END_WIDGETS = {"LoadImage": ["upload"], "LoadAudio": ["audioUI", "upload"]}


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_there_is_a_workflow_and_each_has_its_twin() -> None:
    assert UI_FILES
    assert {path.name for path in UI_FILES} == {path.name for path in (ROOT / "workflows" / "api").glob("*.json")}


@pytest.mark.parametrize("path", UI_FILES, ids=lambda path: path.stem)
def test_b131_ui_file_fits_the_nodes_of_the_server(host: ComfyHost, path: Path) -> None:
    workflow = _read(path)
    assert workflow["version"] == 0.4
    known = host.get("/object_info")
    for node in workflow["nodes"]:
        if node["type"] in PLAIN_NODES:
            continue
        info = known[node["type"]]
        added = FRONT_END_WIDGETS.get(node["type"], [])
        widgets = _widgets(info) + added
        assert len(node["widgets_values"]) == len(widgets), (node["type"], widgets)
        for name, value in zip(widgets, node["widgets_values"], strict=True):
            if name not in added:
                _check_widget(info, name, value)
        assert [output["type"] for output in node["outputs"]] == info["output"]
        assert [output["name"] for output in node["outputs"]] == info["output_name"]


@pytest.mark.parametrize("path", UI_FILES, ids=lambda path: path.stem)
def test_links_of_the_ui_file_agree_at_both_ends(path: Path) -> None:
    workflow = _read(path)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    assert workflow["last_node_id"] == max(nodes) and workflow["last_link_id"] == len(workflow["links"])
    for link, source, source_slot, target, target_slot, wire in workflow["links"]:
        output, entry = nodes[source]["outputs"][source_slot], nodes[target]["inputs"][target_slot]
        assert link in output["links"] and entry["link"] == link
        assert output["type"] == entry["type"] == wire


@pytest.mark.parametrize("path", UI_FILES, ids=lambda path: path.stem)
def test_ui_file_and_api_twin_hold_the_same_values(host: ComfyHost, path: Path) -> None:
    """Is the check that needs no browser; test_browser.py lets the real front end convert."""
    workflow, graph = _read(path), _read(path.parent / "api" / path.name)
    known = host.get("/object_info")
    links = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    nodes = {str(node["id"]): node for node in workflow["nodes"] if node["type"] not in PLAIN_NODES}
    assert nodes.keys() == graph.keys()
    for key, node in nodes.items():
        assert node["type"] == graph[key]["class_type"]
        added = FRONT_END_WIDGETS.get(node["type"], [])
        widgets = zip(_widgets(known[node["type"]]) + added, node["widgets_values"], strict=True)
        inputs = {name: value for name, value in widgets if name not in ["control_after_generate", *added]}
        inputs |= {entry["name"]: links[entry["link"]] for entry in node["inputs"] if entry["link"] is not None}
        assert inputs == {name: value for name, value in graph[key]["inputs"].items() if name not in added}, node[
            "type"
        ]


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_b131_released_files_keep_each_value_at_its_widget(host: ComfyHost, path: Path) -> None:
    """A file of an older version holds values by position, and an API file has no input that came later."""
    workflow, graph = _read(path), _read(path.parent / "api" / path.name)
    known = host.get("/object_info")
    for node in workflow["nodes"]:
        if node["type"] in PLAIN_NODES:
            continue
        info, inputs = known[node["type"]], graph[str(node["id"])]["inputs"]
        by_position = dict(zip(_widgets(info), node["widgets_values"], strict=False))
        assert len(by_position) == len(node["widgets_values"]), node["type"]
        for name, value in by_position.items():
            _check_widget(info, name, value)
            assert name == "control_after_generate" or inputs[name] == value, (node["type"], name)
        assert inputs.keys() >= info["input"].get("required", {}).keys(), "a newer input is required"
        assert [output["type"] for output in node["outputs"]] == info["output"][: len(node["outputs"])]


def test_only_the_ui_files_are_templates(host: ComfyHost) -> None:
    served = host.get("/workflow_templates")[PACK_FOLDER]
    assert sorted(served) == [path.stem for path in UI_FILES]
    for name in served:
        assert host.get(f"/api/workflow_templates/{PACK_FOLDER}/{name}.json")["version"] == 0.4


def _widgets(info: dict[str, Any]) -> list[str]:
    """Returns a node's widgets in the order of a file's values; a seed with a control takes two places."""
    names: list[str] = []
    for kind in ("required", "optional"):
        for name in info["input_order"].get(kind, []):
            type_, *options = info["input"][kind][name]
            if isinstance(type_, list) or type_ in WIDGET_TYPES:
                names.append(name)
                if options and options[0].get("control_after_generate"):
                    names.append("control_after_generate")
    return names


def _check_widget(info: dict[str, Any], name: str, value: Any) -> None:
    if name == "control_after_generate":
        assert value in ("fixed", "increment", "decrement", "randomize")
        return
    kind = "required" if name in info["input"]["required"] else "optional"
    type_, options = info["input"][kind][name]
    choices = type_ if isinstance(type_, list) else options.get("options") if type_ == "COMBO" else None
    if choices is not None:
        assert value in choices, (name, value)
    if type_ in ("INT", "FLOAT"):
        assert options.get("min", value) <= value <= options.get("max", value), (name, value)
