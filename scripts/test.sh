#!/usr/bin/env bash
# Runs the linter and all tests but the slow ones; arguments go to pytest (-m slow runs those).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
.venv/bin/ruff check .
exec .venv/bin/python -m pytest -q -m "not slow" "$@"
