"""LoRA files: every dialect of names, what is refused and in which words, what is reported."""

import json
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mgpu_runtime.models.lora import LoRAFuser, read_deltas
from mgpu_runtime.pipeline.client import LTXClient
from mgpu_runtime.pipeline.jobs import LoRASpec
from mgpu_runtime.pipeline.settings import LTXSettings
from mgpu_runtime.weights.bundle import read_checkpoint
from mgpu_runtime.weights.lora import LoRAFile
from mgpu_runtime.weights.lora_names import split_key
from mgpu_runtime.weights.lora_targets import LoRATarget, LoRATargets, match_lora
from tests import tiny
from tests.lora_files import DIALECTS, HALVES, KOHYA, LORA_23, Dialect, random_pair, targets, write_lora
from tests.weights_files import TINY_20, TINY_23, only, published, read_all, write_header, write_raw

TO_Q = "transformer_blocks.0.attn1.to_q"
CONNECTOR = "video_embeddings_connector.transformer_1d_blocks.0.attn1.to_q"


def names_in_file(checkpoint: Path) -> dict[str, tuple[str, str]]:
    """Lists the checkpoint's own name of each linear layer -> component, name in the module."""
    file = read_checkpoint(checkpoint)
    names = {}
    for component in ("transformer", "connectors"):
        shapes = file.shapes(component)
        for target, source in file.component(component).items():
            if target.endswith(".weight") and len(shapes[target]) == 2:
                name = source.removeprefix("model.diffusion_model.").removesuffix(".weight")
                names[name] = (component, target.removesuffix(".weight"))
    return names


NAMES_23 = names_in_file(TINY_23)


@pytest.fixture(scope="module")
def tiny_targets() -> LoRATargets:
    return targets()


def refusal(path: Path, against: LoRATargets) -> str:
    """Returns the one sentence with which a file is refused."""
    with pytest.raises(ValueError) as caught:
        match_lora(LoRAFile(path), against)
    text = str(caught.value)
    assert str(path) in text and "\n" not in text
    return text


# Names


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: f"{d.prefix}*.{d.halves[0]}")
def test_b54_b55_b58_a_pair_finds_its_module_in_every_dialect(
    tmp_path: Path, dialect: Dialect, tiny_targets: LoRATargets
) -> None:
    pairs = {TO_Q: random_pair(64, 64), "adaln_single.linear": random_pair(576, 64)}
    match = match_lora(LoRAFile(write_lora(tmp_path / "a.safetensors", pairs, dialect)), tiny_targets)
    assert set(match.pairs["transformer"]) == {TO_Q, "time_embed.linear"}
    assert (match.report.matched, match.report.unmatched, match.report.total) == (2, (), 2)


@pytest.fixture(scope="module")
def fused_model() -> tuple:
    """A transformer to fuse into, and a folder for the files."""
    return tiny.transformer("23")


@settings(max_examples=40, deadline=None)
@given(
    module=st.sampled_from(sorted(name for name, (component, _) in NAMES_23.items() if component == "transformer")),
    dialect=st.sampled_from(DIALECTS),
    as_diffusers=st.booleans(),
    alpha=st.sampled_from([None, 1.0, 4.0]),
)
def test_b55_any_dialect_of_any_module_gives_the_same_weights(
    fused_model: torch.nn.Module,
    tmp_path_factory: pytest.TempPathFactory,
    module: str,
    dialect: Dialect,
    as_diffusers: bool,
    alpha: float | None,
) -> None:
    _, name = NAMES_23[module]
    layer = fused_model.get_submodule(name)
    pair = random_pair(*layer.weight.shape)
    written = {name if as_diffusers else module: pair}
    path = write_lora(tmp_path_factory.mktemp("lora") / "a.safetensors", written, dialect, alpha=alpha)
    match = match_lora(LoRAFile(path), targets())
    fuser = LoRAFuser(fused_model)
    before = layer.weight.clone()
    fuser.fuse(read_deltas([(match, 0.5)], "transformer"))
    down, up = pair
    expected = before.double() + 0.5 * (1 if alpha is None else alpha / 2) * (up.double() @ down.double())
    assert torch.allclose(layer.weight.double(), expected, rtol=0, atol=1e-6)
    assert fuser.touched == {name}
    fuser.fuse({})
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("version", ["20", "23", "25"])
def test_b58_every_flattened_name_of_a_published_model_means_one_module(version: str, tmp_path: Path) -> None:
    checkpoint = published(version, tmp_path)
    found = targets(checkpoint)
    names = names_in_file(checkpoint)
    assert len(names) > 1000
    for module, (component, target) in names.items():
        for name in (module, module.replace(".", "_"), "lora_unet_" + target.replace(".", "_")):
            hit = found.find(name)
            assert (hit.component, hit.module) == (component, target), name


def test_a_transformer_in_a_file_without_prefixes_has_the_same_modules(tmp_path: Path) -> None:
    prefix = "model.diffusion_model."
    bare = targets(only(TINY_23, tmp_path / "bare.safetensors", prefix, strip=prefix))
    assert match_lora(LoRAFile(LORA_23), bare).report.matched == 21


def test_b58_an_ambiguous_flattened_name_is_refused() -> None:
    twins = [LoRATarget("transformer", name, (4, 4)) for name in ("block.to_q", "block_to.q", "other")]
    found = LoRATargets([(twin, twin.module) for twin in twins], "model.safetensors")
    with pytest.raises(ValueError, match="'lora_unet_block_to_q' may mean block.to_q and block_to.q"):
        found.find("lora_unet_block_to_q")
    assert found.find("block.to_q") is twins[0] and found.find("lora_unet_other") is twins[2]


@pytest.mark.parametrize(
    ("module", "component", "target"),
    [
        ("text_embedding_projection.video_aggregate_embed", "connectors", "video_text_proj_in"),
        ("connectors.audio_text_proj_in", "connectors", "audio_text_proj_in"),
        ("diffusion_model." + CONNECTOR, "connectors", "video_connector.transformer_blocks.0.attn1.to_q"),
        ("lora_unet_" + CONNECTOR.replace(".", "_"), "connectors", "video_connector.transformer_blocks.0.attn1.to_q"),
        ("transformer.proj_in", "transformer", "proj_in"),
        ("transformer.audio_prompt_adaln.linear", "transformer", "audio_prompt_adaln.linear"),
        ("diffusion_model.audio_prompt_adaln_single.linear", "transformer", "audio_prompt_adaln.linear"),
        ("transformer.av_cross_attn_video_a2v_gate.linear", "transformer", "av_cross_attn_video_a2v_gate.linear"),
    ],
)
def test_names_of_the_checkpoint_and_of_diffusers_reach_their_component(
    tiny_targets: LoRATargets, module: str, component: str, target: str
) -> None:
    named = split_key(f"{module}.lora_A.weight")[0]
    hit = tiny_targets.find(named)
    assert (hit.component, hit.module) == (component, target)


def test_one_module_in_two_dialects_is_refused(tmp_path: Path, tiny_targets: LoRATargets) -> None:
    for second in (Dialect(""), Dialect(halves=HALVES[2]), KOHYA):
        first, _ = read_all(write_lora(tmp_path / "1.safetensors", {TO_Q: random_pair(64, 64)}))
        other, _ = read_all(write_lora(tmp_path / "2.safetensors", {TO_Q: random_pair(64, 64)}, second))
        save_file(first | other, tmp_path / "a.safetensors")
        assert "twice" in refusal(tmp_path / "a.safetensors", tiny_targets)


# Scale


@pytest.mark.parametrize(("rank", "alpha", "factor"), [(8, 16, 2.0), (64, 32, 0.5), (384, None, 1.0)])
def test_b59_alpha_over_rank_scales_the_pair(tmp_path: Path, rank: int, alpha: float | None, factor: float) -> None:
    file = LoRAFile(write_lora(tmp_path / "a.safetensors", {TO_Q: random_pair(64, 64, rank=rank)}, alpha=alpha))
    assert file.factor(file.pairs[TO_Q]) == factor
    assert file.ranks == (rank,) and file.alphas == ({} if alpha is None else {TO_Q: alpha})


@pytest.mark.parametrize(
    ("adapter", "factor"),
    [
        ({"transformer.r": 4, "transformer.lora_alpha": 8}, 2.0),
        ({"lora_alpha": 8, "alpha_pattern": {"attn1.to_q": 2}}, 0.5),
        ({"lora_alpha": 8, "alpha_pattern": {"attn2.to_q": 2}, "use_dora": None}, 2.0),
        ({"lora_alpha": 8, "use_rslora": True}, 4.0),
        ({"r": 4}, 1.0),
    ],
)
def test_an_alpha_that_diffusers_wrote_into_the_metadata_counts(tmp_path: Path, adapter: dict, factor: float) -> None:
    metadata = {"lora_adapter_metadata": json.dumps(adapter)}
    path = write_lora(tmp_path / "a.safetensors", {TO_Q: random_pair(64, 64, rank=4)}, metadata=metadata)
    file = LoRAFile(path)
    assert file.factor(file.pairs[TO_Q]) == factor
    own = LoRAFile(write_lora(path, {TO_Q: random_pair(64, 64, rank=4)}, alpha=4, metadata=metadata))
    assert own.factor(own.pairs[TO_Q]) == 1.0


@pytest.mark.parametrize("text", ["{", "[1]", '{"lora_alpha": "much"}', '{"alpha_pattern": {"(": 1}}'])
def test_unreadable_adapter_metadata_is_refused(tmp_path: Path, text: str) -> None:
    path = write_lora(tmp_path / "a.safetensors", {TO_Q: random_pair(64, 64)}, metadata={"lora_adapter_metadata": text})
    file = LoRAFile(path)
    with pytest.raises(ValueError, match="lora_adapter_metadata"):
        file.factor(file.pairs[TO_Q])


def test_an_alpha_that_is_no_number_is_refused(tmp_path: Path) -> None:
    for alpha in (torch.tensor(float("nan")), torch.ones(2)):
        tensors, _ = read_all(write_lora(tmp_path / "a.safetensors", {TO_Q: random_pair(64, 64)}, alpha=1))
        tensors[f"diffusion_model.{TO_Q}.alpha"] = alpha
        save_file(tensors, tmp_path / "b.safetensors")
        with pytest.raises(ValueError, match="an alpha is one number"):
            LoRAFile(tmp_path / "b.safetensors").alphas  # noqa: B018


def test_an_in_context_lora_says_how_its_reference_is_scaled(tmp_path: Path) -> None:
    metadata = {"reference_downscale_factor": "2", "reference_temporal_scale_factor": "4"}
    path = write_lora(tmp_path / "ic.safetensors", {TO_Q: random_pair(64, 64)}, metadata=metadata)
    assert (LoRAFile(path).reference_downscale, LoRAFile(path).reference_time_scale) == (2, 4)
    assert (LoRAFile(LORA_23).reference_downscale, LoRAFile(LORA_23).reference_time_scale) == (1, 1)
    bad = write_lora(path, {TO_Q: random_pair(64, 64)}, metadata={"reference_downscale_factor": "half"})
    with pytest.raises(ValueError, match="'reference_downscale_factor' is 'half'"):
        LoRAFile(bad).reference_downscale  # noqa: B018


# What does not fit


def test_b54_a_lora_of_which_nothing_matches_is_an_error(tmp_path: Path, tiny_targets: LoRATargets) -> None:
    path = write_lora(tmp_path / "wan.safetensors", {"blocks.0.self_attn.q": random_pair(64, 64)})
    said = refusal(path, tiny_targets)
    assert "another model" in said and "'blocks.0.self_attn.q'" in said and str(TINY_23) in said


def test_b54_what_matches_nothing_is_counted_named_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = {TO_Q: random_pair(64, 64), "transformer_blocks.9.attn1.to_q": random_pair(64, 64)}
    tensors, _ = read_all(write_lora(tmp_path / "a.safetensors", pairs))
    save_file({**tensors, "global_step": torch.zeros(1)}, tmp_path / "b.safetensors")
    client = LTXClient(LTXSettings(str(TINY_23), devices="cpu:1"))
    with caplog.at_level(logging.WARNING, "mgpu"):
        (report,) = client.check_loras([LoRASpec(str(tmp_path / "b.safetensors"))])
        client.check_loras([LoRASpec(str(tmp_path / "b.safetensors"), 0.5)])
    assert (report.matched, report.total) == (1, 2)
    assert report.unmatched == ("transformer_blocks.9.attn1.to_q", "global_step")
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "2 entries match nothing" in warnings[0] and "global_step" in warnings[0]


def test_a_lora_of_another_size_names_the_module_and_both_shapes(tmp_path: Path, tiny_targets: LoRATargets) -> None:
    path = write_lora(tmp_path / "a.safetensors", {TO_Q: random_pair(64, 32)})
    said = refusal(path, tiny_targets)
    assert f"'{TO_Q}'" in said and "[64, 32]" in said and "[64, 64]" in said
    assert "another model" in refusal(LORA_23, targets(published("23", tmp_path)))


@pytest.mark.parametrize("half", [0, 1])
def test_b63_a_module_with_one_half_is_an_error_that_names_it(tmp_path: Path, half: int) -> None:
    other = "transformer_blocks.1.attn1.to_q"
    tensors, _ = read_all(
        write_lora(tmp_path / "a.safetensors", {TO_Q: random_pair(64, 64), other: random_pair(64, 64)})
    )
    del tensors[f"diffusion_model.{other}.{HALVES[0][half]}"]
    save_file(tensors, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=f"incomplete: module '{other}' lacks {'AB'[half]}.*Nothing of it was applied"):
        LoRAFile(tmp_path / "b.safetensors")


def test_halves_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    down, up = random_pair(64, 64)
    for pair in ((down, up[:, :1]), (down[0], up), (down[:0], up[:, :0])):
        with pytest.raises(ValueError, match=f"damaged.*module '{TO_Q}'|module '{TO_Q}' are"):
            LoRAFile(write_lora(tmp_path / "a.safetensors", {TO_Q: pair}))


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [
        ("dora_scale", "a DoRA"),
        ("lora_magnitude_vector", "a DoRA"),
        ("lora_magnitude_vector.default.weight", "a DoRA"),
        ("hada_w1_a", "a LoHa"),
        ("lokr_w2", "a LoKr"),
        ("oft_blocks", "an OFT"),
        ("diff", "whole weight differences"),
        ("diff_b", "whole weight differences"),
        ("lora_B.bias", "parts beside A and B"),
        ("lora_A.weight_scale", "scaled 8-bit"),
    ],
)
def test_other_kinds_of_adapters_are_refused_by_name(
    tmp_path: Path, tiny_targets: LoRATargets, suffix: str, kind: str
) -> None:
    tensors, _ = read_all(write_lora(tmp_path / "a.safetensors", {TO_Q: random_pair(64, 64)}))
    key = f"diffusion_model.{TO_Q}.{suffix}"
    save_file({**tensors, key: torch.zeros(1)}, tmp_path / "b.safetensors")
    said = refusal(tmp_path / "b.safetensors", tiny_targets)
    assert kind in said and repr(key) in said


def test_a_model_in_place_of_a_lora_is_refused_by_what_it_is(tmp_path: Path, tiny_targets: LoRATargets) -> None:
    assert "is not a LoRA" in refusal(TINY_20, tiny_targets)
    whole = refusal(published("23", tmp_path), tiny_targets)  # its vocoder has alphas
    assert "It is an LTX-2 model: transformer, text connectors" in whole and "Choose a file of models/loras" in whole
    part = only(TINY_23, tmp_path / "vae.safetensors", "vae.")
    assert "It is a part of LTX-2: video autoencoder." in refusal(part, tiny_targets)
    shapes = {"model.layers.0.self_attn.q_proj.weight": (2, 2)}
    assert "It is a language model" in refusal(write_header(tmp_path / "gemma.safetensors", shapes), tiny_targets)
    shapes = {f"model.diffusion_model.{name}": (2, 2) for name in ("patchify_proj.weight", "proj_out.weight_scale")}
    assert "is not a LoRA" in refusal(write_header(tmp_path / "fp8.safetensors", shapes), tiny_targets)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: path.write_bytes(LORA_23.read_bytes()[:-100]), "cut off"),
        (lambda path: write_raw(path, b"{" + b" " * 5), "not valid JSON"),
        (lambda path: path.write_bytes(b"\xff\xff\0\0\0\0\0\0{"), "cut off inside its header"),
        (lambda path: path.write_bytes(b""), "only 0 bytes"),
        (lambda path: path.write_text("version https://git-lfs"), "Git LFS pointer"),
        (lambda path: write_raw(path, b"{}"), "is not a LoRA"),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, tiny_targets: LoRATargets, write, words: str) -> None:
    write(tmp_path / "a.safetensors")
    assert words in refusal(tmp_path / "a.safetensors", tiny_targets)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    client = LTXClient(LTXSettings(str(TINY_23), devices="cpu:1"))
    with pytest.raises(ValueError, match="There is no file .*gone.safetensors"):
        client.check_loras([LoRASpec(str(tmp_path / "gone.safetensors"))])


def test_numbers_that_are_none_are_refused_before_anything_is_fused(tmp_path: Path, tiny_targets: LoRATargets) -> None:
    down, up = random_pair(64, 64)
    with pytest.raises(ValueError, match="has dtype I32"):
        LoRAFile(write_lora(tmp_path / "a.safetensors", {TO_Q: (down.int(), up)}))
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        damaged = up.clone()
        damaged[3, 1] = float("nan")
        path = write_lora(tmp_path / "b.safetensors", {TO_Q: (down.to(dtype), damaged.to(dtype))})
        with pytest.raises(ValueError, match=r"lora_B.weight' holds values that are not finite"):
            read_deltas([(match_lora(LoRAFile(path), tiny_targets), 1.0)], "transformer")


def test_b80_links_spaces_and_other_scripts_in_names(tmp_path: Path, tiny_targets: LoRATargets) -> None:
    blob = write_lora(tmp_path / "3f786850e387550fdab836ed7e6dc881de23001b", {TO_Q: random_pair(64, 64)})
    folder = tmp_path / "my löras 模型"
    folder.mkdir()
    link = folder / "stil — два.safetensors"
    link.symlink_to(blob)
    file = LoRAFile(link)
    assert file.path == str(link) and file.name == "stil — два"
    assert read_deltas([(match_lora(file, tiny_targets), 1.0)], "transformer").keys() == {TO_Q}
