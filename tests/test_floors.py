"""The house: imports go one way, the runtime never meets the host, files and functions stay readable."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNTIME = ROOT / "mgpu_runtime"
FLOORS = {
    "fleet": 1,
    "weights": 1,
    "exchange": 1,
    "tiling": 1,
    "models": 2,
    "parallel": 3,
    "sampling": 3,
    "pipeline": 4,
    "bench": 5,
    "cli": 5,
    "__main__": 6,
}
HOST = {"comfy", "comfy_api", "comfy_execution", "folder_paths", "nodes", "server", "execution"}
FILES = sorted(RUNTIME.rglob("*.py")) + sorted((ROOT / "nodes").glob("*.py")) + [ROOT / "__init__.py"]


def _part(path: Path) -> str:
    return path.relative_to(RUNTIME).parts[0].removesuffix(".py")


def _imports(path: Path) -> list[str]:
    """Lists what a file imports as absolute names; relative ones are resolved in the runtime."""
    package = ("mgpu_runtime", *path.relative_to(RUNTIME).parts[:-1]) if RUNTIME in path.parents else ()
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (*package[: len(package) - node.level + 1], *([] if package else ["."])) if node.level else ()
            module = ".".join((*base, node.module) if node.module else base)
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", [p for p in FILES if RUNTIME in p.parents], ids=lambda p: str(p.relative_to(RUNTIME)))
def test_a_lower_floor_never_imports_a_higher_one_nor_the_host(path: Path) -> None:
    own = _part(path)
    for name in _imports(path):
        parts = name.split(".")
        assert parts[0] not in HOST, f"{path} imports the host's {name}"
        if parts[0] != "mgpu_runtime" or len(parts) < 2 or parts[1] not in FLOORS:
            continue
        other = parts[1]
        assert FLOORS[other] <= FLOORS.get(own, 0), f"{path} (floor {FLOORS.get(own, 0)}) imports {name}"
        if FLOORS[other] == FLOORS.get(own) == 1 and other != own:
            pytest.fail(f"{path} imports {name}: packages of floor 1 do not know each other")


def test_only_one_file_of_the_nodes_touches_the_host_s_internals() -> None:
    for path in sorted((ROOT / "nodes").glob("*.py")):
        for name in _imports(path):
            if path.name != "comfy.py":
                assert name.split(".")[0] not in HOST - {"comfy_api"}, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is {node.end_lineno - node.lineno + 1} lines"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None and getattr(node.type, "id", "") not in ("Exception", "BaseException")


def test_the_client_loads_no_model_library() -> None:
    """The server's process imports the client; diffusers and transformers belong into the workers."""
    code = (
        "import sys; import mgpu_runtime.pipeline.client; "
        "print([m for m in ('diffusers', 'transformers', 'accelerate', 'av') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stdout.strip() == "[]", result.stdout + result.stderr
