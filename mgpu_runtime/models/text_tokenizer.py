"""The prompt's way to token ids: stripped, with BOS, without EOS, padded on the left.

Letters: B batch, S tokens.
"""

import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from sentencepiece import SentencePieceProcessor
from torch import Tensor
from transformers import AutoTokenizer

from ..weights.mapping import read_tensors
from ..weights.text_source import TextSource
from .connectors import check_text_length

log = logging.getLogger("mgpu")

# What Gemma's tokenizers are called where a file leaves it out; their special tokens are this class's defaults.
_TOKENIZER_CONFIG = b'{"tokenizer_class": "GemmaTokenizer"}'


@dataclass(frozen=True)
class PromptTokenizer:
    """Text to token ids and back, and the two special tokens that a prompt needs."""

    to_ids: Callable[[str], list[int]]
    to_text: Callable[[list[int]], str]
    bos: int
    pad: int

    def tokenize(self, prompts: Sequence[str], *, max_length: int) -> tuple[Tensor, Tensor]:
        """Returns token ids and mask, both (B, S) int64 with S = max_length, 1 on real tokens.

        A longer prompt is cut at the end with a warning. Raises ValueError when max_length is no multiple of 128.
        """
        check_text_length(max_length)
        ids = torch.full((len(prompts), max_length), self.pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            tokens = self._tokens(prompt, max_length)
            ids[row, -len(tokens) :] = torch.tensor(tokens)
            mask[row, -len(tokens) :] = 1
        return ids, mask

    def _tokens(self, prompt: str, max_length: int) -> list[int]:
        tokens = self.to_ids(prompt.strip())
        if tokens[:1] != [self.bos]:
            tokens = [self.bos, *tokens]
        if len(tokens) > max_length:
            log.warning(
                "The prompt has %d tokens, the limit is %d: the last %d are not used.",
                len(tokens),
                max_length,
                len(tokens) - max_length,
            )
        return tokens[:max_length]


def load_tokenizer(source: TextSource) -> PromptTokenizer:
    """Loads the tokenizer of a folder, or the one inside a single file; leaves no file behind.

    Raises ValueError with one sentence when it is damaged or is not Gemma's.
    """
    path = source.facts.path
    if source.facts.is_file:
        return _packed(path, _read_bytes(path, source.assets), source.config)
    folder = Path(path)
    if (folder / "tokenizer.json").is_file():
        return _huggingface(folder, path)
    return _sentencepiece((folder / "tokenizer.model").read_bytes(), path)


def _packed(path: str, files: Mapping[str, bytes], config: Mapping) -> PromptTokenizer:
    if "tokenizer.json" not in files:
        return _sentencepiece(files["tokenizer.model"], path)
    with tempfile.TemporaryDirectory(prefix="ltx-mgpu-") as folder:
        named = {
            "config.json": json.dumps({"model_type": config["model_type"]}).encode("utf-8"),
            "tokenizer_config.json": _TOKENIZER_CONFIG,
            **files,
        }
        for name, content in named.items():
            (Path(folder) / name).write_bytes(content)
        return _huggingface(Path(folder), path)


def _huggingface(folder: Path, path: str) -> PromptTokenizer:
    """Loads tokenizer.json through transformers; `path` is what sentences call it."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        _check_json(folder / name, path)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    bos, pad = tokenizer.bos_token_id, tokenizer.pad_token_id
    return PromptTokenizer(
        lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
        tokenizer.decode,
        _require_bos(bos, path),
        bos if pad is None else pad,
    )


def _sentencepiece(model: bytes, path: str) -> PromptTokenizer:
    """Loads a SentencePiece model, which Gemma 3's own tokenizer is; transformers would need protobuf for it."""
    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise ValueError(f"The tokenizer inside {path} is damaged: {error}. Download the file again.") from error
    bos, pad = processor.bos_id(), processor.pad_id()
    _require_bos(bos if bos >= 0 else None, path)
    return PromptTokenizer(processor.EncodeAsIds, processor.DecodeIds, bos, bos if pad < 0 else pad)


def _require_bos(bos: int | None, path: str) -> int:
    if bos is None:
        raise ValueError(f"The tokenizer of {path} has no BOS token. Choose Gemma's own tokenizer.")
    return bos


def _read_bytes(path: str, assets: Mapping[str, str]) -> dict[str, bytes]:
    stored = read_tensors(path, assets.values())
    return {name: stored[tensor].numpy().tobytes() for name, tensor in assets.items()}


def _check_json(file: Path, path: str) -> None:
    """Raises ValueError for a tokenizer file that is not JSON, which the library reports in many ways."""
    if not file.is_file():
        return
    try:
        content = json.loads(file.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file.name} of {path} is damaged: {error}. Download the text encoder again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} of {path} is damaged: it is not a JSON object. Download it again.")
