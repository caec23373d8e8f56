"""The pack as ComfyUI finds it: importing it, its metadata, its licence."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from comfy_host import ROOT
from tests.host_fixtures import LOAD_PACK, run_in_comfy, run_python
from tests.test_nodes_schema import NODES

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_b139_pack_imports_in_a_bare_interpreter_and_does_nothing() -> None:
    code = """
    import threading
    before = (list(sys.path), dict(__import__("os").environ))
    pack = load_pack("/srv/ComfyUI/custom_nodes/ltx-mgpu")
    assert callable(pack.comfy_entrypoint)
    assert (sys.path, dict(__import__("os").environ)) == before
    assert threading.active_count() == 1
    assert not {"torch", "comfy", "server", "mgpu_runtime"} & set(sys.modules)
    """
    run_python(LOAD_PACK + _dedent(code))


def test_b134_decoy_modules_first_on_the_path_are_not_touched(tmp_path: Path) -> None:
    for name in ("utils", "nodes", "server", "comfy", "mgpu_runtime", "fleet", "wires"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a decoy was imported')\n", encoding="utf-8")
    code = f"""
    sys.path.insert(0, {str(tmp_path)!r})
    pack = load_pack("pack")
    pack._bind_runtime()
    import importlib, mgpu_runtime.pipeline.client
    for name in ("wires", "graph", "guidance"):
        importlib.import_module("pack.nodes." + name)
    assert mgpu_runtime.__file__ == {str(ROOT / "mgpu_runtime" / "__init__.py")!r}
    """
    run_python(LOAD_PACK + _dedent(code))


def test_b136_pack_and_runtime_import_in_the_c_locale() -> None:
    code = """
    import locale
    assert locale.getpreferredencoding(False) not in ("UTF-8", "utf-8"), locale.getpreferredencoding(False)
    nodes = pack_nodes(load_pack("pack"))
    for node in nodes:
        node.GET_SCHEMA()
    """
    env = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    run_in_comfy(_dedent(code), env=env)


def test_b133_two_names_for_one_folder_share_one_runtime(tmp_path: Path) -> None:
    (tmp_path / "again").symlink_to(ROOT, target_is_directory=True)
    code = f"""
    import subprocess, threading
    first, second = load_pack("first"), load_pack("second", {str(tmp_path / "again")!r})
    names = [[node.GET_SCHEMA().node_id for node in pack_nodes(pack)] for pack in (first, second)]
    assert names[0] == names[1], names
    assert first.nodes.comfy.Watch is second.nodes.comfy.Watch
    assert [m for m in sys.modules if m.endswith("mgpu_runtime.fleet")] == ["mgpu_runtime.fleet"]
    import psutil
    assert not psutil.Process().children()
    """
    run_in_comfy(_dedent(code))


def test_b133_another_copy_of_the_runtime_is_refused_by_name(tmp_path: Path) -> None:
    other = tmp_path / "mgpu_runtime"
    other.mkdir()
    (other / "__init__.py").write_text("", encoding="utf-8")
    code = f"""
    sys.path.insert(0, {str(tmp_path)!r})
    import mgpu_runtime
    try:
        load_pack("pack")._bind_runtime()
    except ImportError as error:
        assert {str(other)!r} in str(error) and {str(ROOT)!r} in str(error), error
    else:
        raise AssertionError("the other copy was accepted")
    """
    run_python(LOAD_PACK + _dedent(code))


def test_b137_all_nodes_register_without_the_optional_packages() -> None:
    code = """
    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("diffusers", "transformers", "accelerate", "sentencepiece"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Absent())
    nodes = pack_nodes(load_pack("pack"))
    print(*[node.GET_SCHEMA().node_id for node in nodes])
    """
    assert sorted(run_in_comfy(_dedent(code)).split()) == sorted(NODES)


COMFYUI_MODULES = {"comfy", "comfy_api", "comfy_execution", "folder_paths", "nodes", "server", "execution"}


OTHER_FILES = sorted(path for path in (ROOT / "nodes").glob("*.py") if path.name != "comfy.py")


@pytest.mark.parametrize("path", OTHER_FILES, ids=lambda path: path.name)
def test_one_file_alone_touches_comfyui(path: Path) -> None:
    imported = _imported_modules(path)
    assert not imported & COMFYUI_MODULES, imported & COMFYUI_MODULES


def test_metadata_follows_the_registry_rules() -> None:
    project, comfy = PROJECT["project"], PROJECT["tool"]["comfy"]
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]{0,98}", project["name"])
    assert "comfyui" not in project["name"].lower()
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert project["urls"]["Repository"] and comfy["PublisherId"] and comfy["requires-comfyui"]
    assert (ROOT / project["license"]["file"]).read_text(encoding="utf-8").strip().startswith("Apache License")


def test_changelog_knows_the_version() -> None:
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == PROJECT["project"]["version"]


def test_requirements_are_ranges_and_leave_torch_alone() -> None:
    lines = _requirements("requirements.txt")
    assert not [line for line in lines if re.match(r"torch\b", line)]
    assert not [line for line in lines if "==" in line]


def test_pins_lie_within_the_ranges() -> None:
    requirements = pytest.importorskip("packaging.requirements")
    pins = dict(line.split("==") for line in _requirements("requirements-dev.txt"))
    for line in _requirements("requirements.txt"):
        requirement = requirements.Requirement(line)
        assert requirement.specifier.contains(pins[requirement.name]), line


@pytest.mark.parametrize("script", ["scripts/setup.sh", "scripts/test.sh", "scripts/demo.sh", ".ci/run"])
def test_scripts_parse_and_are_executable(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True, timeout=10)
    assert os.access(ROOT / script, os.X_OK)


def test_setup_is_quick_the_second_time() -> None:
    if not (ROOT / ".venv" / ".setup-state").exists():
        pytest.skip("setup.sh has not run here")
    subprocess.run(["bash", str(ROOT / "scripts" / "setup.sh")], check=True, timeout=10)


def _requirements(name: str) -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _imported_modules(path: Path) -> set[str]:
    """Returns the top-level names that a file imports absolutely."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def _dedent(code: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in code.splitlines())
