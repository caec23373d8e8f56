"""Reading checkpoint headers: what a file is, and one clear sentence for every broken one."""

import json
import logging
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mgpu_runtime.weights.audio_configs import audio_vae_kwargs, vocoder_kwargs
from mgpu_runtime.weights.bundle import read_checkpoint
from mgpu_runtime.weights.checkpoint import CheckpointFile
from mgpu_runtime.weights.configs import transformer_kwargs, transformer_values
from mgpu_runtime.weights.header import read_header
from mgpu_runtime.weights.keymaps import map_key
from mgpu_runtime.weights.vae_configs import video_vae_kwargs
from tests.weights_files import (
    TINY_20,
    TINY_23,
    TINY_UPSAMPLER,
    TOY_23,
    changed_copy,
    only,
    read_all,
    write_header,
    write_raw,
)


def sentence(error: pytest.ExceptionInfo[ValueError], *parts: object) -> None:
    """Checks that an error is one line that names all parts."""
    text = str(error.value)
    assert "\n" not in text and len(text) < 900
    for part in parts:
        assert str(part) in text


def test_reads_names_metadata_and_config() -> None:
    file = CheckpointFile(TINY_23)
    tensors, metadata = read_all(TINY_23)
    assert {name: entry.shape for name, entry in file.keys.items()} == {k: tuple(t.shape) for k, t in tensors.items()}
    assert dict(file.metadata) == metadata
    assert file.config == json.loads(metadata["config"])
    assert file.model_version == "2.3.0"
    assert file.unclaimed == ()


def test_missing_path_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        CheckpointFile(tmp_path / "none.safetensors")
    sentence(error, "There is no file", tmp_path / "none.safetensors")
    with pytest.raises(ValueError) as error:
        CheckpointFile(tmp_path)
    sentence(error, "folder", tmp_path)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "only 0 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"PK\x03\x04" + b"\0" * 40, "pickle"),
        (b"GGUF" + b"\0" * 40, "GGUF"),
        (struct.pack("<Q", 500) + b"{}", "cut off inside its header"),
        (struct.pack("<Q", 2) + b"{x", "not valid JSON"),
        (struct.pack("<Q", 3) + b"{\xff}", "not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a safetensors file"),
    ],
)
def test_other_content_is_no_safetensors_file(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        CheckpointFile(path)
    sentence(error, path, part)


def test_cut_off_data_names_both_sizes(tmp_path: Path) -> None:
    content = TINY_UPSAMPLER.read_bytes()
    path = tmp_path / "cut.safetensors"
    path.write_bytes(content[:-1000])
    with pytest.raises(ValueError) as error:
        CheckpointFile(path)
    header_bytes = struct.unpack("<Q", content[:8])[0]
    data = len(content) - 8 - header_bytes
    sentence(error, path, "cut off", data, data - 1000)


@pytest.mark.parametrize(
    ("header", "num_bytes", "part"),
    [
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 8, "4 bytes follow"),
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', 4, "'a'"),
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', 8, "expected 0"),
        ('{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}', 4, "F99"),
        ('{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', 4, "malformed"),
        ('{"a":[1]}', 0, "malformed"),
        ('{"__metadata__":{"config":{}}}', 0, "table of strings"),
    ],
)
def test_inconsistent_headers(tmp_path: Path, header: str, num_bytes: int, part: str) -> None:
    path = write_raw(tmp_path / "x.safetensors", header.encode(), num_bytes)
    with pytest.raises(ValueError) as error:
        CheckpointFile(path)
    sentence(error, path, part)


def test_b79_duplicate_header_key_is_named(tmp_path: Path) -> None:
    entry = '"vae.x":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    path = write_raw(tmp_path / "x.safetensors", f"{{{entry % (0, 4)},{entry % (4, 8)}}}".encode(), 8)
    with pytest.raises(ValueError) as error:
        CheckpointFile(path)
    sentence(error, path, "'vae.x' twice")


def test_b79_one_tensor_under_two_prefixes_is_an_error(tmp_path: Path) -> None:
    names = ("model.diffusion_model.patchify_proj.weight", "patchify_proj.weight")
    path = write_header(tmp_path / "x.safetensors", {name: (2, 2) for name in names}, {"config": "{}"})
    with pytest.raises(ValueError) as error:
        CheckpointFile(path).component("transformer")
    sentence(error, path, *names, "proj_in.weight")


def test_b72_file_without_config_says_what_to_choose(tmp_path: Path) -> None:
    names = {"audio_vae.encoder.conv_in.conv.weight": (2, 2)}
    for number, metadata in enumerate((None, {"format": "pt"})):
        path = write_header(tmp_path / f"{number}.safetensors", names, metadata)
        with pytest.raises(ValueError) as error:
            _ = CheckpointFile(path).config
        sentence(error, path, '"config"', "original file")


@pytest.mark.parametrize("text", ["{", "not json", "[1]"])
def test_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    path = write_header(tmp_path / "x.safetensors", {"vae.x": (1,)}, {"config": text})
    with pytest.raises(ValueError) as error:
        _ = CheckpointFile(path).config
    sentence(error, path, "JSON")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("diffusion_model.transformer_blocks.0.attn1.to_q.lora_A.weight", "a LoRA"),
        ("model.layers.0.self_attn.q_proj.weight", "a language model"),
        ("model.diffusion_model.patchify_proj.weight", "older LTX-Video"),
        ("post_upsample_res_blocks.0.conv1.weight", "a latent upsampler"),
        ("first_stage_model.decoder.conv_in.weight", "another model's file"),
    ],
)
def test_another_model_is_named(tmp_path: Path, name: str, kind: str) -> None:
    path = write_header(tmp_path / "x.safetensors", {name: (2, 2)})
    with pytest.raises(ValueError) as error:
        CheckpointFile(path).component("transformer" if "patchify" not in name else "vocoder")
    sentence(error, path, kind, "not an LTX-2 checkpoint")


def test_b80_links_spaces_and_other_alphabets(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / "5f2a9c"
    blob.parent.mkdir()
    blob.write_bytes(TINY_UPSAMPLER.read_bytes())
    link = tmp_path / "modèle нейро 模型 x2.safetensors"
    link.symlink_to(blob)
    file = CheckpointFile(link)
    assert file.path == str(link)  # the link's own name, not the blob's
    assert len(file.component("upsampler")) == 24


def test_missing_component_says_what_the_file_has(tmp_path: Path) -> None:
    path = only(TINY_20, tmp_path / "vae.safetensors", "vae.")
    assert len(CheckpointFile(path).component("video_vae")) == 71 - 3  # three statistics are not needed
    with pytest.raises(ValueError) as error:
        CheckpointFile(path).component("vocoder")
    sentence(error, path, "no vocoder", "It has: video autoencoder")


def test_prefix_of_the_transformer_is_optional(tmp_path: Path) -> None:
    prefix = "model.diffusion_model."
    path = only(TINY_23, tmp_path / "bare.safetensors", prefix, "text_embedding_projection.", strip=prefix)
    bare, full = CheckpointFile(path), CheckpointFile(TINY_23)
    for component in ("transformer", "connectors"):
        assert bare.component(component).keys() == full.component(component).keys()
    assert bare.unclaimed == ()


def test_b74_unknown_keys_are_warned_about_by_name_and_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {"_class_name": "AVTransformer3DModel", "_diffusers_version": "0.1", "norm_num_groups": 32, "new_trick": 1}
    file = read_checkpoint(changed_copy(TINY_23, tmp_path / "x.safetensors", transformer=extra))
    with caplog.at_level(logging.WARNING, logger="mgpu"):
        assert transformer_kwargs(file) == transformer_kwargs(read_checkpoint(TINY_23))
        transformer_kwargs(file)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1 and "new_trick" in messages[0] and "norm_num_groups" not in messages[0]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"qk_norm": "layer_norm"}, ("qk_norm", "layer_norm", "rms_norm")),
        ({"share_ff": True}, ("share_ff",)),
        ({"caption_proj_input_norm": True}, ("text side",)),
        ({"caption_projection_first_linear": None}, ("text side",)),
        ({"audio_num_attention_heads": 2}, ("4 attention heads", "audio 2")),
        ({"audio_cross_attention_dim": 64}, ("audio_cross_attention_dim", "32 wide")),
    ],
)
def test_unsupported_transformer_configs(tmp_path: Path, changes: dict, parts: tuple[str, ...]) -> None:
    path = changed_copy(TINY_23, tmp_path / "x.safetensors", transformer=changes)
    with pytest.raises(ValueError) as error:
        transformer_values(read_checkpoint(path))
    sentence(error, path, *parts)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"_class_name": "CausalDiffusionVAE"}, ("CausalDiffusionVAE", "diffusion decoder")),
        ({"norm_layer": "group_norm"}, ("norm_layer", "pixel_norm")),
        ({"decoder_blocks": [["res_x", {}], ["attn_res_x", {}], ["res_x", {}]]}, ("decoder_blocks", "attn_res_x")),
        ({"decoder_blocks": [["res_x", {"inject_noise": True}]]}, ("inject_noise", "draw noise")),
        ({"encoder_blocks": [["compress_all_res", {}]]}, ("encoder_blocks",)),
    ],
)
def test_unsupported_video_autoencoders(tmp_path: Path, changes: dict, parts: tuple[str, ...]) -> None:
    path = changed_copy(TINY_23, tmp_path / "x.safetensors", vae=changes)
    with pytest.raises(ValueError) as error:
        video_vae_kwargs(read_checkpoint(path))
    sentence(error, path, *parts)


def test_padding_mode_rules_both_sides_when_present(tmp_path: Path) -> None:
    def modes(**changes: object) -> tuple[str, str]:
        kwargs = video_vae_kwargs(read_checkpoint(changed_copy(TINY_23, tmp_path / "x.safetensors", vae=changes)))
        return kwargs["encoder_spatial_padding_mode"], kwargs["decoder_spatial_padding_mode"]

    assert modes(spatial_padding_mode="replicate", encoder_spatial_padding_mode="zeros") == ("replicate", "replicate")
    assert modes(spatial_padding_mode=None, encoder_spatial_padding_mode="reflect") == ("reflect", "reflect")
    assert modes(spatial_padding_mode=None, encoder_spatial_padding_mode=None) == ("zeros", "reflect")


def test_first_generator_is_clamped_and_the_extension_is_not() -> None:
    kwargs = vocoder_kwargs(read_checkpoint(TOY_23))
    assert (kwargs["final_act_fn"], kwargs["bwe_final_act_fn"]) == ("clamp", None)
    assert vocoder_kwargs(read_checkpoint(TINY_20))["final_act_fn"] == "tanh"


def test_audio_statistics_must_fit_the_latent(tmp_path: Path) -> None:
    tensors, metadata = read_all(TOY_23)
    config = json.loads(metadata["config"])
    config["audio_vae"]["model"]["params"]["ddconfig"]["ch"] = 64
    path = write_header(tmp_path / "x.safetensors", {"audio_vae.x": (1,)}, {"config": json.dumps(config)})
    with pytest.raises(ValueError) as error:
        audio_vae_kwargs(read_checkpoint(path))
    sentence(error, path, "64", "32")


@pytest.mark.parametrize(
    ("name", "component", "target"),
    [
        (
            "model.diffusion_model.audio_prompt_adaln_single.linear.bias",
            "transformer",
            "audio_prompt_adaln.linear.bias",
        ),
        ("vae.per_channel_statistics.mean-of-means", "video_vae", "latents_mean"),
        ("vae.per_channel_statistics.mean-of-stds", "video_vae", None),
        ("vae.decoder.up_blocks.7.conv.conv.bias", "video_vae", "decoder.up_blocks.3.upsamplers.0.conv.conv.bias"),
        (
            "vae.decoder.up_blocks.8.res_blocks.1.conv1.conv.bias",
            "video_vae",
            "decoder.up_blocks.3.resnets.1.conv1.conv.bias",
        ),
        (
            "vae.encoder.down_blocks.8.res_blocks.0.conv1.conv.bias",
            "video_vae",
            "encoder.mid_block.resnets.0.conv1.conv.bias",
        ),
        ("vocoder.vocoder.ups.0.weight", "vocoder", "vocoder.upsamplers.0.weight"),
        (
            "vocoder.bwe_generator.act_post.downsample.lowpass.filter",
            "vocoder",
            "bwe_generator.act_out.downsample.filter",
        ),
        (
            "vocoder.vocoder.resblocks.0.acts1.0.upsample.filter",
            "vocoder",
            "vocoder.resnets.0.acts1.0.upsample.filter",
        ),
        ("optimizer.state", None, None),
    ],
)
def test_names(name: str, component: str | None, target: str | None) -> None:
    assert map_key(name) == (component, target)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 4096), position=st.integers(0, 4096), byte=st.integers(0, 255))
def test_damage_never_gives_another_error(tmp_path: Path, cut: int, position: int, byte: int) -> None:
    whole = write_header(tmp_path / "whole.safetensors", {f"vae.{i}": (i, 2) for i in range(20)}, {"config": "{}"})
    content = bytearray(whole.read_bytes())
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(content[: cut % len(content)])
    with pytest.raises(ValueError) as error:
        read_header(damaged)
    sentence(error, damaged)
    content[position % len(content)] = byte
    damaged.write_bytes(content)
    try:
        read_header(damaged)
    except ValueError as problem:
        assert str(damaged) in str(problem)
