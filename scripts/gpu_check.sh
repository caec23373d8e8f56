#!/usr/bin/env bash
# Checks the exchange on this machine's NVIDIA GPUs, then the pipeline against stored CPU results of the toy model;
# under 8 minutes. `python scripts/gpu_exchange.py` checks the exchange alone.
# Uses the Python that has torch with CUDA and requirements.txt: PYTHON=/path/to/python chooses it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec timeout 480 "${PYTHON:-python3}" scripts/gpu_check.py
