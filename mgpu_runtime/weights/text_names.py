"""Names of a text encoder's tensors, whatever wrapper a file was saved with. Pure functions of names and headers."""

from collections.abc import Iterable
from dataclasses import dataclass

from .header import TensorEntry

# What may stand before the text tower's own names, longest first: multimodal models old and new, flat files.
_PREFIXES = ("model.language_model.model.", "language_model.model.", "model.language_model.", "language_model.")
_ROOTS = {
    "embed_tokens",
    "embed_tokens_per_layer",
    "layers",
    "norm",
    "per_layer_model_projection",
    "per_layer_projection_norm",
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: the file, its name there, and what the header says of it."""

    path: str
    name: str
    entry: TensorEntry


def tower_name(name: str) -> str | None:
    """Returns a tensor's name in the text tower alone; None for towers of other senses, heads and projections."""
    for prefix in (*_PREFIXES, "model.", ""):
        if name.startswith(prefix) and name[len(prefix) :].split(".", 1)[0] in _ROOTS:
            return name[len(prefix) :]
    return None


def tower_tensors(tensors: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the text tower's tensors by their names in it; raises ValueError when a file has one of them twice."""
    found: dict[str, StoredTensor] = {}
    for tensor in tensors:
        name = tower_name(tensor.name)
        if name is None:
            continue
        if name in found:
            raise ValueError(
                f"{tensor.path} has one tensor twice: {found[name].name!r} and {tensor.name!r} both stand for "
                f"{name!r}. Export the text encoder again with one of them."
            )
        found[name] = tensor
    return found


def count_layers(names: Iterable[str]) -> int:
    """Counts the layers that the tower's names speak of."""
    return len({name.split(".")[1] for name in names if name.startswith("layers.")})
