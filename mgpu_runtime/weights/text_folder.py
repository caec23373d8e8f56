"""A text encoder's Hugging Face folder, from its JSON files and the headers of its weight files."""

import json
from pathlib import Path
from typing import Any

from .header import read_header
from .text_names import StoredTensor, tower_tensors

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")  # one of them is needed


def folder_config(folder: Path) -> dict[str, Any]:
    """Returns the config; raises ValueError with one sentence when there is none."""
    return _read_json(folder, "config.json")


def folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns the text tower's tensors; raises ValueError with one sentence when weights or tokenizer are missing."""
    parts = _weight_files(folder)
    entries = {part: read_header(folder / part)[0] for part in parts}
    return tower_tensors(
        StoredTensor(str(folder / part), name, entry) for part in parts for name, entry in entries[part].items()
    )


def _weight_files(folder: Path) -> list[str]:
    """Returns the weight files' names after checking that they and the tokenizer are there."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"The text encoder {folder} has no tokenizer.json or tokenizer.model. Download it completely.")
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    if not (folder / "model.safetensors.index.json").is_file():
        raise ValueError(f"The text encoder {folder} has no model.safetensors. Download it completely.")
    parts = sorted(set(_read_json(folder, "model.safetensors.index.json").get("weight_map", {}).values()))
    missing = [part for part in parts if not (folder / part).is_file()]
    if missing:
        raise ValueError(
            f"The text encoder {folder} lacks {len(missing)} of {len(parts)} weight files, such as {missing[0]}. "
            "Download it completely."
        )
    return parts


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    """Reads one JSON object; raises ValueError when it is missing or broken."""
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"The text encoder {folder} has no {name}. Choose the Hugging Face folder of Gemma.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder / name} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{folder / name} is not a JSON object.")
    return content
