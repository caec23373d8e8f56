#!/usr/bin/env bash
# Makes a short clip with sound on this machine's CPU, through a real ComfyUI server with this pack and two workers.
# The last line of the output is the path of the clip.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
.venv/bin/python scripts/demo.py &
demo=$!
trap 'kill -TERM "$demo" 2>/dev/null && wait "$demo" || true' EXIT INT TERM
wait "$demo"
