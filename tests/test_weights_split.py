"""Models split into a file per part, and files that lost prefixes or config: read as the whole model would be."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mgpu_runtime.models.audio_vae import AudioVAEBuilder
from mgpu_runtime.models.connectors import ConnectorsBuilder
from mgpu_runtime.models.transformer_builder import TransformerBuilder
from mgpu_runtime.models.video_vae import VideoVAEBuilder
from mgpu_runtime.models.vocoder import VocoderBuilder
from mgpu_runtime.pipeline.client import LTXClient
from mgpu_runtime.pipeline.settings import LTXSettings
from mgpu_runtime.weights.audio_configs import audio_vae_kwargs, vocoder_kwargs
from mgpu_runtime.weights.bundle import Checkpoint, read_checkpoint
from mgpu_runtime.weights.checkpoint import CheckpointFile
from mgpu_runtime.weights.configs import connectors_kwargs, transformer_kwargs
from mgpu_runtime.weights.facts import describe
from mgpu_runtime.weights.keymaps import COMPONENTS
from mgpu_runtime.weights.registry import StateDictRegistry
from mgpu_runtime.weights.vae_configs import upsampler_kwargs, video_vae_kwargs
from tests.weights_files import (
    GEMMA,
    TINY_20,
    TINY_23,
    TINY_UPSAMPLER,
    TOY_23,
    only,
    published,
    published_layout,
    published_split,
    read_all,
    split,
    write_header,
)

PREFIX = "model.diffusion_model."
KWARGS = {
    "transformer": transformer_kwargs,
    "connectors": connectors_kwargs,
    "video_vae": video_vae_kwargs,
    "audio_vae": audio_vae_kwargs,
    "vocoder": vocoder_kwargs,
}
BUILDERS = (TransformerBuilder, ConnectorsBuilder, VideoVAEBuilder, AudioVAEBuilder, VocoderBuilder)
DURATION_HEAD = {
    "video_input_proj.weight": (256, 4096),
    "video_input_proj.bias": (256,),
    "video_modality_emb": (256,),
    "audio_input_proj.weight": (256, 2048),
    "audio_input_proj.bias": (256,),
    "audio_modality_emb": (256,),
    "attention_pooler.query_tokens": (1, 256),
    "attention_pooler.cross_attn.in_proj_weight": (768, 256),
    "attention_pooler.cross_attn.in_proj_bias": (768,),
    "attention_pooler.cross_attn.out_proj.weight": (256, 256),
    "attention_pooler.cross_attn.out_proj.bias": (256,),
    "mlp_hidden.weight": (256, 256),
    "mlp_hidden.bias": (256,),
    "mlp_out.weight": (1, 256),
    "mlp_out.bias": (1,),
}


@pytest.mark.parametrize("has_config", [True, False])
@pytest.mark.parametrize("strip", ["", PREFIX])
@pytest.mark.parametrize("source", [TINY_20, TINY_23, TOY_23], ids=lambda path: path.stem)
def test_b75_split_files_give_every_tensor_of_the_whole(
    tmp_path: Path, source: Path, strip: str, has_config: bool
) -> None:
    paths = tuple(split(source, tmp_path, has_config=has_config, strip=strip).values())
    registry = StateDictRegistry()
    whole = registry.checkpoint(source).components
    parts = registry.checkpoint(paths)
    assert {name: dict.fromkeys(names) for name, names in parts.components.items()} == {
        name: dict.fromkeys(names) for name, names in whole.items()
    }
    assert parts.unclaimed == ()
    for component in whole:
        expected, given = registry.get(source, component), registry.get(paths, component)
        assert all(given[name].dtype == tensor.dtype for name, tensor in expected.items())
        assert all(torch.equal(given[name], tensor) for name, tensor in expected.items())
        if has_config:
            assert KWARGS[component](parts) == KWARGS[component](registry.checkpoint(source))
    assert registry.files_read == 1 + len(paths)


@pytest.mark.parametrize("version", ["20", "23", "25"])
def test_b72_published_models_are_told_by_their_shapes(
    tmp_path: Path, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    paths = published_split(version, tmp_path, has_config=False)
    if version == "25":  # the table has no autoencoders: 2.5's convolutional one and its sound are as 2.3's
        paths |= {k: v for k, v in published_split("23", tmp_path, has_config=False).items() if k.endswith("vae")}
    registry = StateDictRegistry()
    with caplog.at_level(logging.WARNING, logger="mgpu"):
        bare = registry.checkpoint(tuple(paths.values()))
        facts = describe(tuple(paths.values()))
    assert (facts.generation, facts.version) == (f"2.{version[1]}", f"2.{version[1]}")
    messages = [record.getMessage() for record in caplog.records]
    assert any(str(paths["transformer"]) in text and f"as LTX-2.{version[1]}'s" in text for text in messages)
    whole = read_checkpoint(published(version, tmp_path))
    for component in whole.components:
        assert KWARGS[component](bare) == KWARGS[component](whole)
    for builder in BUILDERS:
        builder(tuple(paths.values()), registry=registry).check()
    assert registry.files_read == 0


@pytest.mark.parametrize("version", ["20", "23", "25"])
def test_published_models_in_files_with_their_own_sections(tmp_path: Path, version: str) -> None:
    paths = published_split(version, tmp_path)
    parts, whole = read_checkpoint(tuple(paths.values())), read_checkpoint(published(version, tmp_path))
    for component in whole.components:
        assert KWARGS[component](parts) == KWARGS[component](whole)
    facts = describe(tuple(paths.values()))
    assert (facts.layout, facts.version, facts.version_tuple) == ("split", f"2.{version[1]}.0", (2, int(version[1]), 0))
    assert parts.inferred == {}


@pytest.mark.parametrize("source", [TOY_23, TINY_20], ids=lambda path: path.stem)
def test_b72_small_models_of_published_layout_are_told_too(tmp_path: Path, source: Path) -> None:
    bare = read_checkpoint(tuple(split(source, tmp_path, has_config=False).values()))
    whole = read_checkpoint(source)
    for component in ("video_vae", "audio_vae", "vocoder"):
        assert KWARGS[component](bare) == KWARGS[component](whole)
    if source == TOY_23:  # 2.0's heads are in no shape
        expected = {**transformer_kwargs(whole), "caption_channels": 3840}
        assert transformer_kwargs(bare) == expected
    tensors, metadata = read_all(TINY_UPSAMPLER)
    save_file(tensors, tmp_path / "upsampler.safetensors")
    assert upsampler_kwargs(read_checkpoint(tmp_path / "upsampler.safetensors")) == upsampler_kwargs(
        read_checkpoint(TINY_UPSAMPLER)
    )


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"transformer_blocks.0.scale_shift_table": (7, 4096)}, "7 modulation rows"),
        ({"transformer_blocks.0.scale_shift_table": (6, 4096)}, "6 modulation rows, attention gates"),
        ({"transformer_blocks.0.ff.net.2.bias": None}, "no feed-forward biases"),
        ({"audio_patchify_proj.weight": None}, "older LTX-Video checkpoint without sound"),
    ],
)
def test_b76_a_transformer_of_no_published_generation_is_one_sentence(tmp_path: Path, change: dict, part: str) -> None:
    shapes, _ = published_layout("23")
    shapes |= {PREFIX + name: shape for name, shape in change.items()}
    path = write_header(tmp_path / "x.safetensors", {name: shape for name, shape in shapes.items() if shape})
    with pytest.raises(ValueError) as error:
        describe(path)
    text = str(error.value)
    assert str(path) in text and part in text and "\n" not in text and len(text) < 600


@pytest.mark.parametrize("name", ["decoder.up_blocks.1.conv.conv.weight", "encoder.down_blocks.1.conv.conv.weight"])
def test_b72_an_autoencoder_of_no_published_layout_is_refused_when_it_is_needed(tmp_path: Path, name: str) -> None:
    paths = published_split("23", tmp_path, has_config=False)
    shapes = {name: entry.shape for name, entry in CheckpointFile(paths["video_vae"]).keys.items()}
    shapes[name] = (6 * shapes[name][0], *shapes[name][1:])
    write_header(paths["video_vae"], shapes)
    facts = describe(tuple(paths.values()))
    facts.require("transformer")
    with pytest.raises(ValueError) as error:
        facts.require("video_vae")
    for part in (paths["video_vae"], '"config"', "video autoencoder", "resampler between", "original file"):
        assert str(part) in str(error.value)


@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "transformer.", PREFIX])
def test_prefixes_of_the_transformer_s_file(tmp_path: Path, prefix: str) -> None:
    tensors, metadata = read_all(TINY_20)
    renamed = {
        name.replace(PREFIX, prefix, 1) if name.startswith(PREFIX) else name: tensor for name, tensor in tensors.items()
    }
    save_file(renamed, tmp_path / "x.safetensors", metadata=metadata)
    changed, whole = read_checkpoint(tmp_path / "x.safetensors"), read_checkpoint(TINY_20)
    assert {n: set(c) for n, c in changed.components.items()} == {n: set(c) for n, c in whole.components.items()}


@pytest.mark.parametrize("source", [TINY_20, TOY_23], ids=lambda path: path.stem)
@pytest.mark.parametrize("component", ["video_vae", "audio_vae", "vocoder"])
def test_autoencoders_and_vocoders_without_prefix_are_told_apart(tmp_path: Path, source: Path, component: str) -> None:
    prefix = {"video_vae": "vae."}.get(component, f"{component}.")
    path = only(source, tmp_path / "bare.safetensors", prefix, strip=prefix)
    file, whole = read_checkpoint(path), read_checkpoint(source)
    assert set(file.components) == {component} and file.unclaimed == ()
    assert file.shapes(component) == whole.shapes(component)


@pytest.mark.parametrize("prefix", ["", "duration_head.", f"{PREFIX}duration_head."])
def test_duration_head_file(tmp_path: Path, prefix: str) -> None:
    metadata = {"config": json.dumps({"transformer": {"cross_attention_dim": 4096}, "duration_head": {}})}
    shapes = {prefix + name: shape for name, shape in DURATION_HEAD.items()}
    file = read_checkpoint(write_header(tmp_path / "head.safetensors", shapes, metadata))
    assert set(file.components) == {"duration_head"} and file.unclaimed == ()
    given = file.shapes("duration_head")
    assert given["attention_pooler.to_qkv.weight"] == (768, 256) and given["attention_pooler.to_qkv.bias"] == (768,)
    assert given["attention_pooler.to_out.bias"] == (256,) and len(given) == len(DURATION_HEAD)
    assert file.config_section("duration_head") == {}  # as published
    bare = read_checkpoint(write_header(tmp_path / "bare.safetensors", shapes))
    section = bare.config_section("duration_head")
    assert (section["num_pooler_heads"], section["pooler_hidden_dim"], bare.inferred) == (
        4,
        256,
        {"duration_head": "2.5"},
    )
    parts = (*published_split("25", tmp_path).values(), tmp_path / "head.safetensors")
    facts = describe(parts)
    facts.require("duration_head")
    assert "duration_head" in facts.components and read_checkpoint(parts).config["transformer"]["num_layers"] == 48


def test_the_file_for_one_part_beats_the_whole_model(tmp_path: Path) -> None:
    tensors, metadata = read_all(TINY_23)
    other = {n: torch.zeros_like(t) for n, t in tensors.items() if n.startswith(("vae.", "text_embedding_projection."))}
    for part in ("vae.", "text_embedding_projection."):
        save_file({n: t for n, t in other.items() if n.startswith(part)}, tmp_path / f"{part}safetensors", metadata)
    paths = (TINY_23, tmp_path / "vae.safetensors", tmp_path / "text_embedding_projection.safetensors")
    registry = StateDictRegistry()
    assert not any(t.any() for t in registry.get(paths, "video_vae").values())
    connectors = registry.get(paths, "connectors")
    assert not connectors["video_text_proj_in.weight"].any() and connectors["video_connector.learnable_registers"].any()
    file = registry.checkpoint(paths)
    assert (file.path, file.supplier("video_vae").path) == (str(TINY_23), str(paths[1]))
    assert file.where("connectors") == f"{TINY_23} and {paths[2]}"
    assert file.file_of("transformer", "proj_in.weight").path == str(TINY_23)


def test_two_whole_models_and_a_file_of_no_use_are_refused(tmp_path: Path) -> None:
    twin = tmp_path / "twin.safetensors"
    twin.symlink_to(TINY_23)
    with pytest.raises(ValueError, match="are two whole models, and both hold"):
        describe((TINY_23, twin))
    with pytest.raises(ValueError, match="nothing of it is used: it is or has a LoRA"):
        describe((TINY_23, write_header(tmp_path / "lora.safetensors", {"x.lora_A.weight": (2, 2)})))
    with pytest.raises(ValueError, match="nothing of it is used"):  # a preview autoencoder in the vae folder
        describe((TINY_23, write_header(tmp_path / "tae.safetensors", {"decoder.1.weight": (8, 2, 3, 3)})))


def test_the_text_encoder_s_own_projection_is_the_last_resort(tmp_path: Path) -> None:
    paths = split(TINY_23, tmp_path)
    tensors, _ = read_all(paths["text_projection"])
    layer = {"model.layers.0.self_attn.q_proj.weight": torch.ones(2, 2)}
    encoder = tmp_path / "gemma.safetensors"
    save_file({name: torch.zeros_like(t) for name, t in tensors.items()} | layer, encoder)
    registry = StateDictRegistry()
    assert registry.get((TINY_23, encoder), "connectors")["video_text_proj_in.weight"].any()
    alone = registry.checkpoint((paths["transformer"], encoder))
    assert alone.supplier("text projection").path == str(encoder)
    assert describe((paths["transformer"], encoder)).text_hidden_size == 32
    named = registry.checkpoint((paths["transformer"], encoder, paths["text_projection"]))
    assert named.supplier("text projection").path == str(paths["text_projection"])


def test_a_whole_model_with_a_text_encoder_inside_is_a_whole_model(tmp_path: Path) -> None:
    tensors, metadata = read_all(TINY_20)
    layer = {"text_encoders.gemma3.transformer.model.layers.0.self_attn.q_proj.weight": torch.ones(2, 2)}
    save_file(tensors | layer, tmp_path / "x.safetensors", metadata=metadata)
    facts = describe(tmp_path / "x.safetensors")
    facts.require("connectors")
    assert (facts.layout, facts.generation) == ("one file", "2.0")


def test_b91_what_is_missing_is_said_with_the_input_that_takes_it(tmp_path: Path) -> None:
    paths = split(TINY_20, tmp_path)
    facts = describe((paths["transformer"], paths["video_vae"]))
    facts.require("video_vae")
    with pytest.raises(ValueError) as error:
        facts.require("vocoder")
    for part in ("None of the chosen files holds a vocoder", paths["transformer"], paths["video_vae"], "as audio_vae"):
        assert str(part) in str(error.value)
    with pytest.raises(ValueError, match="no text projection"):
        facts.require("connectors")
    bare = only(TINY_20, tmp_path / "dit.safetensors", f"{PREFIX}patchify", f"{PREFIX}audio_patchify")
    with pytest.raises(ValueError, match="Choose a file with it as text_projection in Load LTX MGPU"):
        read_checkpoint(bare).component("connectors")


def test_text_projection_without_connectors_is_said(tmp_path: Path) -> None:
    tensors, metadata = read_all(TINY_20)
    kept = {name: tensor for name, tensor in tensors.items() if "_embeddings_connector" not in name}
    save_file(kept, tmp_path / "x.safetensors", metadata=metadata)
    facts = describe(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="has the text projection but no text connectors"):
        facts.require("connectors")


@pytest.mark.parametrize(
    ("slot", "part", "words"),
    [
        ("video_vae", "audio_vae", ("no video autoencoder", "audio autoencoder, vocoder", "and this one as audio_vae")),
        ("audio_vae", "video_vae", ("no audio autoencoder or vocoder", "video autoencoder", "this one as video_vae")),
        ("text_projection", "video_vae", ("no text projection", "video autoencoder", "this one as video_vae")),
        ("duration_head", "text_projection", ("no duration head", "text projection", "this one as text_projection")),
    ],
)
def test_a_file_must_hold_what_its_input_is_for(tmp_path: Path, slot: str, part: str, words: tuple[str, ...]) -> None:
    paths = {name: str(path) for name, path in split(TOY_23, tmp_path).items()}
    with pytest.raises(ValueError) as error:
        LTXClient(LTXSettings(str(TOY_23), devices="cpu:1", **{slot: paths[part]})).check()
    said = str(error.value)
    assert said.startswith(f"{slot} is {paths[part]}, which holds") and all(word in said for word in words)
    own = {name: path for name, path in paths.items() if name != "transformer"}
    LTXClient(LTXSettings(str(TOY_23), devices="cpu:1", **own)).check()
    with pytest.raises(ValueError, match="checkpoint is .*, which holds no transformer"):
        LTXClient(LTXSettings(paths["video_vae"], devices="cpu:1", video_vae=str(TOY_23))).check()


def test_settings_name_every_file_once_and_in_order() -> None:
    settings = LTXSettings(
        checkpoint="/m/dit.safetensors",
        text_encoder=str(GEMMA),
        video_vae="/m/v.safetensors",
        audio_vae="/m/a.safetensors",
        text_projection="/m/a.safetensors",
    )
    assert settings.checkpoint_files() == ("/m/dit.safetensors", "/m/v.safetensors", "/m/a.safetensors")
    assert settings.files() == ("/m/dit.safetensors", str(GEMMA), "/m/v.safetensors", "/m/a.safetensors")
    single = LTXSettings(checkpoint="/m/dit.safetensors", text_encoder=str(TINY_20))
    assert single.checkpoint_files() == ("/m/dit.safetensors", str(TINY_20))
    with pytest.raises(ValueError, match="duration_head must be an absolute path"):
        LTXSettings(checkpoint="/m/dit.safetensors", duration_head="head.safetensors")


def test_components_have_sentences_and_one_file_is_a_bundle_of_one() -> None:
    file = Checkpoint([CheckpointFile(TINY_20)])
    assert file.config["vae"] == CheckpointFile(TINY_20).config["vae"]
    assert set(file.components) < set(COMPONENTS)
    assert file.entry("transformer", "proj_in.weight").dtype == "F32"


def test_a_part_s_file_that_changes_is_read_anew(tmp_path: Path) -> None:
    paths = tuple(split(TINY_23, tmp_path).values())
    registry = StateDictRegistry()
    vae = paths[1]
    assert registry.get(paths, "video_vae")["latents_mean"].any()
    tensors, metadata = read_all(vae)
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, vae, metadata=metadata)
    assert not registry.get(paths, "video_vae")["latents_mean"].any()
    assert registry.files_read == 2  # the part alone, twice
    registry.forget(vae)
    registry.get(paths, "video_vae")
    assert registry.files_read == 3
