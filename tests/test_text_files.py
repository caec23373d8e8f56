"""Text encoders as people have them: folders and single files of Gemma 3 and 4, their tokenizers, and broken ones."""

import io
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from torch import Tensor, nn
from transformers import AutoModel

from mgpu_runtime.models.stored import StoredLinear
from mgpu_runtime.models.text_encoder import GemmaBuilder
from mgpu_runtime.models.text_tower import empty_tower, tower_config
from mgpu_runtime.parallel.text_encoder import AccelerateGemmaBuilder
from mgpu_runtime.weights.text_file import GEMMA_3_12B, GEMMA_4_12B
from mgpu_runtime.weights.text_source import describe_text_encoder, open_text_encoder
from tests.text_files import GEMMA_4, VERSION, pack, text_config, write_gemma_4, write_shapes
from tests.weights_files import GEMMA, read_all, write_header

FLOAT32 = {"device": "cpu", "dtype": torch.float32}
PROMPTS = ["a red ball moving right on a dark background", "", "a"]
SINGLE_FILES = [("gemma3", "model."), ("gemma3", "language_model.model."), ("gemma3", "")]
SINGLE_FILES += [("gemma4", "model."), ("gemma4", "model.language_model.")]


@pytest.fixture(scope="module")
def gemma_4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma_4(tmp_path_factory.mktemp("text") / "gemma-4")


@pytest.fixture(scope="module")
def spiece() -> bytes:
    """Trains a SentencePiece model with Gemma's special tokens."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["a red ball moving right on a dark background", "the quick brown fox jumps"] * 20),
        model_writer=model,
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
        **{f"{name}_id": number for number, name in enumerate(("pad", "eos", "bos", "unk"))},
        **{f"{name}_piece": f"<{name}>" for name in ("pad", "eos", "bos", "unk")},
    )
    return model.getvalue()


def states(path: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    return GemmaBuilder(path).build("cpu", dtype).encode(PROMPTS, max_length=128).hidden


@cache
def states_of_folder(folder: Path) -> Tensor:
    return states(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_states_are_those_of_transformers(gemma_4: Path, kind: str, dtype: torch.dtype) -> None:
    folder = GEMMA if kind == "gemma3" else gemma_4
    encoder = GemmaBuilder(folder).build("cpu", dtype)
    ids, mask = encoder.tokenizer.tokenize(PROMPTS, max_length=128)
    assert mask.sum(1)[1:3].tolist() == [1, 2]  # BOS alone, BOS and one token
    model = AutoModel.from_pretrained(folder, dtype=dtype).eval()  # with its towers of other senses
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    expected = torch.stack(output.hidden_states, dim=-1)
    assert torch.equal(encoder.encode(PROMPTS, max_length=128).hidden, expected)


@pytest.mark.parametrize(("kind", "prefix"), SINGLE_FILES)
def test_a_single_file_gives_what_its_folder_gives(gemma_4: Path, tmp_path: Path, kind: str, prefix: str) -> None:
    folder = GEMMA if kind == "gemma3" else gemma_4
    file = pack(folder, tmp_path / "gemma.safetensors", prefix=prefix)
    assert torch.equal(states(file), states_of_folder(folder))
    facts, of_folder = describe_text_encoder(file), describe_text_encoder(folder)
    assert facts.is_file and not of_folder.is_file
    assert (facts.model_type, facts.num_states, facts.gemma_version, facts.num_parameters) == (
        of_folder.model_type,
        of_folder.num_states,
        of_folder.gemma_version,
        of_folder.num_parameters,
    )
    assert facts.gemma_version == (VERSION if kind == "gemma4" else None)
    assert facts.num_parameters == sum(p.numel() for p in GemmaBuilder(folder).check().parameters()) + (
        GEMMA_4["num_hidden_layers"] if kind == "gemma4" else 0  # the layers' scalars are buffers
    )


def test_a_folder_in_parts_gives_what_a_whole_one_gives(tmp_path: Path) -> None:
    tensors, metadata = read_all(GEMMA / "model.safetensors")
    folder = tmp_path / "parts"
    folder.mkdir()
    names, parts = sorted(tensors), {}
    for number in range(2):
        part = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[number::2]}, folder / part, metadata=metadata)
        parts |= dict.fromkeys(names[number::2], part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}), encoding="utf-8")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        os.symlink(GEMMA / name, folder / name)
    assert torch.equal(states(folder), states_of_folder(GEMMA))


def test_b81_weights_stay_views_of_the_file(gemma_4: Path) -> None:
    """On the CPU a weight of another dtype is turned at use, so that workers share the file's pages."""
    tower = GemmaBuilder(gemma_4).build("cpu", torch.float32).model
    assert tower.embed_tokens.weight.dtype == torch.bfloat16
    assert _mapped_file(tower.embed_tokens.weight) == str(gemma_4 / "model.safetensors")
    same = GemmaBuilder(gemma_4).build("cpu", torch.bfloat16).model
    assert {_mapped_file(tensor) for tensor in same.state_dict().values()} == {str(gemma_4 / "model.safetensors")}


def test_b91_projections_and_other_towers_are_left_out(gemma_4: Path, tmp_path: Path) -> None:
    source = open_text_encoder(pack(gemma_4, tmp_path / "gemma.safetensors"))
    assert set(source.tensors) == set(GemmaBuilder(gemma_4).check().state_dict())
    assert set(source.assets) == {"tokenizer.json", "tokenizer_config.json"}


def test_the_packed_tokenizer_is_the_folder_s_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = pack(GEMMA, tmp_path / "gemma.safetensors")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    packed = GemmaBuilder(file).build("cpu", torch.bfloat16).tokenizer
    own = GemmaBuilder(GEMMA).build("cpu", torch.bfloat16).tokenizer
    for text in [*PROMPTS, "Zwölf Füße,  é\n\n<bos>", "<start_of_turn>user"]:
        assert torch.equal(packed.tokenize([text], max_length=128)[0], own.tokenize([text], max_length=128)[0])
    assert (packed.bos, packed.pad) == (own.bos, own.pad) and not list(scratch.iterdir())


def test_a_packed_tokenizer_without_its_config_is_gemma_s(tmp_path: Path) -> None:
    tensors, metadata = read_all(pack(GEMMA, tmp_path / "gemma.safetensors"))
    del tensors["hf_asset__tokenizer_config.json"]
    save_file(tensors, tmp_path / "bare.safetensors", metadata=metadata)
    assert torch.equal(states(tmp_path / "bare.safetensors"), states_of_folder(GEMMA))


def test_a_sentencepiece_tokenizer_inside_or_in_a_folder(tmp_path: Path, spiece: bytes) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(GEMMA, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    (folder / "tokenizer.model").write_bytes(spiece)
    reference = SentencePieceProcessor(model_proto=spiece)
    for path in (folder, pack(GEMMA, tmp_path / "gemma.safetensors", tokenizer=spiece)):
        tokenizer = GemmaBuilder(path).build("cpu", torch.bfloat16).tokenizer
        ids, mask = tokenizer.tokenize([" a red  ball\nmoves é ", ""], max_length=128)
        assert ids[0][mask[0].bool()].tolist() == [2, *reference.encode("a red  ball\nmoves é")]
        assert ids[1][mask[1].bool()].tolist() == [2] and ids[1, 0] == 0
        assert tokenizer.to_text(tokenizer.to_ids("red ball")) == "red ball"


@pytest.mark.parametrize(("known", "kind"), [(GEMMA_3_12B, "Gemma 3"), (GEMMA_4_12B, "Gemma 4")])
def test_a_12b_file_without_config_is_known_by_its_shapes(tmp_path: Path, known: dict, kind: str) -> None:
    tower = empty_tower(tower_config({**known, "vocab_size": 262144}, "x"))
    shapes = {f"model.{name}": tuple(tensor.shape) for name, tensor in tower.state_dict().items()}
    path = write_shapes(tmp_path / "gemma.safetensors", shapes)
    facts = describe_text_encoder(path)
    assert (facts.family, facts.hidden_size, facts.num_states) == (kind, 3840, 49)
    assert facts.num_parameters == sum(tensor.numel() for tensor in tower.state_dict().values())
    GemmaBuilder(path).check()
    shapes["model.layers.3.mlp.up_proj.weight"] = (15360, 3841)
    with pytest.raises(ValueError, match="1 of another shape .layers.3.mlp.up_proj.weight"):
        GemmaBuilder(write_shapes(tmp_path / "other.safetensors", shapes)).check()


def test_b92_a_file_of_another_size_without_config_is_refused(tmp_path: Path) -> None:
    shapes = {f"model.layers.{i}.self_attn.q_proj.weight": (2048, 2560) for i in range(34)}
    path = write_shapes(tmp_path / "4b.safetensors", {"model.embed_tokens.weight": (8, 2560), **shapes})
    with pytest.raises(ValueError, match="this is hidden size 2560 and 34 layers"):
        describe_text_encoder(path)


def test_broken_single_files_say_what_is_wrong(tmp_path: Path) -> None:
    tensors, metadata = read_all(pack(GEMMA, tmp_path / "gemma.safetensors"))

    def refusal(match: str, changed: dict[str, Tensor | None], **other: str) -> None:
        path = tmp_path / "broken.safetensors"
        kept = {name: tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None}
        save_file(kept, path, metadata={**metadata, **other})
        with pytest.raises(ValueError, match=match) as error:
            GemmaBuilder(path).build("cpu", torch.float32)
        assert str(path) in str(error.value) and "\n" not in str(error.value)

    norm = "model.layers.1.self_attn.q_norm.weight"
    refusal("holds no tokenizer .a tensor tokenizer_json or spiece_model", {"tokenizer_json": None})
    refusal("tokenizer_json is F32, not bytes", {"tokenizer_json": torch.ones(3)})
    refusal("tokenizer.json of .* is damaged", {"tokenizer_json": torch.full((9,), 65, dtype=torch.uint8)})
    refusal("tokenizer inside .* is damaged", {"tokenizer_json": None, "spiece_model": torch.ones(9).byte()})
    refusal('"gemma_config" is not valid JSON', {}, gemma_config="{")
    refusal("is a 'llama' model, but LTX-2 needs Gemma", {}, gemma_config='{"model_type": "llama"}')
    refusal("does not say hidden_size", {}, gemma_config='{"model_type": "gemma3_text"}')
    refusal("cannot read the config", {}, gemma_config=_changed(metadata, rms_norm_eps="small"))
    refusal("1 missing .layers.1.self_attn.q_norm.weight", {norm: None})
    refusal("one tensor twice", {norm.replace("model.", "language_model."): torch.ones(16)})
    refusal("'model.layers.1.self_attn.q_norm.weight' as I32", {norm: torch.ones(16, dtype=torch.int32)})
    refusal("'layers.1.self_attn.q_norm.weight' holds numbers that are not finite", {norm: torch.ones(16) / 0})


def test_files_that_are_no_text_encoder(tmp_path: Path) -> None:
    vae = write_header(tmp_path / "vae.safetensors", {"vae.encoder.conv_in.conv.weight": (2, 2)})
    with pytest.raises(ValueError, match="is no text encoder: its first tensors are vae.encoder.conv_in.conv.weight"):
        describe_text_encoder(vae)
    whole = pack(GEMMA, tmp_path / "gemma.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is cut off"):
        describe_text_encoder(cut)
    with pytest.raises(ValueError, match="There is no text encoder"):
        describe_text_encoder(tmp_path / "absent.safetensors")


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_a_scaled_fp8_file_gives_what_its_values_give(gemma_4: Path, tmp_path: Path, kind: str) -> None:
    """As ComfyUI writes them: linear layers in fp8 with one scale and a marker each, the rest wide."""
    tensors, metadata = read_all(pack(GEMMA if kind == "gemma3" else gemma_4, tmp_path / "wide.safetensors"))
    stored, values = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.startswith("model.layers.") and "_proj" in name]:
        scale = tensors[name].float().abs().max() / 448
        stored[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        values[name] = stored[name].float() * scale
        stored[f"{name}_scale"] = scale
        marker = json.dumps({"format": "float8_e4m3fn"}).encode()
        stored[f"{name.removesuffix('weight')}comfy_quant"] = torch.tensor(list(marker), dtype=torch.uint8)
    save_file(stored, tmp_path / "fp8.safetensors", metadata=metadata)
    save_file(values, tmp_path / "values.safetensors", metadata=metadata)
    encoder = GemmaBuilder(tmp_path / "fp8.safetensors").build("cpu", torch.float32)
    layer = encoder.model.layers[0].self_attn.q_proj
    assert isinstance(layer, StoredLinear) and layer.stored.dtype == torch.float8_e4m3fn
    assert torch.equal(encoder.encode(PROMPTS, max_length=128).hidden, states(tmp_path / "values.safetensors"))
    spread = AccelerateGemmaBuilder(GemmaBuilder(tmp_path / "fp8.safetensors"), ["cpu", "cpu"]).build(**FLOAT32)
    assert torch.equal(spread.encode(PROMPTS, max_length=128).hidden, states(tmp_path / "values.safetensors"))
    source, wide = open_text_encoder(tmp_path / "fp8.safetensors"), open_text_encoder(tmp_path / "wide.safetensors")
    assert source.num_bytes(2) < 0.75 * wide.num_bytes(2)
    assert wide.num_bytes(2) == 2 * wide.facts.num_parameters
    facts = describe_text_encoder(tmp_path / "fp8.safetensors")
    assert facts.num_parameters == describe_text_encoder(tmp_path / "wide.safetensors").num_parameters


def test_a_format_that_is_not_run_is_refused_by_name(tmp_path: Path) -> None:
    tensors, metadata = read_all(pack(GEMMA, tmp_path / "gemma.safetensors"))
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.weight"] = torch.ones(128, 64, dtype=torch.int8)
    tensors[f"{name}.weight_scale"] = torch.ones(128, 1)
    marker = json.dumps({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}).encode()
    tensors[f"{name}.comfy_quant"] = torch.tensor(list(marker), dtype=torch.uint8)
    save_file(tensors, tmp_path / "int8.safetensors", metadata=metadata)
    with pytest.raises(ValueError, match="int8_tensorwise with convrot"):
        describe_text_encoder(tmp_path / "int8.safetensors")


def test_b88_old_and_new_rotary_settings_build_equal_models() -> None:
    plain = {key: value for key, value in text_config(GEMMA).items() if key not in ("rope_parameters", "layer_types")}
    old = {
        **plain,
        "rope_theta": 500000.0,
        "rope_local_base_freq": 20000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window_pattern": 3,
    }
    new = {
        **plain,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        },
    }
    towers = [empty_tower(tower_config(config, "x")) for config in (old, new)]
    assert towers[0].config.layer_types == towers[1].config.layer_types
    buffers = [dict(tower.named_buffers()) for tower in towers]
    assert buffers[0].keys() == buffers[1].keys() and len(buffers[0]) == 5
    assert all(torch.equal(buffer, buffers[1][name]) for name, buffer in buffers[0].items())
    default = dict(empty_tower(tower_config(text_config(GEMMA), "x")).named_buffers())
    assert not torch.equal(
        buffers[0]["rotary_emb.full_attention_inv_freq"], default["rotary_emb.full_attention_inv_freq"]
    )


@pytest.mark.parametrize(
    ("config", "installed", "needed"),
    [
        (GEMMA_3_12B, "4.57.3", "5.0.0"),
        (GEMMA_4_12B, "5.9.0", "5.10.1"),
        ({**GEMMA_4_12B, "model_type": "gemma4_text"}, "5.4.0", "5.5.0"),
    ],
)
def test_b88_a_transformers_that_is_too_old_is_named(config: dict, installed: str, needed: str) -> None:
    with pytest.raises(ValueError, match=f"needs transformers {needed} or newer, this is {installed}") as error:
        tower_config(config, "gemma", installed=installed)
    assert "\n" not in str(error.value)


def test_the_empty_tower_holds_no_weight() -> None:
    tower = empty_tower(tower_config({**GEMMA_4_12B, "vocab_size": 262144}, "x"))
    assert all(parameter.is_meta for parameter in tower.parameters())
    assert sum(layer.self_attn.v_proj is not None for layer in tower.layers) == 40
    assert all(isinstance(layer.self_attn.k_proj, nn.Linear) for layer in tower.layers)


def _mapped_file(tensor: Tensor) -> str | None:
    """Returns the file whose mapping a tensor's first byte is in."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, *_, name = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        if start <= tensor.data_ptr() < end:
            return name
    return None


def _changed(metadata: dict[str, str], **fields: object) -> str:
    config = json.loads(metadata["gemma_config"])
    config["text_config"].update(fields)
    return json.dumps(config)
