"""What a file is, for people: family, version, parts, precision, sizes, and what it needs beside it.

Works on any safetensors file and on text encoder folders, from headers alone.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from .bundle import Checkpoint, Path
from .checkpoint import CheckpointFile
from .configs import has_text_projection, text_projection_input, transformer_values
from .facts import describe_checkpoint, distilled_hint, model_version
from .header import content_keys, first_names
from .keymaps import COMPONENTS, SLOTS, part_title
from .lora import LoRAFile
from .lora_names import is_of_ltx_2
from .lora_targets import lora_targets, match_lora
from .quantized import FLOATS, count_parameters, describe_precision, read_quantization
from .text_pairing import PUBLISHED_TEXT_SIZE, expected_gemma_version, needed_family
from .text_source import TextEncoderFacts, describe_text_encoder

GIB = 1 << 30
MIB = 1 << 20
PARTS_FAMILY = "LTX-2 (parts)"

# What making a clip with sound takes, in the order a person chooses files.
_NEEDED = ("transformer", "connectors", "video_vae", "audio_vae", "vocoder")


@dataclass(frozen=True)
class PartReport:
    """One component: how it is called, its parameters, its bytes in the files, how it is stored, and its kind."""

    title: str
    parameters: int
    num_bytes: int
    precision: str
    kind: Literal["model", "text encoder", "LoRA"] = "model"


@dataclass(frozen=True)
class FileReport:
    """What a file is, or several that make one model.

    Attributes:
        paths: the files, absolute.
        num_bytes: of all of them on the disk.
        family: such as "LTX-2.3", "LTX-2 (parts)", "LoRA", "Gemma 4 text encoder", "latent upsampler", "unknown".
        version: "2.3.0", as the metadata or else the shapes say; None where neither does.
        layout: "one file", "split" for a transformer alone, "split, 3 files"; None for what is no LTX-2 model.
        precision: of the largest part.
        is_distilled: True or False where name or metadata say so.
        config_source: "metadata", "inferred", or None where the architecture is not told.
        parts: the components in the files, largest first.
        needs: what must be chosen beside it, a phrase each.
        notes: what is odd or cannot be used, a sentence each.
    """

    paths: tuple[str, ...]
    num_bytes: int
    family: str
    version: str | None = None
    layout: str | None = None
    precision: str | None = None
    is_distilled: bool | None = None
    config_source: str | None = None
    parts: tuple[PartReport, ...] = ()
    needs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of parameters of all parts."""
        return sum(part.parameters for part in self.parts)

    def lines(self) -> list[str]:
        """Returns the report as lines of text."""
        kind = {True: ", distilled", False: ", not distilled", None: ""}[self.is_distilled]
        rows = [
            ("file", ", ".join(self.paths)),
            ("family", f"{self.family}{kind}"),
            ("version", self.version),
            ("layout", self.layout),
            ("config", {"inferred": "inferred from the shapes"}.get(self.config_source or "", self.config_source)),
            ("precision", self.precision),
            ("size", f"{say_size(self.num_bytes)}, {_count(self.parameters)} parameters"),
            *(("part", _part_line(part)) for part in self.parts),
            *(("needs", need) for need in self.needs),
            *(("note", note) for note in self.notes),
        ]
        return [f"{title:<9}  {text}" for title, text in rows if text is not None]


def inspect(*paths: Path) -> FileReport:
    """Reads headers and returns what the files are; raises ValueError in one sentence where one is broken.

    Several are read as what one Load LTX MGPU would be given, in any order: model, text encoder, upsampler, LoRAs.
    """
    absolute = tuple(dict.fromkeys(os.path.abspath(os.fspath(path)) for path in paths))
    given = _Given(absolute)
    if given.models:
        return _together(given)
    alone = [_alone(path, given.files.get(path)) for path in absolute]
    if len(alone) == 1:
        return alone[0]
    return replace(
        _bare(absolute, ", ".join(dict.fromkeys(report.family for report in alone))),
        parts=tuple(part for report in alone for part in report.parts),
        needs=tuple(dict.fromkeys(need for report in alone for need in report.needs)),
        notes=tuple(f"{report.paths[0]}: {note}" for report in alone for note in report.notes),
    )


class _Given:
    """Sorts what was given by what it is; `files` are those that are no folders, by path."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        self.paths = paths
        self.files = {path: CheckpointFile(path) for path in paths if not os.path.isdir(path)}
        files = self.files.values()
        models = [file for file in files if file.kind is None]
        self.models = sorted(models, key=lambda file: "transformer" not in file.components)
        self.text_files = [file for file in files if file.is_text_encoder]
        self.text_encoders = [path for path in paths if path not in self.files or self.files[path].is_text_encoder]
        self.upsamplers = [file for file in files if set(file.components) == {"upsampler"}]
        self.loras = [file for file in files if file.is_lora]
        known = (*models, *self.text_files, *self.upsamplers, *self.loras)
        self.foreign = [file for file in files if file not in known]


def _alone(path: str, file: CheckpointFile | None) -> FileReport:
    """Reports what is no part of LTX-2 itself; `file` is None for a folder."""
    if file is None:
        return _text_encoder(describe_text_encoder(path))
    if file.is_lora:
        return _lora(path)
    if file.is_text_encoder:
        return _text_encoder(describe_text_encoder(path), Checkpoint([file]))
    if set(file.components) == {"upsampler"}:
        return _upsampler(Checkpoint([file]))
    return replace(_bare((path,), "unknown"), notes=(f"It is {file.kind}, which this program does not use.",))


def _together(given: _Given) -> FileReport:
    """Reports a model beside what was given with it, and says of each companion whether it fits."""
    checkpoint = Checkpoint([*given.models, *given.text_files])
    unused = checkpoint.unused
    checkpoint = Checkpoint([file for file in checkpoint.files if file not in unused])
    report = _checkpoint(checkpoint)
    notes = list(report.notes)
    notes += [f"{file.path} is not used: the other files hold what is in it ({file.contents})." for file in unused]
    notes += [f"{file.path} is {file.kind}, which this program does not use." for file in given.foreign]
    parts, needs = list(report.parts), list(report.needs)
    is_known = report.family != PARTS_FAMILY  # else there is nothing to compare with
    for path in given.text_encoders:
        encoder = describe_text_encoder(path)
        parts.append(_alone(path, given.files.get(path)).parts[0])
        misfit = _misfit(checkpoint, encoder=encoder) if is_known and has_text_projection(checkpoint) else None
        _settle(misfit, "text encoder:", needs, notes)
    for file in given.upsamplers:
        own = _upsampler(Checkpoint([file]))
        parts += own.parts
        _settle(_misfit(checkpoint, upsampler=file.path) if is_known else None, "latent upsampler", needs, notes)
    for file in given.loras:
        own = _lora(file.path)
        parts += own.parts
        notes += [_fit_of_lora(file.path, checkpoint)] if is_known else own.notes
    return replace(
        report,
        paths=given.paths,
        num_bytes=_bare(given.paths, "").num_bytes,
        parts=tuple(parts),
        needs=tuple(needs),
        notes=tuple(dict.fromkeys(notes)),
    )


def _misfit(
    checkpoint: Checkpoint, *, upsampler: str | None = None, encoder: TextEncoderFacts | None = None
) -> str | None:
    """Returns the sentence with which a companion is refused; None where it fits."""
    try:
        describe_checkpoint(checkpoint, upsampler, encoder)
    except ValueError as error:
        return str(error)
    return None


def _settle(misfit: str | None, need: str, needs: list[str], notes: list[str]) -> None:
    """Strikes off the need that a companion meets, or notes why it does not."""
    if misfit is not None:
        notes.append(misfit)
        return
    needs[:] = [text for text in needs if not text.startswith(need)]


def _fit_of_lora(path: str, checkpoint: Checkpoint) -> str:
    """Says how much of a LoRA the model takes, or why none of it."""
    try:
        found = match_lora(LoRAFile(path), lora_targets(checkpoint)).report
    except ValueError as error:
        return str(error)
    others = f". {found.warning}" if found.warning else ""
    return f"{path} fits: {found.matched} of its {found.total} modules are in this model{others}."


def _checkpoint(checkpoint: Checkpoint) -> FileReport:
    notes: list[str] = []
    parts = tuple(sorted(_parts(checkpoint, notes), key=lambda part: -part.num_bytes))
    report = replace(
        _bare(tuple(file.path for file in checkpoint.files), PARTS_FAMILY),
        parts=parts,
        version=model_version(checkpoint),
        layout=_layout(checkpoint),
        precision=parts[0].precision if parts else None,
        config_source=_config_source(checkpoint),
        is_distilled=distilled_hint(checkpoint.path, checkpoint.metadata),
        needs=tuple(_needs(checkpoint, notes)),
        notes=tuple(notes),
    )
    if "transformer" not in checkpoint.components:
        return report
    try:
        facts = describe_checkpoint(checkpoint)
    except ValueError as error:
        return replace(report, notes=tuple(dict.fromkeys([*notes, str(error)])))
    return replace(report, family=f"LTX-{facts.generation}", layout=report.layout or facts.layout)


def _layout(checkpoint: Checkpoint) -> str | None:
    """Says over how many files a model is spread; None for one file, which may be whole or the transformer alone."""
    files = [file for file in checkpoint.files if not file.is_text_encoder]
    return f"split, {len(files)} files" if len(files) > 1 else None


def _parts(checkpoint: Checkpoint, notes: list[str]) -> Iterator[PartReport]:
    """Describes every component; what cannot be used is told in `notes`."""
    for component in checkpoint.components:
        entries = [checkpoint.entry(component, target) for target in checkpoint.components[component]]
        num_bytes = sum(entry.end - entry.start for entry in entries)
        try:
            parameters = count_parameters(checkpoint.shapes(component), read_quantization(checkpoint, component))
            precision = describe_precision(checkpoint, component)
        except ValueError as error:
            notes.append(str(error))
            parameters, precision = 0, "cannot be used"
        title = part_title(component, checkpoint.components[component])
        yield PartReport(title, parameters, num_bytes, precision)
    unclaimed = [name for file in checkpoint.files if not file.is_text_encoder for name in file.unclaimed]
    if unclaimed:
        names = first_names(unclaimed)
        notes.append(f"{len(unclaimed)} tensors belong to nothing this program knows, such as {names}.")


def _needs(checkpoint: Checkpoint, notes: list[str]) -> Iterator[str]:
    """Says what is missing to make a clip with sound; of parts alone, where to choose them."""
    if "transformer" not in checkpoint.components:
        slots = dict.fromkeys(SLOTS[component] for component in checkpoint.components)
        if slots:
            chosen = "it" if len(checkpoint.files) == 1 else "them"
            yield f"a checkpoint of the same family; choose {chosen} as {' and '.join(slots)} in Load LTX MGPU"
        return
    for component in _NEEDED:
        if component not in checkpoint.components:
            yield f"{COMPONENTS[component]}: a file with it as {SLOTS[component]}"
    try:
        transformer_values(checkpoint)
        encoder, has_projection = _needed_encoder(checkpoint), has_text_projection(checkpoint)
    except ValueError as error:
        notes.append(str(error))
        return
    yield f"text encoder: {encoder}, folder or single file, as text_encoder"
    if "connectors" in checkpoint.components and not has_projection:
        yield "text projection: a file with it as text_projection, or a text encoder file that holds it"
    yield "latent upsampler, to enlarge a clip: its own file as upsampler"


def _needed_encoder(checkpoint: Checkpoint) -> str:
    """Names the text encoder that a transformer was trained with."""
    family, version = needed_family(checkpoint), expected_gemma_version(checkpoint)
    size = text_projection_input(checkpoint) if has_text_projection(checkpoint) else PUBLISHED_TEXT_SIZE
    words = "12B" if size == PUBLISHED_TEXT_SIZE else f"of hidden size {size[0]} with {size[1]} states"
    return f"{family} {words}{f' ({version})' if version else ''}"


def _config_source(checkpoint: Checkpoint) -> str | None:
    """Says whether metadata or shapes told the architecture."""
    if checkpoint.inferred:
        return "inferred"
    return "metadata" if any("config" in file.metadata for file in checkpoint.files) else None


def _lora(path: str) -> FileReport:
    report = _bare((path,), "LoRA")
    try:
        file = LoRAFile(path)
    except ValueError as error:
        return replace(report, notes=(str(error),))
    parameters = sum(file.keys[name].numel for pair in file.pairs.values() for name in (pair.down, pair.up))
    dtypes = {file.keys[pair.down].dtype for pair in file.pairs.values()}
    precision = FLOATS.get(next(iter(dtypes)), "fp8") if len(dtypes) == 1 else "mixed"
    ranks = ", ".join(map(str, file.ranks))
    title = f"LoRA {file.name}, {len(file.pairs)} modules of rank {ranks}"
    part = PartReport(title, parameters, report.num_bytes, precision, "LoRA")
    if not any(map(is_of_ltx_2, file.pairs)):
        first = next(iter(file.pairs))
        report = replace(report, notes=(f"its modules are those of no LTX-2 model, such as {first!r}.",))
    needs = ("a checkpoint of the model it was trained on; choose it in LoRA (LTX MGPU)",)
    return replace(report, parts=(part,), precision=precision, version=file.metadata.get("model_version"), needs=needs)


def _text_encoder(facts: TextEncoderFacts, checkpoint: Checkpoint | None = None) -> FileReport:
    """Reports a text encoder; a single file may hold the text projection beside it."""
    report = _bare((facts.path,), f"{facts.family} text encoder")
    notes: list[str] = []
    own = list(_parts(checkpoint, notes)) if checkpoint is not None else []
    parts = (_text_part(facts, report.num_bytes - sum(part.num_bytes for part in own)), *own)
    needs = ("a checkpoint of LTX-2; choose it as text_encoder in Load LTX MGPU",)
    return replace(report, parts=parts, version=facts.gemma_version, needs=needs, notes=tuple(notes))


def _text_part(facts: TextEncoderFacts, num_bytes: int) -> PartReport:
    title = f"text encoder, {facts.num_layers} layers of {facts.hidden_size}"
    return PartReport(title, facts.num_parameters, num_bytes, "as stored", "text encoder")


def _upsampler(checkpoint: Checkpoint) -> FileReport:
    notes: list[str] = []
    parts = tuple(_parts(checkpoint, notes))
    try:
        config = checkpoint.config
    except ValueError as error:
        notes.append(str(error))
        config = {}
    if config.get("temporal_upsample"):
        notes.append("It works in time; TDP Upscale Stage takes a spatial one.")
    return replace(
        _bare((checkpoint.path,), "latent upsampler"),
        parts=parts,
        precision=parts[0].precision,
        version=checkpoint.model_version,
        config_source=_config_source(checkpoint) if config else None,
        needs=("a checkpoint of the same family; choose it as upsampler in Load LTX MGPU",),
        notes=tuple(notes),
    )


def _bare(paths: tuple[str, ...], family: str) -> FileReport:
    return FileReport(paths, sum(size for path in paths for _, _, size in content_keys(path)), family)


def _part_line(part: PartReport) -> str:
    return f"{part.title}: {_count(part.parameters)} parameters, {say_size(part.num_bytes)}, {part.precision}"


def say_size(num_bytes: int) -> str:
    """Writes bytes as GiB, or as MiB below one."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.2f} MiB"


def _count(number: int) -> str:
    """Writes a count the way model names do: 19.0 B, 340 M, 12 k."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
