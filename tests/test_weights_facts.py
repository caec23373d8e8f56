"""Facts of a model from headers alone."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from mgpu_runtime.weights.facts import describe, describe_text_encoder
from tests.weights_files import (
    GEMMA,
    TINY_20,
    TINY_23,
    TINY_UPSAMPLER,
    TOY_23,
    TOY_UPSAMPLER,
    changed_copy,
    only,
    published,
    published_layout,
    read_all,
    split,
    write_gemma,
    write_header,
)


def test_facts_of_the_toy_model() -> None:
    facts = describe(TOY_23, TOY_UPSAMPLER, GEMMA)
    expected = {
        "path": str(TOY_23),
        "version": "2.3.0",
        "generation": "2.3",
        "is_distilled": None,
        "num_layers": 4,
        "num_heads": 8,
        "audio_num_heads": 8,
        "video_channels": 128,
        "audio_channels": 2,
        "audio_mel_bins": 16,
        "audio_latent_rate": 25.0,
        "video_context_width": 192,
        "audio_context_width": 64,
        "scale_factors": (8, 32, 32),
        "sample_rate": 48000,
        "text_hidden_size": 64,
        "text_num_states": 4,
        "upsample_scale": 2.0,
    }
    assert {name: getattr(facts, name) for name in expected} == expected
    assert set(facts.components) == {"transformer", "connectors", "video_vae", "audio_vae", "vocoder"}
    assert (facts.text_encoder.hidden_size, facts.text_encoder.num_states) == (64, 4)
    tensors, _ = read_all(TOY_23)
    prefix = "model.diffusion_model."
    parts = [t for n, t in tensors.items() if n.startswith(prefix) and "_embeddings_connector" not in n]
    assert facts.parameters == sum(tensor.numel() for tensor in parts)


def test_facts_of_the_older_generation() -> None:
    facts = describe(TINY_20)
    assert (facts.generation, facts.version, facts.sample_rate, facts.video_channels) == ("2.0", "2.0.0", 24000, 16)
    assert facts.upsample_scale is None and facts.text_encoder is None


@pytest.mark.parametrize(
    ("version", "generation", "parameters", "widths"),
    [
        ("20", "2.0", 18_876_174_592, (3840, 3840)),
        ("23", "2.3", 18_988_838_144, (4096, 2048)),
        ("25", "2.5", 18_987_859_200, (4096, 2048)),
    ],
)
def test_facts_of_published_layouts(
    tmp_path: Path, version: str, generation: str, parameters: int, widths: tuple[int, int]
) -> None:
    facts = describe(published(version, tmp_path))
    assert (facts.generation, facts.parameters, facts.num_heads, facts.num_layers) == (generation, parameters, 32, 48)
    assert (facts.video_context_width, facts.audio_context_width) == widths
    assert (facts.video_channels, facts.audio_channels, facts.audio_mel_bins) == (128, 8, 16)
    assert (facts.text_hidden_size, facts.text_num_states) == (3840, 49)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ltx-2-19b-distilled.safetensors", True),
        ("LTX-2.3-22B-Dev.safetensors", False),
        ("device-mix.safetensors", None),
    ],
)
def test_name_hints_at_distillation(tmp_path: Path, name: str, hint: bool | None) -> None:
    (tmp_path / name).symlink_to(TINY_20)
    assert describe(tmp_path / name).is_distilled is hint


def test_scale_factors_follow_the_block_list(tmp_path: Path) -> None:
    blocks = [["res_x", {}], ["compress_time", {}], ["res_x", {}], ["compress_space", {}], ["res_x", {}]]
    path = changed_copy(TINY_23, tmp_path / "x.safetensors", vae={"decoder_blocks": blocks, "patch_size": 8})
    assert describe(path).scale_factors == (2, 16, 16)


def test_unchanged_files_are_read_once_and_changed_ones_again(tmp_path: Path) -> None:
    path = changed_copy(TINY_23, tmp_path / "x.safetensors", transformer={})
    facts = describe(path)
    assert describe(path) is facts
    os.utime(path, ns=(1, 1))
    assert describe(path) is not facts and describe(path) == facts
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.num_heads = 1


@pytest.mark.parametrize(("scale", "rational", "expected"), [(1.5, True, 1.5), (2.0, False, 2.0), (2.0, True, 2.0)])
def test_b30_upsampler_factor_comes_from_its_file(
    tmp_path: Path, scale: float, rational: bool, expected: float
) -> None:
    path = _upsampler(tmp_path, spatial_scale=scale, rational_resampler=rational)
    assert describe(TINY_20, path).upsample_scale == expected


def test_upsamplers_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="16 latent channels, the checkpoint has 128"):
        describe(TOY_23, TINY_UPSAMPLER)
    with pytest.raises(ValueError, match="works in time"):
        describe(TINY_20, _upsampler(tmp_path, temporal_upsample=True))
    with pytest.raises(ValueError, match="holds no latent upsampler"):
        describe(TINY_20, TINY_20)


def test_b92_another_gemma_is_refused_from_its_config(tmp_path: Path) -> None:
    folder = write_gemma(tmp_path / "gemma-4b", hidden_size=2560, num_hidden_layers=34)
    with pytest.raises(ValueError) as error:
        describe(published("23", tmp_path), text_encoder_path=folder)
    for part in ("2560", "35 hidden states", "3840", "49 states", "Gemma 3 12B", str(folder)):
        assert part in str(error.value)


def test_b91_a_single_file_that_cannot_be_a_text_encoder_is_refused(tmp_path: Path) -> None:
    path = write_header(tmp_path / "gemma.safetensors", {"model.layers.0.self_attn.q_proj.weight": (2, 2)})
    with pytest.raises(ValueError, match="is no text encoder: its first tensors are model.layers.0"):
        describe(TOY_23, text_encoder_path=path)


def test_incomplete_text_encoder_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no text encoder folder"):
        describe_text_encoder(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no config.json"):
        describe_text_encoder(tmp_path / "empty")
    folder = write_gemma(tmp_path / "gemma")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no model.safetensors"):
        describe_text_encoder(folder)
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(ValueError, match="lacks 2 of 2 weight files, such as model-00001-of-00002.safetensors"):
        describe_text_encoder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer"):
        describe_text_encoder(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(ValueError, match="'llama'"):
        describe_text_encoder(folder)


def test_a_part_of_a_checkpoint_says_what_is_missing(tmp_path: Path) -> None:
    vae = only(TINY_23, tmp_path / "vae.safetensors", "vae.")
    with pytest.raises(ValueError, match="holds no transformer. It has: video autoencoder"):
        describe(vae)
    transformer = only(TINY_23, tmp_path / "dit.safetensors", "model.diffusion_model.")
    facts = describe(transformer)  # connectors without the projection: legal until somebody encodes
    assert facts.text_hidden_size is None
    with pytest.raises(ValueError, match="holds no vocoder. It has: transformer, text connectors"):
        facts.require("vocoder")
    with pytest.raises(ValueError, match="no text projection"):
        describe(transformer, text_encoder_path=GEMMA)


@pytest.mark.parametrize(
    ("version", "numbers", "crf"),
    [
        (None, (2, 0), 33),
        ("2.3.0", (2, 3, 0), 33),
        ("2.4-rc1", (2, 4), 18),
        ("2-5-0", (2, 5, 0), 18),
        ("2.10", (2, 10), 18),
        ("newest", (2, 0), 33),
    ],
)
def test_version_selects_the_quality_of_conditioning_pictures(
    version: str | None, numbers: tuple[int, ...], crf: int
) -> None:
    facts = dataclasses.replace(describe(TOY_23), version=version)
    assert (facts.version_tuple, facts.image_crf) == (numbers, crf)


def test_facts_say_precision_layout_and_what_can_be_encoded(tmp_path: Path) -> None:
    facts = describe(TINY_20)
    assert (facts.precision, facts.layout, facts.gemma_version) == ("fp32", "one file", None)
    assert (facts.has_video_encoder, facts.has_audio_encoder, facts.has_diffusion_decoder) == (True, True, False)
    transformer = only(TINY_20, tmp_path / "dit.safetensors", "model.diffusion_model.", "text_embedding_projection.")
    facts = describe(transformer)
    assert (facts.layout, facts.has_video_encoder, facts.files) == ("split", False, (str(transformer),))
    assert describe(published("23", tmp_path)).precision == "bf16"


@pytest.mark.parametrize("dtype", ["I32", "BOOL", "U16"])
def test_tensors_of_a_wrong_dtype_are_refused_before_anything_loads(tmp_path: Path, dtype: str) -> None:
    shapes, config = published_layout("23")
    path = write_header(tmp_path / "x.safetensors", shapes, {"config": json.dumps(config)}, dtype=dtype)
    with pytest.raises(ValueError) as error:
        describe(path)
    assert str(path) in str(error.value) and dtype in str(error.value) and "\n" not in str(error.value)


def test_f7_a_video_autoencoder_of_another_width_is_refused(tmp_path: Path) -> None:
    small = split(TINY_23, tmp_path)["video_vae"]
    with pytest.raises(ValueError, match="makes latents of 16 channels, the transformer .* takes 128") as error:
        describe((TOY_23, small))
    assert str(small) in str(error.value) and str(TOY_23) in str(error.value)
    assert describe((TINY_23, small)).video_channels == 16


_WRONG = ("x", "1", 0, -1, 1.5, 10**400, float("nan"), None, True, [], [[]], [None], ["res_x"], {}, {"a": 1})
_PARTS = ("transformer", "connectors", "video_vae", "audio_vae", "vocoder")


@pytest.mark.parametrize("version", ["20", "23", "25"])
def test_f8_wrong_values_in_the_config_give_facts_or_one_sentence(
    tmp_path: Path, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Every value of every section becomes a value of another kind, one at a time."""
    caplog.set_level(logging.ERROR, logger="mgpu")
    broken = tmp_path / "x.safetensors"
    shapes, config = _only_header(version)
    num_refused = 0
    for (holder, key), value in zip(list(_places(config)), cycle(_WRONG), strict=False):
        kept, holder[key] = holder[key], value
        write_header(broken, shapes, {"config": json.dumps(config), "model_version": "2.3.0"})
        holder[key] = kept
        try:
            facts = describe(broken)
            for part in _PARTS:
                if part in facts.components:
                    facts.require(part)
        except ValueError as error:
            num_refused += 1
            assert str(broken) in str(error) and "\n" not in str(error), (key, value)
    assert num_refused > 50


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        (
            "transformer",
            {"caption_channels": 0},
            "'transformer' does not fit: caption_channels is 0, where a whole num",
        ),
        ("transformer", {"num_layers": True}, "num_layers is True"),
        ("transformer", {"positional_embedding_max_pos": [1, 2]}, r"a list of the form \[20, 2048, 2048\] is needed"),
        ("audio_vae", {"model": {"params": 7}}, "'audio_vae.model' does not fit: params is 7, where a group of keys"),
        ("audio_vae", {"preprocessing": {"stft": {"hop_length": "x"}}}, "hop_length is 'x'"),
        ("vae", {"decoder_blocks": [["res_x"]]}, "'vae.decoder_blocks' does not fit: a block is \\['res_x'\\]"),
        ("vae", {"decoder_blocks": 3}, "'vae.decoder_blocks' does not fit: it is 3"),
    ],
)
def test_f8_sentences_name_section_key_and_what_is_needed(
    tmp_path: Path, section: str, changes: dict[str, Any], words: str
) -> None:
    path = changed_copy(TINY_23, tmp_path / "x.safetensors", **{section: changes})
    with pytest.raises(ValueError, match=words) as error:
        describe(path)
    assert str(path) in str(error.value) and "damaged or needs a newer version" in str(error.value)


def test_f8_shapes_without_heads_are_of_no_published_model(tmp_path: Path) -> None:
    """A narrow transformer without config and connectors: its connectors would have no head."""
    tensors, _ = read_all(TINY_23)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if "_connector" not in name}
    path = write_header(tmp_path / "x.safetensors", shapes)
    with pytest.raises(ValueError, match="no published LTX-2 model: a transformer 64 wide"):
        describe(path)


@pytest.mark.parametrize("shape", [(), (0, 0), (3,), (1, 2, 3)])
def test_f8_shapes_that_are_no_matrix_are_of_no_published_model(tmp_path: Path, shape: tuple[int, ...]) -> None:
    shapes, _ = published_layout("23")
    path = write_header(tmp_path / "x.safetensors", {**shapes, "model.diffusion_model.patchify_proj.weight": shape})
    with pytest.raises(ValueError, match="no published LTX-2 model: a tensor proj_in.weight of shape"):
        describe(path)


def _only_header(version: str) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Returns shapes and config of a small model; 2.5's has the diffusion decoder in its config."""
    tensors, metadata = read_all(TINY_20 if version == "20" else TINY_23)
    config = json.loads(metadata["config"])
    config.pop("scheduler")
    if version == "25":
        vae = config["vae"]
        encoder = {"blocks": vae["encoder_blocks"], "out_channels": 16, "patch_size": 4, "in_channels": 3}
        decoder = {
            "in_channels": 16,
            "out_channels": 3,
            "patch_size": 4,
            "stage_channels": [64, 32, 16],
            "stage_depths": [1, 1, 1],
            "stage_kernels": [[3, 7, 7], [3, 5, 5]],
            "upsamples": [[[1, 2, 2], 2], [[2, 2, 2], 2]],
            "stage5_kernel": [3, 3, 3],
            "head_dim": 16,
            "t_emb_dim": 8,
        }
        config = {"transformer": config["transformer"], "vae": {"encoder": encoder, "decoder": decoder}}
        config["vae"]["_class_name"] = "CausalDiffusionVAE"
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}, config


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each container inside a config with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from _places(value[key])


def test_a_diffusion_decoder_is_refused_only_where_it_is_needed(tmp_path: Path) -> None:
    path = changed_copy(TINY_23, tmp_path / "x.safetensors", vae={"_class_name": "CausalDiffusionVAE"})
    facts = describe(path)
    assert facts.scale_factors == (8, 32, 32)
    facts.require("transformer")
    facts.require("connectors")
    with pytest.raises(ValueError, match="diffusion decoder"):
        facts.require("video_vae")
    with pytest.raises(ValueError, match="holds no vocoder"):
        facts.require("vocoder")


def test_reading_facts_imports_no_model_library() -> None:
    code = (
        "import sys; from mgpu_runtime.weights.facts import describe; "
        f"describe({str(TOY_23)!r}, {str(TOY_UPSAMPLER)!r}, {str(GEMMA)!r}); "
        "print([name for name in ('diffusers', 'transformers', 'safetensors.torch') if name in sys.modules])"
    )
    root = Path(__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


def _upsampler(folder: Path, **changes: object) -> Path:
    """Writes the tiny upsampler with another config."""
    tensors, metadata = read_all(TINY_UPSAMPLER)
    path = folder / "upsampler.safetensors"
    save_file(tensors, path, metadata={"config": json.dumps({**json.loads(metadata["config"]), **changes})})
    return path
