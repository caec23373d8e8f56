"""Maps safetensors files into memory: their tensors as views, whose pages are the kernel's and not this process's."""

import os
from collections.abc import Iterable

from safetensors import SafetensorError, safe_open
from torch import Tensor


def map_file(path: str | os.PathLike) -> safe_open:
    """Opens a file, whose get_tensor then gives views; raises ValueError with one sentence where that fails."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be mapped: {error}. Download or copy it again.") from error


def read_tensors(path: str | os.PathLike, names: Iterable[str]) -> dict[str, Tensor]:
    """Returns some tensors of a file as mapped views, in the file's dtype on the CPU; raises ValueError as map_file."""
    with map_file(path) as file:
        return {name: file.get_tensor(name) for name in names}
