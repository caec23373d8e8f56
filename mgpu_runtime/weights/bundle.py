"""Several checkpoint files read as one model: the whole model in one file is a bundle of one."""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from .checkpoint import CheckpointFile
from .header import TensorEntry
from .inferred import READERS
from .keymaps import COMPONENTS, SLOTS, part_of

Path = str | os.PathLike
Paths = Path | Sequence[Path]


def as_paths(paths: Paths) -> tuple[Path, ...]:
    """Returns one path or several as a tuple."""
    return (paths,) if isinstance(paths, str | os.PathLike) else tuple(paths)


def read_checkpoint(paths: Paths) -> "Checkpoint":
    """Reads the headers of one file or several as one model; raises ValueError in one sentence where one is broken."""
    return Checkpoint([CheckpointFile(path) for path in as_paths(paths)])


class Checkpoint:
    """One model out of one or several files, with the reading interface of a CheckpointFile.

    The first file is the checkpoint that was chosen; the transformer comes from the first file that holds one. Any
    other part that several files hold comes from the file with the fewest parts, among equals from the last named:
    a file for the video autoencoder alone beats the whole model. The text projection inside a text encoder's file is
    used where no other file has one. Raises ValueError where that leaves open which of two whole models is meant.
    """

    def __init__(self, files: Sequence[CheckpointFile]) -> None:
        assert files, "a checkpoint needs a file"
        self.files = tuple(dict.fromkeys(files))
        self._inferred: dict[str, str] = {}
        self._failures: dict[str, str] = {}

    @property
    def path(self) -> str:
        """The file of the transformer, or the first where there is none; names the model in sentences."""
        return self.supplier("transformer").path

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata of the transformer's file."""
        return self.supplier("transformer").metadata

    @property
    def model_version(self) -> str | None:
        """The metadata key `model_version` of the transformer's file, such as "2.3.0"; None when absent."""
        return self.supplier("transformer").model_version

    @property
    def config(self) -> dict[str, Any]:
        """The architecture: each section as the file of its component tells it, else as its tensors' shapes tell it.

        Sections that are null, or that the shapes do not tell, are left out: config_section says why. An upsampler's
        fields are at the top. Raises ValueError when nothing tells anything.
        """
        return self._told or self.files[0].config  # which says that there is none

    @property
    def inferred(self) -> Mapping[str, str]:
        """Component -> the version it is taken to be of, for those whose config the shapes of their tensors told."""
        return MappingProxyType(self._inferred if self._told is not None else {})

    @cached_property
    def components(self) -> Mapping[str, Mapping[str, str]]:
        """Component name -> {model's tensor name: the tensor name in file_of it}, for what the files hold."""
        return MappingProxyType({name: MappingProxyType(targets) for name, targets in self._names.items()})

    @cached_property
    def unclaimed(self) -> tuple[str, ...]:
        """Tensors of all files that belong to no component this program reads."""
        return tuple(name for file in self.files for name in file.unclaimed)

    def component(self, name: str) -> Mapping[str, str]:
        """Returns {model's tensor name: the tensor name in file_of it}; raises ValueError when no file has it."""
        assert name in COMPONENTS, f"unknown component {name!r}"
        names = self.components.get(name)
        if len(self.files) == 1 or (name == "transformer" and names is not None):
            names = self.supplier(name).component(name)
        if names is None:
            self.files[0].refuse_foreign()
            raise ValueError(
                f"None of the chosen files holds a {COMPONENTS[name]}. {_contents(self.files)} Choose a file with it "
                f"as {SLOTS[name]} in Load LTX MGPU."
            )
        return names

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor of a component, by the model's tensor names."""
        self.component(name)
        return self._shapes(name)

    def entry(self, component: str, target: str) -> TensorEntry:
        """Returns dtype, shape and place of a tensor, by the model's tensor name."""
        return self.file_of(component, target).keys[self.components[component][target]]

    def file_of(self, component: str, target: str) -> CheckpointFile:
        """Returns the file that a tensor is taken from."""
        return self._origins[part_of(component, target)]

    def supplier(self, component: str) -> CheckpointFile:
        """Returns the file a component is taken from; the first file where none holds it."""
        return self._origins.get(component, self.files[0])

    def where(self, component: str) -> str:
        """Names the files of a component, for sentences."""
        targets = self.components.get(component, ())
        paths = dict.fromkeys(self.file_of(component, target).path for target in targets)
        return " and ".join(paths or (self.path,))

    def config_section(self, name: str) -> dict[str, Any]:
        """Returns one section of the config; raises ValueError when there is none."""
        section = self._told.get(name)
        if isinstance(section, dict):
            return section
        component, _ = READERS.get(name, ("transformer", None))
        if component in self._failures:
            raise ValueError(self._failures[component])
        path = self.supplier(component).path
        raise ValueError(f"{path} has no {name!r} section in its config. {_contents(self.files)}")

    @property
    def unused(self) -> tuple[CheckpointFile, ...]:
        """The files beside the first that nothing is taken from; text encoders are exempt."""
        used = self._origins.values()
        return tuple(file for file in self.files[1:] if file not in used and not file.is_text_encoder)

    def check_files(self) -> None:
        """Raises ValueError for a file that was chosen for a part and is used for none; text encoders are exempt."""
        for file in self.unused:
            raise ValueError(
                f"{file.path} was chosen beside {self.files[0].path}, but nothing of it is used: it is or has "
                f"{file.contents}. Choose a file with a part of LTX-2 there, or none."
            )

    def warn(self, message: str) -> None:
        """Logs a warning about this model, each only once however often the files are looked at."""
        self.supplier("transformer").warn(message)

    @cached_property
    def _told(self) -> dict[str, Any]:
        """What metadata and shapes tell of the architecture."""
        found: dict[str, Any] = {}
        for file in self.files:
            if "config" in file.metadata and not file.is_text_encoder:  # whose config is another thing
                for name, value in file.config.items():
                    if value is not None:
                        found.setdefault(name, value)
        for name, (component, _) in READERS.items():
            if component in self.components and component != "upsampler":
                found.pop(name, None)
                own = self._own_section(name, component)
                found |= {} if own is None else {name: own}
        if "upsampler" in self.components and "config" not in self.supplier("upsampler").metadata:
            found |= self._infer("upsampler")
        self._tell_inferred()
        return found

    def _own_section(self, name: str, component: str) -> dict[str, Any] | None:
        """Returns a section for a component that a file holds; None where neither metadata nor shapes tell it."""
        file = self.supplier(component)
        section = file.config.get(name) if "config" in file.metadata else None
        if isinstance(section, dict):
            return section
        try:
            return self._infer(component)
        except ValueError as error:
            self._failures[component] = str(error)
            return None

    def _infer(self, component: str) -> dict[str, Any]:
        """Returns what the shapes tell of a component's config; raises ValueError when no published file has them."""
        file = self.supplier(component)
        _, reader = next(entry for entry in READERS.values() if entry[0] == component)
        shapes = {name: self._shapes(name) for name in self.components}
        try:
            section, version = reader(shapes)
        except ValueError as error:
            raise ValueError(
                f'{file.path} has no "config" entry for its {COMPONENTS[component]} in its metadata, and its tensors '
                f"are those of no published LTX-2 model: {error}. Files split out of a checkpoint by other tools often "
                "lose the entry: choose Lightricks' original file."
            ) from None
        self._inferred[component] = version
        return section

    def _tell_inferred(self) -> None:
        """Logs one line for each file whose config was not in its metadata."""
        for file in self.files:
            own = [name for name in self._inferred if self.supplier(name) is file]
            if own:
                said = ", ".join(f"{COMPONENTS[name]} (as LTX-{self._inferred[name]}'s)" for name in own)
                file.warn(f'no "config" in its metadata, so it is told from the shapes of its tensors: {said}.')

    def _shapes(self, component: str) -> dict[str, tuple[int, ...]]:
        names = self.components[component]
        return {target: self.file_of(component, target).keys[source].shape for target, source in names.items()}

    @cached_property
    def _origins(self) -> dict[str, CheckpointFile]:
        """Part -> the file it is taken from."""
        parts = [_parts(file) for file in self.files]
        found: dict[str, CheckpointFile] = {}
        for part in dict.fromkeys(part for names in parts for part in names):
            holders = [(file, names) for file, names in zip(self.files, parts, strict=True) if part in names]
            found[part] = holders[0][0] if part == "transformer" else _most_specific(part, holders)
        return found

    @cached_property
    def _names(self) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {}
        for file in self.files:
            for component, names in file.components.items():
                for target, source in names.items():
                    if self._origins[part_of(component, target)] is file:
                        found.setdefault(component, {})[target] = source
        return found


def _parts(file: CheckpointFile) -> set[str]:
    return {part_of(component, target) for component, names in file.components.items() for target in names}


def _most_specific(part: str, holders: Iterable[tuple[CheckpointFile, set[str]]]) -> CheckpointFile:
    """Chooses the file that was most clearly meant for a part."""
    rank = [(file.is_text_encoder, len(names)) for file, names in holders]
    best = [(file, names) for file, names in holders if (file.is_text_encoder, len(names)) == min(rank)]
    whole = [file.path for file, names in best if "transformer" in names]
    if len(whole) > 1:
        raise ValueError(
            f"{whole[0]} and {whole[1]} are two whole models, and both hold the {COMPONENTS.get(part, part)}. Choose "
            "one of them as the checkpoint, and beside it only files that hold single parts."
        )
    return best[-1][0]


def _contents(files: Sequence[CheckpointFile]) -> str:
    """Says what each file holds."""
    return " ".join(f"{file.path}: {file.contents}." for file in files)
