"""The nodes: thin wrappers that read inputs, send one job to the fleet and wrap its result.

`comfy.py` alone knows ComfyUI's internals; `wires.py`, `graph.py` and `preflight.py` know no ComfyUI at all.
"""
