"""The report on a file: what it is, what it needs beside it, and one sentence where it is broken."""

import itertools
import json
import logging
import re
from pathlib import Path

import pytest
from safetensors.torch import save_file

from mgpu_runtime.weights.facts import describe
from mgpu_runtime.weights.report import GIB, FileReport, inspect
from tests.lora_files import KOHYA, LORA_23, random_pair, write_lora
from tests.text_files import pack
from tests.weights_files import (
    GEMMA,
    TINY_20,
    TINY_23,
    TINY_UPSAMPLER,
    TOY_23,
    TOY_UPSAMPLER,
    only,
    published,
    published_layout,
    published_split,
    read_all,
    split,
    write_gemma,
    write_header,
)


def text(report: FileReport) -> str:
    """Joins the lines, each of which must be one."""
    lines = report.lines()
    assert all("\n" not in line for line in lines)
    return "\n".join(lines)


def test_a_whole_published_model(tmp_path: Path) -> None:
    report = inspect(published("23", tmp_path))
    assert (report.family, report.layout, report.precision) == ("LTX-2.3", "one file", "bf16")
    assert (report.config_source, report.version, report.notes) == ("metadata", None, ())
    parts = {part.title: part for part in report.parts}
    assert list(parts) == ["transformer", "text connectors", "video autoencoder", "vocoder", "audio autoencoder"]
    transformer = parts["transformer"]
    assert (transformer.parameters, transformer.num_bytes) == (18_988_838_144, 2 * 18_988_838_144)
    assert abs(report.num_bytes / GIB - 42.97) < 0.01
    assert len(report.needs) == 2 and "Gemma 3 12B" in report.needs[0] and "as upsampler" in report.needs[1]
    assert "19.0 B parameters, 35.37 GiB, bf16" in text(report)


def test_parts_say_what_is_missing_and_together_they_are_whole(tmp_path: Path) -> None:
    paths = published_split("20", tmp_path, has_config=False)
    transformer = inspect(paths["transformer"])
    assert (transformer.family, transformer.layout, transformer.version) == ("LTX-2.0", "split", "2.0")
    assert transformer.config_source == "inferred" and "inferred from the shapes" in text(transformer)
    needs = "\n".join(transformer.needs)
    for part in ("video autoencoder: a file with it as video_vae", "vocoder: a file with it as audio_vae", "Gemma 3"):
        assert part in needs
    assert "text projection: a file with it as text_projection" in needs
    vae = inspect(paths["video_vae"])
    assert (vae.family, vae.layout) == ("LTX-2 (parts)", None)
    assert vae.needs == ("a checkpoint of the same family; choose it as video_vae in Load LTX MGPU",)
    projection = inspect(paths["text_projection"])
    assert [part.title for part in projection.parts] == ["text projection"] and projection.config_source is None
    some = inspect(paths["audio_vae"], paths["video_vae"])
    assert some.layout == "split, 2 files" and "choose them as" in some.needs[0]
    whole = inspect(*paths.values())
    assert whole.layout == "split, 4 files"
    assert [need.split(":")[0] for need in whole.needs] == ["text encoder", "latent upsampler, to enlarge a clip"]


def test_a_newer_model_names_its_own_text_encoder(tmp_path: Path) -> None:
    shapes, config = published_layout("25")
    metadata = {
        "config": json.dumps(config),
        "model_version": "2.5.0",
        "gemma_source_checkpoint": '{"gemma_version": "gemma4-12b-ltx-v1"}',
    }
    report = inspect(write_header(tmp_path / "ltx-2.5-22b-distilled-transformer.safetensors", shapes, metadata))
    assert (report.version, report.is_distilled) == ("2.5.0", True)
    assert any("Gemma 4 12B (gemma4-12b-ltx-v1), folder or single file" in need for need in report.needs)
    assert "LTX-2.5, distilled" in text(report)


def test_other_kinds_of_files_are_named(tmp_path: Path) -> None:
    lora = write_header(
        tmp_path / "lora.safetensors",
        {
            "diffusion_model.transformer_blocks.0.attn1.to_q.lora_A.weight": (4, 64),
            "diffusion_model.transformer_blocks.0.attn1.to_q.lora_B.weight": (64, 4),
        },
        {"model_version": "2.3"},
    )
    report = inspect(lora)
    assert (report.family, report.parameters, report.version, report.precision) == ("LoRA", 512, "2.3", "bf16")
    assert "1 modules of rank 4" in text(report)
    dora = write_header(tmp_path / "dora.safetensors", {"a.lora_A.weight": (2, 2), "a.dora_scale": (2,)})
    assert inspect(dora).notes and "DoRA" in inspect(dora).notes[0]
    gemma = inspect(GEMMA)
    assert gemma.family == "Gemma 3 text encoder" and gemma.parameters > 0
    upsampler = inspect(TINY_UPSAMPLER)
    assert (upsampler.family, upsampler.config_source) == ("latent upsampler", "metadata")
    unknown = inspect(write_header(tmp_path / "x.safetensors", {"first_stage_model.decoder.conv_in.weight": (2, 2)}))
    assert unknown.family == "unknown" and "another model's file" in unknown.notes[0]
    layer = {"cond_stage_model.transformer.text_model.encoder.layers.0.self_attn.q_proj.weight": (2, 2)}
    older_image = {"model.diffusion_model.input_blocks.0.0.weight": (4, 4, 3, 3), **layer}
    image = inspect(write_header(tmp_path / "sd.safetensors", older_image))
    assert (image.family, image.parts, image.needs) == ("unknown", (), ()) and "another model's file" in image.notes[0]
    with pytest.raises(ValueError, match="another model's file"):
        describe(tmp_path / "sd.safetensors")
    older = inspect(write_header(tmp_path / "old.safetensors", {"model.diffusion_model.patchify_proj.weight": (2, 2)}))
    assert older.family == "unknown" and "older LTX-Video" in older.notes[0]


def test_what_cannot_be_used_is_a_note_not_an_error(tmp_path: Path) -> None:
    tensors, metadata = read_all(TINY_20)
    save_file(
        tensors | {"optimizer.state": tensors["vae.encoder.conv_in.conv.bias"].clone()},
        tmp_path / "x.safetensors",
        metadata,
    )
    report = inspect(tmp_path / "x.safetensors")
    assert report.family == "LTX-2.0" and "optimizer.state" in report.notes[0]
    vae = only(TOY_23, tmp_path / "vae.safetensors", "vae.")
    integer = write_header(
        tmp_path / "int.safetensors", {name: tuple(t.shape) for name, t in read_all(vae)[0].items()}, dtype="I32"
    )
    report = inspect(integer)
    assert report.parts[0].precision == "cannot be used" and "I32" in report.notes[0]
    tiny = inspect(split(TINY_20, tmp_path, has_config=False)["transformer"])
    assert tiny.family == "LTX-2 (parts)" and "no whole number of heads" in tiny.notes[0]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" + b"\0" * 40, b"\x05\0\0\0\0\0\0\0{"])
def test_a_broken_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        inspect(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match="There is no file"):
        inspect(tmp_path / "absent.safetensors")


def test_companions_are_parts_in_any_order_and_meet_their_needs(tmp_path: Path) -> None:
    encoder = pack(GEMMA, tmp_path / "gemma.safetensors")
    for text_encoder in (GEMMA, encoder):
        for paths in itertools.permutations((TOY_23, text_encoder, TOY_UPSAMPLER)):
            report = inspect(*paths)
            assert (report.family, report.layout) == ("LTX-2.3", "one file")
            assert report.paths == tuple(map(str, paths)) and (report.needs, report.notes) == ((), ())
            titles = [part.title for part in report.parts]
            assert "transformer" in titles and titles[-2].startswith("text encoder, ")
            assert titles[-1] == "latent upsampler"
    pair = inspect(GEMMA, TOY_UPSAMPLER)
    assert pair.family == "Gemma 3 text encoder, latent upsampler" and len(pair.parts) == 2


def test_companions_that_do_not_fit_are_notes_and_their_needs_stay(tmp_path: Path) -> None:
    wide = write_gemma(tmp_path / "wide", hidden_size=96)
    layer = {"model.embed_tokens.weight": (4, 96), "model.layers.0.self_attn.q_proj.weight": (2, 2)}
    write_header(wide / "model.safetensors", layer)
    report = inspect(wide, TINY_UPSAMPLER, TOY_23)
    assert [need.split(":")[0] for need in report.needs] == ["text encoder", "latent upsampler, to enlarge a clip"]
    assert "has hidden size 96" in report.notes[0] and "latent channels" in report.notes[1]


def test_a_lora_beside_its_model_says_how_much_of_it_fits(tmp_path: Path) -> None:
    for paths in ((TINY_23, LORA_23), (LORA_23, TINY_23)):
        report = inspect(*paths)
        assert (report.family, report.layout) == ("LTX-2.3", "one file")
        assert report.parts[-1].title.startswith("LoRA tiny_lora_ltx23, 21 modules")
        assert report.needs == inspect(TINY_23).needs
        assert report.notes == (f"{LORA_23} fits: 21 of its 21 modules are in this model.",)
    other = write_lora(tmp_path / "sd.safetensors", {"down_blocks.0.attentions.0.proj_in": random_pair(4, 4)}, KOHYA)
    (note,) = inspect(TINY_23, other).notes
    assert "is a LoRA for another model" in note
    assert "its modules are those of no LTX-2 model" in inspect(other).notes[0] and inspect(LORA_23).notes == ()


def test_a_file_of_no_use_is_noted_and_changes_no_family(tmp_path: Path) -> None:
    preview = write_header(tmp_path / "tae.safetensors", {"decoder.1.weight": (8, 2, 3, 3)})
    small = only(TINY_23, tmp_path / "a.safetensors", "vae.")
    twin = only(TINY_23, tmp_path / "b.safetensors", "vae.")
    report = inspect(preview, small, TINY_23, twin)
    assert (report.family, report.layout) == ("LTX-2.3", "split, 2 files")
    assert f"{small} is not used" in report.notes[0] and f"{preview} is another model's file" in report.notes[1]


def test_what_shapes_told_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = published_split("20", tmp_path, has_config=False)
    with caplog.at_level(logging.WARNING, "mgpu"):
        inspect(*paths.values())
    lines = [record.getMessage() for record in caplog.records]
    assert lines and len(lines) == len(set(lines))
    assert re.search(r"part +video autoencoder: .* MiB", text(inspect(TINY_23)))
