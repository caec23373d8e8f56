"""Which text encoder belongs to which transformer: sizes, generations and declared versions."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from mgpu_runtime.weights.bundle import read_checkpoint
from mgpu_runtime.weights.facts import describe
from mgpu_runtime.weights.text_pairing import check_text_encoder, expected_gemma_version
from mgpu_runtime.weights.text_source import TextEncoderFacts
from tests.weights_files import TINY_20, published_layout, read_all, write_header

GEMMA_3 = TextEncoderFacts("/m/gemma3", "gemma3", 3840, 48, 0)
GEMMA_4 = TextEncoderFacts("/m/gemma4", "gemma4_unified", 3840, 48, 0, gemma_version="gemma4-12b-ltx-v1")


def _published(version: str, folder: Path, source: str | None) -> Path:
    shapes, config = published_layout(version)
    metadata = {"config": json.dumps(config)}
    if source is not None:
        metadata["gemma_source_checkpoint"] = json.dumps({"ltx_version": "2.5.0", "gemma_version": source})
    return write_header(folder / "x.safetensors", shapes, metadata)


@pytest.mark.parametrize(
    ("version", "source", "encoder", "parts"),
    [
        ("23", None, GEMMA_3, None),
        ("23", None, GEMMA_4, ("/m/gemma4 is Gemma 4", "made with Gemma 3")),
        ("25", None, GEMMA_3, ("/m/gemma3 is Gemma 3", "made with Gemma 4")),
        ("25", "gemma4-12b-ltx-v1", GEMMA_4, None),
        ("25", "gemma4-12b-ltx-v1", GEMMA_3, ("/m/gemma3 is Gemma 3", "Gemma 4 (gemma4-12b-ltx-v1)")),
        ("25", "gemma4-12b-ltx-v2", GEMMA_4, ("/m/gemma4 is 'gemma4-12b-ltx-v1'", "'gemma4-12b-ltx-v2'")),
    ],
)
def test_b92_the_text_encoder_must_be_the_one_the_model_was_trained_with(
    tmp_path: Path, version: str, source: str | None, encoder: TextEncoderFacts, parts: tuple[str, ...] | None
) -> None:
    file = read_checkpoint(_published(version, tmp_path, source))
    assert expected_gemma_version(file) == source
    if parts is None:
        check_text_encoder(encoder, file)
        return
    with pytest.raises(ValueError) as error:
        check_text_encoder(encoder, file)
    assert all(part in str(error.value) for part in (str(file.path), *parts))


@pytest.mark.parametrize(("source", "declared"), [(None, "gemma4-12b-ltx-v1"), ("gemma4-12b-ltx-v1", None)])
def test_a_pairing_that_nobody_declares_is_accepted_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str | None, declared: str | None
) -> None:
    file = read_checkpoint(_published("25", tmp_path, source))
    with caplog.at_level(logging.WARNING, logger="mgpu"):
        check_text_encoder(replace(GEMMA_4, gemma_version=declared), file)
        check_text_encoder(replace(GEMMA_4, gemma_version=declared), file)
    assert len(caplog.records) == 1 and "not Google's" in caplog.text


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_note_about_the_text_encoder_is_one_sentence(tmp_path: Path, text: str) -> None:
    tensors, metadata = read_all(TINY_20)
    save_file(tensors, tmp_path / "x.safetensors", metadata={**metadata, "gemma_source_checkpoint": text})
    with pytest.raises(ValueError, match='metadata "gemma_source_checkpoint" is not (valid JSON|a JSON object)'):
        describe(tmp_path / "x.safetensors")
