"""Reads the header of a safetensors file and nothing else: names, dtypes, shapes, offsets and metadata.

Layout of the format: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' bytes
(https://github.com/huggingface/safetensors, section "Format").
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself

# Bits per element of the dtypes the format names.
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}

ContentKey = tuple[str, int, int]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as the header describes it; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def content_key(path: str | os.PathLike) -> ContentKey:
    """Identifies a file's content by absolute path, modification time (ns) and size (bytes).

    The path is not resolved through symlinks, so a link keeps its own name.
    Raises ValueError when there is no such file.
    """
    absolute = os.path.abspath(os.fspath(path))
    try:
        status = os.stat(absolute)
    except FileNotFoundError:
        raise ValueError(f"There is no file {absolute}. Check the path, or download the file first.") from None
    except OSError as error:
        raise ValueError(f"{absolute} cannot be opened: {error.strerror}.") from error
    if os.path.isdir(absolute):
        raise ValueError(f"{absolute} is a folder, not a checkpoint. Choose a .safetensors file inside it.")
    return absolute, status.st_mtime_ns, status.st_size


def content_keys(path: str | os.PathLike) -> tuple[ContentKey, ...]:
    """Identifies the content of a file, or of every file in a folder, in the order of their names.

    Raises ValueError when there is neither.
    """
    if not os.path.isdir(path):
        return (content_key(path),)
    return tuple(content_key(entry.path) for entry in sorted(os.scandir(path), key=lambda e: e.path) if entry.is_file())


def read_header(path: str | os.PathLike) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Reads tensor entries and metadata; raises ValueError with one sentence when the file is broken."""
    absolute, _, size = content_key(path)
    raw = _header_bytes(Path(absolute), size)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=lambda pairs: _without_duplicates(pairs, absolute))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{absolute} is not a safetensors file: its header is not valid JSON ({error}).") from error
    if not isinstance(header, dict):
        raise ValueError(f"{absolute} is not a safetensors file: its header is not a JSON object.")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{absolute} is damaged: the metadata in its header is not a table of strings.")
    entries = {name: _entry(name, fields, absolute) for name, fields in header.items()}
    _check_offsets(entries, size - 8 - len(raw), absolute)
    return entries, metadata


def metadata_object(metadata: Mapping[str, str], key: str, path: str | os.PathLike) -> dict[str, Any]:
    """Returns the JSON object in an entry of a file's metadata; raises ValueError with one sentence for another."""
    try:
        content = json.loads(metadata[key])
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f'{path} is damaged: its metadata "{key}" is not valid JSON ({error}).') from error
    if not isinstance(content, dict):
        raise ValueError(f'{path} is damaged: its metadata "{key}" is not a JSON object.')
    return content


def first_names(names: Iterable[str], most: int = 3) -> str:
    """Joins the first few of a file's tensor names, for sentences; "none" where there are none."""
    return ", ".join(islice(names, most)) or "none"


def _header_bytes(path: Path, size: int) -> bytes:
    """Returns the JSON bytes after checking the length field against the file size."""
    if size < 8:
        raise ValueError(f"{path} is not a safetensors file: it has only {size} bytes. Download it again.")
    try:
        with open(path, "rb") as file:
            start = file.read(9)
            length = struct.unpack("<Q", start[:8])[0]
            if length > MAX_HEADER_BYTES or start[8:9] != b"{":
                raise ValueError(f"{path} is not a safetensors file: it starts with {start[:8]!r}.{_hint(start)}")
            if length > size - 8:
                raise ValueError(
                    f"{path} is cut off inside its header: the header needs {length} bytes, the file has "
                    f"{size - 8} left. Download or copy it again."
                )
            return start[8:] + file.read(length - 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error


def _hint(start: bytes) -> str:
    """Says what the first bytes of a wrong file look like, with a leading blank."""
    if start.startswith(b"version "):
        return " It looks like a Git LFS pointer: fetch the real file (git lfs pull)."
    if start.startswith(b"PK"):
        return " It looks like a PyTorch pickle or zip: choose the .safetensors version."
    if start.startswith(b"GGUF"):
        return " It is a GGUF file: choose the .safetensors version."
    return " Choose a .safetensors file."


def _without_duplicates(pairs: list[tuple[str, object]], path: str) -> dict[str, object]:
    """Builds a dict from JSON pairs; raises ValueError naming a key that occurs twice."""
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{path} is damaged: its header has the key {twice!r} twice. Export or download it again.")
    return table


def _entry(name: str, fields: object, path: str) -> TensorEntry:
    """Checks one header entry by itself."""
    try:
        dtype, shape, (start, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        numbers_are_valid = all(type(value) is int and value >= 0 for value in (*shape, start, end))
    except (KeyError, TypeError, ValueError):
        numbers_are_valid = False
    if not numbers_are_valid or not isinstance(dtype, str):
        raise ValueError(f"{path} is damaged: the header entry of tensor {name!r} is malformed.")
    if dtype not in DTYPE_BITS:
        raise ValueError(f"{path}: tensor {name!r} has the unknown dtype {dtype!r}.")
    if (end - start) * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
        raise ValueError(
            f"{path} is damaged: tensor {name!r} is {dtype} {list(shape)}, but its header entry covers "
            f"{end - start} bytes."
        )
    return TensorEntry(dtype, shape, start, end)


def _check_offsets(entries: dict[str, TensorEntry], data_bytes: int, path: str) -> None:
    """Checks that the tensors fill the data section without gaps, overlaps or missing bytes."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            raise ValueError(
                f"{path} is damaged: tensor {name!r} starts at byte {entry.start} of the data, expected {position}."
            )
        position = entry.end
    if position > data_bytes:
        raise ValueError(
            f"{path} is cut off: its tensors need {position} bytes, the file has {data_bytes}. "
            "Download or copy it again."
        )
    if position < data_bytes:
        raise ValueError(f"{path} is damaged: {data_bytes - position} bytes follow the last tensor.")
