"""Runs the LTX-2 family on all GPUs of a machine; usable as a plain library, without ComfyUI."""

__version__ = "0.1.0"
