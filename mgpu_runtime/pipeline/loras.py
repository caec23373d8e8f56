"""Which LoRAs a component of one rank is fused with, and how all ranks change them together."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from ..fleet import RankInfo, RunnerError
from ..models.lora import Deltas, LoRAFuser, read_deltas
from ..weights.bundle import Paths
from ..weights.header import content_key
from ..weights.lora import LoRAFile
from ..weights.lora_targets import LoRAMatch, lora_targets, match_lora
from ..weights.registry import StateDictRegistry
from .first_rank import on_every_rank
from .jobs import LoRASpec

Say = Callable[[str], None]

_NO_LORAS = ""  # the name of the empty set


class LoRASwitch:
    """Changes the LoRAs of one component on all ranks, or on none.

    A set is known by path, time and size of each file and by the strengths, in order. One that fails on any rank fails
    on all alike; whatever it left behind is put right before the component is used again.
    """

    def __init__(self, component: str, info: RankInfo, registry: StateDictRegistry, checkpoint: Paths) -> None:
        self._component = component
        self._info = info
        self._registry = registry
        self._checkpoint = checkpoint
        self._current: str | None = _NO_LORAS  # None where a change did not come to its end
        self._fuser: LoRAFuser | None = None
        self._was_used = False

    def use(self, specs: Sequence[LoRASpec], build: Callable[[], nn.Module], say: Say) -> None:
        """Fuses the component with these LoRAs, and no others, before it is used; collective.

        `build` gives the component and may load it first. A LoRA of strength 0 counts as absent. `say` is told once per
        change what was applied and what was not. Raises RunnerError on every rank alike, and then nothing is applied.
        """
        specs = [spec for spec in specs if spec.strength]
        if not specs and not self._was_used:
            return  # every rank has run the same jobs, so all of them leave here
        self._was_used = True
        plans: list[_Plan] = []

        def prepare() -> str:
            name = set_name(specs)
            if name != self._current:
                plans.append(self._prepare(name, specs, build()))
            return name

        if len(set(on_every_rank(self._info, prepare))) > 1:
            raise RunnerError("A LoRA file changed while the workers looked at it: run the job again.")
        on_every_rank(self._info, lambda: [self._apply(plan) for plan in plans])
        for line in (line for plan in plans for line in plan.lines):
            say(line)

    def _prepare(self, name: str, specs: Sequence[LoRASpec], module: nn.Module) -> "_Plan":
        """Reads and checks everything a set needs; changes nothing."""
        if self._fuser is None:
            self._fuser = LoRAFuser(module)
        targets = lora_targets(self._registry.checkpoint(self._checkpoint))
        matches = [(match_lora(LoRAFile(spec.path), targets), spec.strength) for spec in specs]
        deltas = read_deltas(matches, self._component)
        if set_name(specs) != name:
            raise ValueError("A LoRA file changed while it was read: run the job again.")
        lines = tuple(line for match, strength in matches for line in _lines(match, strength, self._component))
        return _Plan(name, deltas, lines)

    def _apply(self, plan: "_Plan") -> None:
        self._current = None
        self._fuser.fuse(plan.deltas)
        self._current = plan.name


@dataclass(frozen=True)
class _Plan:
    """A set that was read and found right: its name, its changes, what to say when it is applied."""

    name: str
    deltas: Deltas
    lines: tuple[str, ...]


def set_name(specs: Sequence[LoRASpec]) -> str:
    """Names a set by what it applies; the same on all ranks that see the same files."""
    if not specs:
        return _NO_LORAS
    stamps = [(*content_key(spec.path), spec.strength) for spec in specs]
    return hashlib.sha256(repr(stamps).encode("utf-8", "surrogateescape")).hexdigest()


def _lines(match: LoRAMatch, strength: float, component: str) -> list[str]:
    """Says what a LoRA does to a component, and which parts of its file stay unused there."""
    file, used = match.file, len(match.pairs.get(component, ()))
    ranks = " to ".join(str(rank) for rank in dict.fromkeys((file.ranks[0], file.ranks[-1])))
    lines = [f"LoRA {file.name}: {used} of {len(file.pairs)} modules, rank {ranks}, strength {strength:g}"]
    warning = match.report.warning
    if warning is not None:
        lines.append(warning)
    num_connectors = len(match.pairs.get("connectors", ()))
    if component == "transformer" and num_connectors:
        lines.append(f"LoRA {file.name}: {num_connectors} more for the text connectors, if Encode Prompt gets it too")
    return lines
