"""Runs the checks of modules that need ComfyUI's: `python checks_in_comfy.py COMFYUI_FOLDER MODULE...`.

Is a program of its own because ComfyUI's top-level modules (`nodes`, `utils`) must not enter pytest's process. Prints
a JSON object: module -> name of the check -> null, or the traceback.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
import types

_FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def run_checks(module: types.ModuleType) -> dict[str, str | None]:
    """Runs the checks of a module and gives how each ended."""
    from comfy.model_management import InterruptProcessingException

    results: dict[str, str | None] = {}
    for name, check in list(vars(module).items()):
        if name.startswith("check_"):
            try:
                check()
                results[name] = None
            except (*_FAILURES, InterruptProcessingException):
                results[name] = traceback.format_exc()
    return results


def main() -> None:
    _, comfy_folder, *modules = sys.argv
    sys.path.insert(0, comfy_folder)
    sys.argv = ["main.py", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    # Each is imported when its turn comes: it may change what the checks of those before it find.
    print(json.dumps({name: run_checks(importlib.import_module(name)) for name in modules}))


if __name__ == "__main__":
    main()
