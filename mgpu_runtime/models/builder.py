"""What all builders share: a component of a checkpoint file becomes a module."""

import os
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn

from ..weights.checkpoint import CheckpointFile
from ..weights.keymaps import COMPONENTS
from ..weights.registry import StateDictRegistry
from .loading import WeightTracker, check_shapes, fill


class ComponentBuilder(ABC):
    """Builds one component; cheap to make, reads nothing before it is asked."""

    component: ClassVar[str]

    def __init__(
        self,
        checkpoint: str | os.PathLike,
        *,
        registry: StateDictRegistry,
        tracker: WeightTracker | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.registry = registry
        self.tracker = tracker

    def with_sources(
        self, registry: StateDictRegistry | None = None, tracker: WeightTracker | None = None
    ) -> "ComponentBuilder":
        """Returns a builder of the same component that reads through other sources, where they are given."""
        return type(self)(self.checkpoint, registry=registry or self.registry, tracker=tracker or self.tracker)

    @abstractmethod
    def construct(self, file: CheckpointFile) -> nn.Module:
        """Makes the module; called under the meta device, so buffers that no file holds must name a real one."""

    def check(self) -> nn.Module:
        """Returns the empty module after comparing names and shapes with the header; reads no tensor.

        Raises ValueError with one sentence when the file lacks the component or does not fit its own config.
        """
        file = self.registry.checkpoint(self.checkpoint)
        shapes = file.shapes(self.component)
        with torch.device("meta"):
            module = self.construct(file)
        check_shapes(module, shapes, self._what(file))
        return module

    def build(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """Returns the filled module on `device` in `dtype`, frozen, in evaluation mode."""
        module = self.check()
        file = self.registry.checkpoint(self.checkpoint)
        state = self.registry.get(self.checkpoint, self.component)
        fill(module, state, device=torch.device(device), dtype=dtype, what=self._what(file))
        if self.tracker is not None:
            self.tracker.track(module, self.component, file.path)
        return module

    def _what(self, file: CheckpointFile) -> str:
        return f"{COMPONENTS[self.component]} in {file.path}"
