"""What all builders share: a component of a checkpoint file becomes a module."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..weights.bundle import Checkpoint, Paths
from ..weights.keymaps import COMPONENTS
from ..weights.quantized import Quantization, read_quantization
from ..weights.registry import StateDictRegistry
from .loading import WeightTracker, check_shapes, fill


class ComponentBuilder(ABC):
    """Builds one component; cheap to make, reads nothing before it is asked."""

    component: ClassVar[str]

    def __init__(
        self,
        checkpoint: Paths,
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
    def construct(self, file: Checkpoint) -> nn.Module:
        """Makes the module; called under the meta device, so buffers that no file holds must name a real one."""

    def arrange(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Turns a file's tensors, already under the module's names, into the module's where they are not one to one.

        Also called with meta tensors, to learn the shapes. Must leave what it does not know, for the check to find.
        """
        return state

    def is_rounded(self, name: str) -> bool:
        """Tells whether a tensor is to be rounded to fp8 where the file holds it wider."""
        return False

    def check(self) -> nn.Module:
        """Returns the empty module after comparing names and shapes with the header; reads no tensor.

        Raises ValueError with one sentence when the file lacks the component or does not fit its own config.
        """
        file = self.registry.checkpoint(self.checkpoint)
        quantized = read_quantization(file, self.component)
        held = {name: torch.empty(shape, device="meta") for name, shape in file.shapes(self.component).items()}
        with torch.device("meta"):
            module = self.construct(file)
        arranged = self.arrange(held)
        if quantized and arranged is not held:
            raise ValueError(
                f"The {self._what(file)} is quantised, which is not run for this kind. Choose the bf16 file."
            )
        shapes = {name: tuple(tensor.shape) for name, tensor in arranged.items()}
        check_shapes(module, shapes, self._what(file), quantized)
        if quantized:
            _warn_of_turned(file, module, quantized)
        return module

    def build(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """Returns the filled module, computing in `dtype` on `device`, frozen, in evaluation mode.

        Quantised weights stay quantised in memory. Raises ValueError as check does, and where a number is not finite.
        """
        module = self.check()
        file = self.registry.checkpoint(self.checkpoint)
        state = self.arrange(self.registry.get(self.checkpoint, self.component))
        fill(
            module,
            state,
            device=torch.device(device),
            dtype=dtype,
            what=self._what(file),
            quantized=read_quantization(file, self.component),
            is_rounded=self.is_rounded,
        )
        if self.tracker is not None:
            self.tracker.track(module, self.component, file.where(self.component))
        return module

    def _what(self, file: Checkpoint) -> str:
        return f"{COMPONENTS[self.component]} in {file.where(self.component)}"


def _warn_of_turned(file: Checkpoint, module: nn.Module, quantized: Mapping[str, Quantization]) -> None:
    """Says where matrices are stored the other way round, because of square ones that cannot tell."""
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    turned = [name for name, quantization in quantized.items() if quantization.is_transposed(expected[name])]
    if turned:
        file.warn(
            f"{len(turned)} fp8 weights such as {turned[0]!r} are stored as (in, out) and are turned; square ones are "
            "taken as (out, in), as in the published files."
        )
