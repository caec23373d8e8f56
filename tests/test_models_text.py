"""Text: prompts to hidden states, hidden states to contexts."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from mgpu_runtime.models.connectors import build_connectors, connect
from mgpu_runtime.models.text_encoder import DamagedStatesError, GemmaBuilder, GemmaEncoder
from mgpu_runtime.weights.registry import StateDictRegistry
from tests.goldens import TOY, golden, read_case, relative_error
from tests.weights_files import GEMMA, TINY_20, TINY_23, TOY_23, published, write_gemma

TOLERANCE = 1e-4
FLOAT32 = {"device": "cpu", "dtype": torch.float32}
PROMPT = "a red ball moving right on a dark background"


@pytest.fixture(scope="module")
def registry() -> StateDictRegistry:
    return StateDictRegistry()


@pytest.fixture(scope="module")
def encoder(registry: StateDictRegistry) -> GemmaEncoder:
    return GemmaBuilder(GEMMA, checkpoint=registry.checkpoint(TOY_23)).build(**FLOAT32)


@pytest.mark.parametrize(("name", "path"), [("connectors_20_a", TINY_20), ("connectors_23_a", TINY_23)])
def test_connectors_are_the_official_ones(registry: StateDictRegistry, name: str, path: Path) -> None:
    case = golden(name)
    connectors = build_connectors(path, registry=registry, **FLOAT32)
    contexts = connect(connectors, case["hidden_states"], case["attention_mask"])
    assert relative_error(contexts.video, case["out.video_context"]) < TOLERANCE
    assert relative_error(contexts.audio, case["out.audio_context"]) < TOLERANCE
    assert torch.equal(contexts.mask, case["out.mask"])


@pytest.mark.parametrize("name", ["clip0", "clip1"])
def test_toy_states_are_the_reference(encoder: GemmaEncoder, name: str) -> None:
    """The reference keeps the last 32 of 128 positions, hidden-major (index = hidden * states + state)."""
    clip = read_case(TOY / "reference" / f"{name}.safetensors")
    states = encoder.encode([clip.facts["prompt"]], max_length=clip.facts["text_length"])
    assert states.hidden.shape == (1, 128, 64, 4) and states.mask.shape == (1, 128)
    reference = clip["text_hidden_states"]
    assert relative_error(states.hidden.flatten(2)[:, -32:], reference) < TOLERANCE
    real = reference.abs().sum(-1) > 0
    assert torch.equal(states.mask[:, -32:].bool(), real) and not states.mask[:, :-32].any()


def test_toy_contexts_do_not_depend_on_their_company(registry: StateDictRegistry, encoder: GemmaEncoder) -> None:
    connectors = build_connectors(TOY_23, registry=registry, **FLOAT32)
    alone = encoder.encode([PROMPT], max_length=128)
    together = encoder.encode(["", PROMPT], max_length=128)
    one = connect(connectors, alone.hidden, alone.mask)
    two = connect(connectors, together.hidden, together.mask)
    assert one.video.shape == (1, 128, 192) and one.audio.shape == (1, 128, 64) and bool(one.mask.all())
    assert relative_error(two.video[1:], one.video) < 1e-5 and relative_error(two.audio[1:], one.audio) < 1e-5
    assert torch.isfinite(two.video).all()


def test_b85_states_do_not_depend_on_the_amount_of_padding(encoder: GemmaEncoder) -> None:
    short = encoder.encode([PROMPT], max_length=128)
    long = encoder.encode([PROMPT], max_length=256)
    num_tokens = int(short.mask.sum())
    assert relative_error(long.hidden[:, -num_tokens:], short.hidden[:, -num_tokens:]) < 1e-5


def test_tokens_are_stripped_start_with_bos_and_stand_right(encoder: GemmaEncoder) -> None:
    tokenizer = encoder.tokenizer
    ids, mask = tokenizer.tokenize([PROMPT, f"  {PROMPT}\n", "", f"<bos>{PROMPT}"], max_length=128)
    num_tokens = int(mask[0].sum())
    assert torch.equal(ids[0], ids[1]) and torch.equal(ids[0], ids[3])
    assert mask[0].tolist() == [0] * (128 - num_tokens) + [1] * num_tokens
    assert (ids[0, -num_tokens], ids[0, 0]) == (2, 0)  # the toy's <bos> and <pad>
    assert 1 not in ids[0].tolist()  # its <eos>
    assert tokenizer.to_text(ids[0, -num_tokens + 1 :].tolist()) == PROMPT
    assert mask[2].sum() == 1 and ids[2, -1] == tokenizer.bos


def test_long_prompt_is_cut_with_a_warning(encoder: GemmaEncoder, caplog: pytest.LogCaptureFixture) -> None:
    """B83: a prompt of 1160 tokens met a limit of 1024."""
    with caplog.at_level(logging.WARNING, logger="mgpu"):
        ids, mask = encoder.tokenizer.tokenize(["red " * 200], max_length=128)
    assert mask.all() and ids[0, 0] == encoder.tokenizer.bos
    (message,) = [record.getMessage() for record in caplog.records]
    num_tokens = 1 + len(encoder.tokenizer.to_ids("red " * 199 + "red"))
    assert f"{num_tokens} tokens, the limit is 128" in message


@pytest.mark.parametrize("length", [0, 100, -128])
def test_text_length_must_fit_the_registers(encoder: GemmaEncoder, length: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 128, got {length}"):
        encoder.encode([PROMPT], max_length=length)


def test_b86_valid_tokens_move_to_the_front_and_registers_fill_by_position(registry: StateDictRegistry) -> None:
    """With the blocks taken out, a connector shows its layout: tokens in order, then register i at position i."""
    connectors = build_connectors(TINY_23, registry=registry, **FLOAT32)
    connector = connectors.video_connector
    connector.transformer_blocks = nn.ModuleList()
    connector.norm_out = nn.Identity()
    tokens = torch.randn(1, 256, 64)
    for num_tokens in (0, 1, 3, 200, 256):
        mask = torch.zeros(1, 256)
        mask[:, 256 - num_tokens :] = 1
        with torch.no_grad():
            result, _ = connector(tokens, (mask - 1)[:, None, None] * 3e38)
        registers = connector.learnable_registers.repeat(2, 1)[None]
        expected = torch.cat([tokens[:, 256 - num_tokens :], registers[:, num_tokens:]], dim=1)
        assert torch.equal(result, expected)


def test_b92_another_gemma_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    registry = StateDictRegistry()
    checkpoint = registry.checkpoint(published("23", tmp_path))
    folder = write_gemma(tmp_path / "gemma-4b", hidden_size=2560, num_hidden_layers=34)
    with pytest.raises(ValueError, match="hidden size 2560 and 35 hidden states"):
        GemmaBuilder(folder, checkpoint=checkpoint, registry=registry).build("cpu", torch.bfloat16)
    assert registry.files_read == 0


def test_states_of_another_encoder_are_refused(registry: StateDictRegistry) -> None:
    connectors = build_connectors(TOY_23, registry=registry, **FLOAT32)
    with pytest.raises(ValueError, match=r"\[64, 3\] a token, but the text projection takes \[64, 4\]"):
        connect(connectors, torch.zeros(1, 128, 64, 3), torch.ones(1, 128))


def test_text_encoder_is_the_text_tower_alone() -> None:
    registry = StateDictRegistry()
    model = GemmaBuilder(GEMMA, registry=registry).build("cpu", torch.bfloat16).model
    assert type(model).__name__ == "Gemma3TextModel" and registry.files_read == 1
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize(
    ("dtype", "remedy"), [(torch.float32, "weights are damaged"), (torch.float16, "precision bf16 or fp32")]
)
def test_states_that_are_not_finite_are_refused(dtype: torch.dtype, remedy: str) -> None:
    encoder = GemmaBuilder(GEMMA).build("cpu", dtype)
    encoder.model.norm.weight[0] = float("inf")
    with pytest.raises(DamagedStatesError, match=f"not finite in {str(dtype)[6:]}. .*{remedy}"):
        encoder.encode([PROMPT], max_length=128)


def test_b82_states_of_zeros_are_refused() -> None:
    encoder = GemmaBuilder(GEMMA).build(**FLOAT32)
    for parameter in encoder.model.norm.parameters():
        parameter.fill_(-1)  # Gemma 3 scales by one more than the weight
    with pytest.raises(DamagedStatesError, match="only zeros in 1 of 4 hidden states, the first is state 3"):
        encoder.encode([PROMPT], max_length=128)
