"""What a text encoder folder holds, from its JSON files alone."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

MODEL_TYPES = ("gemma3", "gemma3_text")


@dataclass(frozen=True)
class TextEncoderFacts:
    """A Hugging Face folder of a Gemma 3 model; `num_states` counts its layers and the embedding."""

    path: str
    model_type: str
    hidden_size: int
    num_layers: int
    modified_ns: int

    @property
    def num_states(self) -> int:
        """Number of hidden states per token."""
        return self.num_layers + 1


def describe_text_encoder(path: str | os.PathLike) -> TextEncoderFacts:
    """Reads config.json and checks that tokenizer and weights are there; raises ValueError with one sentence."""
    folder = Path(os.path.abspath(os.fspath(path)))
    if not folder.exists():
        raise ValueError(f"There is no text encoder folder {folder}. Check the path, or download Gemma 3 first.")
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is a file, but the text encoder must be a Hugging Face folder with config.json, tokenizer and "
            "weights. The text projection comes from the LTX checkpoint, not from the text encoder."
        )
    config = _read_json(folder, "config.json")
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"The text encoder {folder} is a {kind!r} model, but LTX-2.0 and 2.3 need Gemma 3.")
    text = config.get("text_config", config)
    try:
        hidden_size, num_layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{folder / 'config.json'} does not say hidden_size and num_hidden_layers.") from None
    _check_files(folder)
    modified = (folder / "config.json").stat().st_mtime_ns
    return TextEncoderFacts(str(folder), kind, hidden_size, num_layers, modified)


def _check_files(folder: Path) -> None:
    """Checks that the tokenizer and every weight file are there."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise ValueError(f"The text encoder {folder} has no tokenizer.json or tokenizer.model. Download it completely.")
    if (folder / "model.safetensors").is_file():
        return
    if not (folder / "model.safetensors.index.json").is_file():
        raise ValueError(f"The text encoder {folder} has no model.safetensors. Download it completely.")
    parts = sorted(set(_read_json(folder, "model.safetensors.index.json").get("weight_map", {}).values()))
    missing = [part for part in parts if not (folder / part).is_file()]
    if missing:
        raise ValueError(
            f"The text encoder {folder} lacks {len(missing)} of {len(parts)} weight files, such as {missing[0]}. "
            "Download it completely."
        )


def _read_json(folder: Path, name: str) -> dict:
    """Reads one JSON object; raises ValueError when it is missing or broken."""
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"The text encoder {folder} has no {name}. Choose the Hugging Face folder of Gemma 3."
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder / name} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{folder / name} is not a JSON object.")
    return content
