"""LTX MGPU, a ComfyUI pack: LTX-2 video and sound made by all GPUs of a machine at once.

ComfyUI imports this folder under a name made of its path and then calls `comfy_entrypoint`. Until that call nothing
but definitions happens here, so the folder can be imported without a server, and more than once.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_RUNTIME = Path(__file__).resolve().parent / "mgpu_runtime"


def _bind_runtime() -> None:
    """Makes `mgpu_runtime` importable under that one name, without an entry on sys.path that could shadow others.

    Raises ImportError if a package of that name from another folder is loaded already.
    """
    loaded = sys.modules.get("mgpu_runtime")
    if loaded is None:
        spec = importlib.util.spec_from_file_location(
            "mgpu_runtime", _RUNTIME / "__init__.py", submodule_search_locations=[str(_RUNTIME)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["mgpu_runtime"] = module
        spec.loader.exec_module(module)
        return
    found = Path(loaded.__file__ or next(iter(loaded.__path__))).resolve()
    if _RUNTIME not in (found, found.parent):
        raise ImportError(
            f"mgpu_runtime is loaded from {found}, but this copy of LTX MGPU brings {_RUNTIME}. "
            "Keep one copy of the pack in custom_nodes and restart ComfyUI."
        )


async def comfy_entrypoint() -> object:
    """Gives ComfyUI the pack's nodes."""
    _bind_runtime()
    from .nodes.extension import LTXMGPUExtension

    return LTXMGPUExtension()
