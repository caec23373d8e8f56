"""Which module of a model each pair of a LoRA file changes, from headers alone."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from .bundle import Checkpoint, Path, Paths, as_paths, read_checkpoint
from .header import ContentKey, content_key, first_names
from .keymaps import COMPONENTS
from .lora import LoRAFile, LoRAPair
from .lora_names import bare_module, flat_readings, flatten
from .quantized import Quantization, read_quantization

log = logging.getLogger("mgpu")

COMPONENTS_WITH_LORA = ("transformer", "connectors")

_WEIGHT = ".weight"


@dataclass(frozen=True)
class LoRATarget:
    """A module of the model: component, name in the component's module tree, how the file holds its weight."""

    component: str
    module: str
    shape: tuple[int, ...]
    quantization: Quantization | None = None

    def takes(self, shape: tuple[int, int]) -> bool:
        """Tells whether the weight, once undone what quantising did to its shape, is (out, in) as asked."""
        return shape == (self.shape if self.quantization is None else self.quantization.shape_for(shape))


class LoRATargets:
    """The modules of a checkpoint with every name that a LoRA may call them by."""

    def __init__(self, targets: Iterable[tuple[LoRATarget, str]], path: str) -> None:
        """Takes each module beside its name in the file; `path` names the checkpoint in sentences."""
        self.path = path
        self._by_name: dict[str, LoRATarget] = {}
        self._by_flat_name: dict[str, set[LoRATarget]] = {}
        for target, source in targets:
            for name in (bare_module(source), target.module):
                self._by_name[name] = target
                self._by_flat_name.setdefault(flatten(name), set()).add(target)

    def find(self, name: str) -> LoRATarget | None:
        """Returns the module that a LoRA calls `name`, without prefix; None where the model has none.

        Takes the checkpoint's names, diffusers' names, and both with underscores for dots. Raises ValueError where such
        a flattened name may mean more than one module.
        """
        if name in self._by_name or "." in name:
            return self._by_name.get(name)
        found = {target for reading in flat_readings(name) for target in self._by_flat_name.get(reading, ())}
        if len(found) > 1:
            modules = " and ".join(sorted(target.module for target in found))
            raise ValueError(
                f"The LoRA's module {name!r} may mean {modules} of {self.path}: its dots were lost. Export the LoRA "
                "with dotted names."
            )
        return next(iter(found), None)


@dataclass(frozen=True)
class LoRAReport:
    """What a LoRA file does to a model.

    Attributes:
        path: the file, absolute.
        matched: number of its modules that the model has.
        unmatched: its modules and single tensors that the model does not have.
        total: number of its modules.
        ranks: the different ranks, ascending.
        alphas: the different alphas, ascending; empty where the file has none, and the scale is 1.
        connectors: how many of the matched modules are in the text connectors, which only prompts go through.
    """

    path: str
    matched: int
    unmatched: tuple[str, ...]
    total: int
    ranks: tuple[int, ...]
    alphas: tuple[float, ...]
    connectors: int = 0

    @property
    def warning(self) -> str | None:
        """One sentence about what matches nothing; None where everything does."""
        if not self.unmatched:
            return None
        return (
            f"{self.path}: {len(self.unmatched)} entries match nothing in this model and are not used, such as "
            f"{first_names(map(repr, self.unmatched))}"
        )


@dataclass(frozen=True)
class LoRAMatch:
    """A LoRA file beside the modules it changes: component -> {module: pair}."""

    file: LoRAFile
    pairs: Mapping[str, Mapping[str, LoRAPair]]
    unmatched: tuple[str, ...]

    @property
    def report(self) -> LoRAReport:
        """What the match means, in numbers."""
        file = self.file
        return LoRAReport(
            path=file.path,
            matched=sum(map(len, self.pairs.values())),
            unmatched=self.unmatched,
            total=len(file.pairs),
            ranks=file.ranks,
            alphas=tuple(sorted(set(file.alphas.values()))),
            connectors=len(self.pairs.get("connectors", ())),
        )


def match_lora(file: LoRAFile, targets: LoRATargets) -> LoRAMatch:
    """Finds the module of each pair.

    Raises ValueError with one sentence where no pair finds one, where a pair has another shape than its module's
    weight, and where two pairs mean one module.
    """
    found: dict[LoRATarget, LoRAPair] = {}
    unmatched = []
    for name, pair in file.pairs.items():
        target = targets.find(name)
        if target is None:
            unmatched.append(name)
        elif target in found:
            raise ValueError(
                f"{file.path} has module {target.module!r} twice: {found[target].down!r} and {pair.down!r}. Export it "
                "again with one of them."
            )
        else:
            found[target] = pair
    if not found:
        raise ValueError(
            f"{file.path} is a LoRA for another model: none of its {len(file.pairs)} modules (such as "
            f"{next(iter(file.pairs))!r}) is in {targets.path}. Choose a LoRA made for LTX-2."
        )
    _check_shapes(file, found, targets.path)
    pairs: dict[str, dict[str, LoRAPair]] = {}
    for target, pair in found.items():
        pairs.setdefault(target.component, {})[target.module] = pair
    return LoRAMatch(file, MappingProxyType(pairs), (*unmatched, *file.leftover))


def lora_targets(checkpoint: Checkpoint) -> LoRATargets:
    """Lists the modules of a checkpoint's transformer and text connectors."""
    listed = []
    for component in COMPONENTS_WITH_LORA:
        if component not in checkpoint.components:
            continue
        shapes, quantized = checkpoint.shapes(component), read_quantization(checkpoint, component)
        for name, source in checkpoint.component(component).items():
            if name.endswith(_WEIGHT):
                target = LoRATarget(component, name.removesuffix(_WEIGHT), shapes[name], quantized.get(name))
                listed.append((target, source.removesuffix(_WEIGHT)))
    return LoRATargets(listed, checkpoint.path)


def _check_shapes(file: LoRAFile, found: Mapping[LoRATarget, LoRAPair], path: str) -> None:
    wrong = [(target, pair) for target, pair in found.items() if not target.takes(pair.shape)]
    if wrong:
        target, pair = wrong[0]
        shape = list(target.quantization.shape if target.quantization else target.shape)
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ValueError(
            f"{file.path} is a LoRA for another model: it changes module {target.module!r} of the "
            f"{COMPONENTS[target.component]} by a {list(pair.shape)} matrix, but {path} has {shape} there{more}. "
            "Choose a LoRA made for this model."
        )


def check_lora(path: Path, checkpoint: Paths) -> LoRAReport:
    """Returns what a LoRA does to a model, from headers alone; unchanged files are read once per process.

    Warns in the log of what matches nothing, once. Raises ValueError with one sentence for a broken file and for a LoRA
    that this model cannot take.
    """
    return _report(content_key(path), tuple(content_key(part) for part in as_paths(checkpoint)))


@lru_cache(maxsize=64)
def _report(lora: ContentKey, checkpoint: tuple[ContentKey, ...]) -> LoRAReport:
    report = match_lora(LoRAFile(lora[0]), _targets(checkpoint)).report
    if report.warning is not None:
        log.warning(report.warning)
    return report


@lru_cache(maxsize=2)
def _targets(checkpoint: tuple[ContentKey, ...]) -> LoRATargets:
    return lora_targets(read_checkpoint([path for path, _, _ in checkpoint]))
