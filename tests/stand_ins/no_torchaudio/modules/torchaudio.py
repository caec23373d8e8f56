"""Stands in for torchaudio, which does not exist for the torch of the test host.

ComfyUI's audio nodes import it at once and use it only to resample; Load Audio reads files with PyAV.
"""
