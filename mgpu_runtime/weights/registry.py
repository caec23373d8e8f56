"""Weights of files as memory-mapped tensors, read once per process."""

import logging
import os
from dataclasses import dataclass, field

from safetensors import safe_open
from torch import Tensor

from .bundle import Checkpoint, Path, Paths, as_paths
from .checkpoint import CheckpointFile
from .header import content_key
from .mapping import map_file

log = logging.getLogger("mgpu")

StateDict = dict[str, Tensor]


@dataclass
class _OpenFile:
    """A file's header and its mapping."""

    checkpoint: CheckpointFile
    mapping: safe_open | None = None


@dataclass
class _OpenBundle:
    """A model's files and the state dicts made of them so far."""

    checkpoint: Checkpoint
    states: dict[str, StateDict] = field(default_factory=dict)


class StateDictRegistry:
    """Gives state dicts of checkpoints, each one file or several; each file is opened and mapped once per process.

    The tensors are views of a private mapping: their pages are the kernel's file cache, shared by all processes that
    map the file. Never write into them in place, that would make private copies and change the registry's own.
    A file is known by path, modification time and size; a changed file is read anew.
    """

    def __init__(self) -> None:
        self.files_read = 0
        self._files: dict[str, _OpenFile] = {}
        self._bundles: dict[tuple[str, ...], _OpenBundle] = {}

    def checkpoint(self, paths: Paths) -> Checkpoint:
        """Reads the headers of one path or several as one model; raises ValueError in one sentence."""
        return self._bundle(paths).checkpoint

    def get(self, paths: Paths, component: str) -> StateDict:
        """Returns {the module's tensor name: mapped CPU tensor as the file holds it} of one component.

        Component names are those of keymaps.COMPONENTS. The dict is the caller's own, the tensors are shared.
        Raises ValueError when no file holds the component.
        """
        bundle = self._bundle(paths)
        if component not in bundle.states:
            names = bundle.checkpoint.component(component)
            bundle.states[component] = {
                target: self._map(bundle.checkpoint.file_of(component, target)).get_tensor(source)
                for target, source in names.items()
            }
        return dict(bundle.states[component])

    def forget(self, path: Path | None = None) -> None:
        """Drops one file or all; mappings end when the last tensor made of them is gone."""
        if path is None:
            self._files.clear()
            self._bundles.clear()
            return
        absolute = os.path.abspath(os.fspath(path))
        self._files.pop(absolute, None)
        self._bundles = {paths: bundle for paths, bundle in self._bundles.items() if absolute not in paths}

    def _bundle(self, paths: Paths) -> _OpenBundle:
        files = tuple(self._open(path).checkpoint for path in as_paths(paths))
        key = tuple(file.path for file in files)
        bundle = self._bundles.get(key)
        if bundle is None or bundle.checkpoint.files != tuple(dict.fromkeys(files)):  # compared by identity
            bundle = self._bundles[key] = _OpenBundle(Checkpoint(files))
        return bundle

    def _open(self, path: Path) -> _OpenFile:
        key = content_key(path)
        file = self._files.get(key[0])
        if file is None or file.checkpoint.content_key != key:
            file = self._files[key[0]] = _OpenFile(CheckpointFile(path))
        return file

    def _map(self, checkpoint: CheckpointFile) -> safe_open:
        file = self._files[checkpoint.path]
        if file.mapping is None:
            file.mapping = map_file(checkpoint.path)
            self.files_read += 1
            log.info("Mapped %s (%.1f GB).", checkpoint.path, checkpoint.content_key[2] / 1e9)
        return file.mapping


ModelRegistry = StateDictRegistry
