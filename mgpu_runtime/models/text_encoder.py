"""Text encoder: prompts become the hidden states of every Gemma 3 layer. Loads from a local folder only.

Letters: B batch, S tokens, D hidden size, L hidden states per token (layers + 1: the embedding comes first).
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, Gemma3TextModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ..weights.checkpoint import CheckpointFile
from ..weights.facts import check_text_encoder
from ..weights.registry import StateDictRegistry
from ..weights.text_folder import describe_text_encoder
from .connectors import check_text_length

log = logging.getLogger("mgpu")


@dataclass(frozen=True)
class TextStates:
    """Hidden states (B, S, D, L) in the encoder's dtype and mask (B, S) int64, 1 on real tokens; left-padded."""

    hidden: Tensor
    mask: Tensor


def build_text_encoder(
    path: str | os.PathLike,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    checkpoint: CheckpointFile | None = None,
    registry: StateDictRegistry | None = None,
) -> tuple[PreTrainedTokenizerBase, Gemma3TextModel]:
    """Loads tokenizer and text tower of a Gemma 3 folder straight onto `device` in `dtype`.

    With a `checkpoint`, its text projection is compared before any weight is read. With a `registry`, the read is
    counted. Raises ValueError with one sentence when the folder is incomplete or does not fit.
    """
    facts = describe_text_encoder(path)
    if checkpoint is not None:
        check_text_encoder(facts, checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(facts.path, local_files_only=True)
    transformers_logging.disable_progress_bar()  # it would fill a worker's log
    model, report = AutoModel.from_pretrained(
        facts.path,
        local_files_only=True,
        dtype=dtype,
        device_map={"": str(device)},  # else a whole copy is made in main memory first
        output_loading_info=True,
    )
    if registry is not None:
        registry.files_read += 1
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(f"The text encoder {facts.path} lacks {len(missing)} tensors, such as {missing[0]}.")
    tower = getattr(model, "language_model", model)  # without the vision tower of the multimodal Gemma
    left = [name for name, tensor in [*tower.named_parameters(), *tower.named_buffers()] if tensor.is_meta]
    assert not left, f"still empty after loading: {left[:4]}"
    return tokenizer, tower.requires_grad_(False).eval()


def tokenize(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], *, max_length: int) -> tuple[Tensor, Tensor]:
    """Returns token ids and mask, both (B, max_length) int64: stripped, with BOS, without EOS, padded on the left.

    A longer prompt is cut at the end with a warning. Raises ValueError when max_length is no multiple of 128.
    """
    check_text_length(max_length)
    if tokenizer.bos_token_id is None:
        raise ValueError(f"The tokenizer {tokenizer.name_or_path} has no BOS token. Choose Gemma 3's own tokenizer.")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.bos_token_id
    ids = torch.full((len(prompts), max_length), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        tokens = _tokens(tokenizer, prompt, max_length)
        ids[row, -len(tokens) :] = torch.tensor(tokens)
        mask[row, -len(tokens) :] = 1
    return ids, mask


@torch.no_grad()
def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, model: Gemma3TextModel, prompts: Sequence[str], *, max_length: int
) -> TextStates:
    """Encodes prompts (an empty one is legal) into the states of every layer, on the device of the embedding.

    Raises ValueError when the states are not finite, which Gemma 3 gives in float16.
    """
    ids, mask = tokenize(tokenizer, prompts, max_length=max_length)
    device = model.get_input_embeddings().weight.device
    mask = mask.to(device)
    output = model(input_ids=ids.to(device), attention_mask=mask, output_hidden_states=True, use_cache=False)
    hidden = torch.stack([state.to(device) for state in output.hidden_states], dim=-1)
    if not torch.isfinite(hidden[mask.bool()]).all():
        raise ValueError(
            f"The text encoder gave values that are not finite in {str(hidden.dtype).removeprefix('torch.')}. "
            "Choose precision bf16 or fp32."
        )
    return TextStates(hidden, mask)


def _tokens(tokenizer: PreTrainedTokenizerBase, prompt: str, max_length: int) -> list[int]:
    """Tokenizes one prompt; truncates with a warning."""
    tokens = tokenizer(prompt.strip(), add_special_tokens=False)["input_ids"]
    if tokens[:1] != [tokenizer.bos_token_id]:
        tokens = [tokenizer.bos_token_id, *tokens]
    if len(tokens) > max_length:
        log.warning(
            "The prompt has %d tokens, the limit is %d: the last %d are not used.",
            len(tokens),
            max_length,
            len(tokens) - max_length,
        )
    return tokens[:max_length]
