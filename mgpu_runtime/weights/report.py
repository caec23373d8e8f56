"""What a file is, for people: family, version, parts, precision, sizes, and what it needs beside it.

Works on any safetensors file and on text encoder folders, from headers alone.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .bundle import Checkpoint, Path, read_checkpoint
from .configs import has_text_projection, text_projection_input, transformer_values
from .facts import describe, distilled_hint, model_version
from .header import content_keys, first_names
from .keymaps import COMPONENTS, SLOTS
from .lora import LoRAFile
from .quantized import FLOATS, count_parameters, describe_precision, read_quantization
from .text_pairing import PUBLISHED_TEXT_SIZE, expected_gemma_version, needed_family
from .text_source import TextEncoderFacts, describe_text_encoder

GIB = 1 << 30

# What making a clip with sound takes, in the order a person chooses files.
_NEEDED = ("transformer", "connectors", "video_vae", "audio_vae", "vocoder")


@dataclass(frozen=True)
class PartReport:
    """One component: how it is called, its parameters, its bytes in the files, and how it is stored."""

    title: str
    parameters: int
    num_bytes: int
    precision: str


@dataclass(frozen=True)
class FileReport:
    """What a file is, or several that make one model.

    Attributes:
        paths: the files, absolute.
        num_bytes: of all of them on the disk.
        family: such as "LTX-2.3", "LTX-2 (parts)", "LoRA", "Gemma 4 text encoder", "latent upsampler", "unknown".
        version: "2.3.0", as the metadata or else the shapes say; None where neither does.
        layout: "one file" or "split"; None for what is no LTX-2 transformer.
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
            ("size", f"{self.num_bytes / GIB:.2f} GiB, {_count(self.parameters)} parameters"),
            *(("part", _part_line(part)) for part in self.parts),
            *(("needs", need) for need in self.needs),
            *(("note", note) for note in self.notes),
        ]
        return [f"{title:<9}  {text}" for title, text in rows if text is not None]


def inspect(*paths: Path) -> FileReport:
    """Reads headers and returns what the files are; raises ValueError in one sentence where one is broken."""
    absolute = tuple(os.path.abspath(os.fspath(path)) for path in paths)
    if len(absolute) == 1 and os.path.isdir(absolute[0]):
        return _text_encoder(describe_text_encoder(absolute[0]))
    checkpoint = read_checkpoint(absolute)
    first = checkpoint.files[0]
    if len(checkpoint.files) > 1 or first.kind is None:
        return _checkpoint(checkpoint)
    if first.is_lora:
        return _lora(absolute[0])
    if first.is_text_encoder:
        return _text_encoder(describe_text_encoder(absolute[0]), checkpoint)
    if "upsampler" in checkpoint.components:
        return _upsampler(checkpoint)
    note = f"It is {first.kind}, which this program does not use."
    return replace(_bare(absolute, "unknown"), notes=(note,))


def _checkpoint(checkpoint: Checkpoint) -> FileReport:
    notes: list[str] = []
    parts = tuple(sorted(_parts(checkpoint, notes), key=lambda part: -part.num_bytes))
    report = replace(
        _bare(tuple(file.path for file in checkpoint.files), "LTX-2 (parts)"),
        parts=parts,
        version=model_version(checkpoint),
        precision=parts[0].precision if parts else None,
        config_source=_config_source(checkpoint),
        is_distilled=distilled_hint(checkpoint.path, checkpoint.metadata),
        needs=tuple(_needs(checkpoint, notes)),
        notes=tuple(notes),
    )
    if "transformer" not in checkpoint.components:
        return report
    try:
        facts = describe([file.path for file in checkpoint.files])
    except ValueError as error:
        return replace(report, notes=tuple(dict.fromkeys([*notes, str(error)])))
    return replace(report, family=f"LTX-{facts.generation}", layout=facts.layout)


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
        yield PartReport(COMPONENTS[component], parameters, num_bytes, precision)
    if checkpoint.unclaimed and not any(file.is_text_encoder for file in checkpoint.files):
        names = first_names(checkpoint.unclaimed)
        notes.append(f"{len(checkpoint.unclaimed)} tensors belong to nothing this program knows, such as {names}.")


def _needs(checkpoint: Checkpoint, notes: list[str]) -> Iterator[str]:
    """Says what is missing to make a clip with sound."""
    for component in _NEEDED:
        if component not in checkpoint.components:
            yield f"{COMPONENTS[component]}: a file with it as {SLOTS[component]}"
    if "transformer" not in checkpoint.components:
        return
    try:
        transformer_values(checkpoint)
        encoder, has_projection = _needed_encoder(checkpoint), has_text_projection(checkpoint)
    except ValueError as error:
        notes.append(str(error))
        return
    if not any(file.is_text_encoder for file in checkpoint.files):
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
    title = f"{len(file.pairs)} modules of rank {ranks}"
    part = PartReport(title, parameters, report.num_bytes, precision)
    needs = ("a checkpoint of the model it was trained on; choose it in LoRA (LTX MGPU)",)
    return replace(report, parts=(part,), precision=precision, version=file.metadata.get("model_version"), needs=needs)


def _text_encoder(facts: TextEncoderFacts, checkpoint: Checkpoint | None = None) -> FileReport:
    """Reports a text encoder; a single file may hold the text projection beside it."""
    report = _bare((facts.path,), f"{facts.family} text encoder")
    notes: list[str] = []
    own = list(_parts(checkpoint, notes)) if checkpoint is not None else []
    title = f"text encoder, {facts.num_layers} layers of {facts.hidden_size}"
    rest = report.num_bytes - sum(part.num_bytes for part in own)
    parts = (PartReport(title, facts.num_parameters, rest, "as stored"), *own)
    needs = ("a checkpoint of LTX-2; choose it as text_encoder in Load LTX MGPU",)
    return replace(report, parts=parts, version=facts.gemma_version, needs=needs, notes=tuple(notes))


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
    return f"{part.title}: {_count(part.parameters)} parameters, {part.num_bytes / GIB:.2f} GiB, {part.precision}"


def _count(number: int) -> str:
    """Writes a count the way model names do: 19.0 B, 340 M, 12 k."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
