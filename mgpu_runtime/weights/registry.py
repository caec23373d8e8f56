"""Weights of files as memory-mapped tensors, read once per process."""

import logging
import os
from dataclasses import dataclass, field

from safetensors import SafetensorError, safe_open
from torch import Tensor

from .checkpoint import CheckpointFile
from .header import content_key

log = logging.getLogger("mgpu")

StateDict = dict[str, Tensor]


@dataclass
class _OpenFile:
    """A file's header, its mapping and the state dicts made of it so far."""

    checkpoint: CheckpointFile
    mapping: safe_open | None = None
    states: dict[str, StateDict] = field(default_factory=dict)


class StateDictRegistry:
    """Gives state dicts of checkpoint files; each file is opened and mapped once per process.

    The tensors are views of a private mapping: their pages are the kernel's file cache, shared by all processes that
    map the file. Never write into them in place, that would make private copies and change the registry's own.
    A file is known by path, modification time and size; a changed file is read anew.
    """

    def __init__(self) -> None:
        self.files_read = 0
        self._files: dict[str, _OpenFile] = {}

    def checkpoint(self, path: str | os.PathLike) -> CheckpointFile:
        """Returns the file's header, read once; raises ValueError in one sentence when the file is broken."""
        return self._open(path).checkpoint

    def get(self, path: str | os.PathLike, component: str) -> StateDict:
        """Returns {the module's tensor name: mapped CPU tensor in the file's dtype} of one component of a file.

        Component names are those of keymaps.COMPONENTS. The dict is the caller's own, the tensors are shared.
        Raises ValueError when the file lacks the component.
        """
        file = self._open(path)
        if component not in file.states:
            names = file.checkpoint.component(component)
            mapping = self._map(file)
            file.states[component] = {target: mapping.get_tensor(source) for target, source in names.items()}
        return dict(file.states[component])

    def forget(self, path: str | os.PathLike | None = None) -> None:
        """Drops one file or all; mappings end when the last tensor made of them is gone."""
        if path is None:
            self._files.clear()
        else:
            self._files.pop(os.path.abspath(os.fspath(path)), None)

    def _open(self, path: str | os.PathLike) -> _OpenFile:
        key = content_key(path)
        file = self._files.get(key[0])
        if file is None or file.checkpoint.content_key != key:
            file = self._files[key[0]] = _OpenFile(CheckpointFile(path))
        return file

    def _map(self, file: _OpenFile) -> safe_open:
        if file.mapping is None:
            path = file.checkpoint.path
            try:
                file.mapping = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} cannot be mapped: {error}. Download or copy it again.") from error
            self.files_read += 1
            log.info("Mapped %s (%.1f GB).", path, file.checkpoint.content_key[2] / 1e9)
        return file.mapping


ModelRegistry = StateDictRegistry
