"""Which text encoder a checkpoint was trained with, and whether the chosen one is that."""

from .bundle import Checkpoint
from .configs import is_from_2_5, text_projection_input, transformer_values
from .header import metadata_object
from .text_source import TextEncoderFacts

PUBLISHED_TEXT_SIZE = (3840, 49)  # hidden size and states of Gemma 3 12B and of Gemma 4 12B
SOURCE_KEY = "gemma_source_checkpoint"  # metadata of transformers from LTX-2.5 on


def expected_gemma_version(file: Checkpoint) -> str | None:
    """Returns the text encoder version that the transformer's metadata names; None where it names none.

    Raises ValueError when the entry is damaged.
    """
    if SOURCE_KEY not in file.metadata:
        return None
    version = metadata_object(file.metadata, SOURCE_KEY, file.path).get("gemma_version")
    return version if isinstance(version, str) else None


def check_text_encoder(encoder: TextEncoderFacts, file: Checkpoint) -> None:
    """Raises ValueError when a text encoder does not fit a checkpoint, or when there is no text projection.

    Gemma 3 12B and Gemma 4 12B have the same sizes, so the generation and the declared version are compared too.
    """
    hidden_size, num_states = text_projection_input(file)
    _check_family(encoder, file)
    if (encoder.hidden_size, encoder.num_states) != (hidden_size, num_states):
        is_published = (hidden_size, num_states) == PUBLISHED_TEXT_SIZE
        raise ValueError(
            f"The text encoder {encoder.path} has hidden size {encoder.hidden_size} and {encoder.num_states} hidden "
            f"states, but {file.path} was made for hidden size {hidden_size} and {num_states} states"
            f"{f' ({needed_family(file)} 12B)' if is_published else ''}. Choose the matching text encoder."
        )


def needed_family(file: Checkpoint) -> str:
    """Names the text encoder's family that a checkpoint needs: Gemma 4 from LTX-2.5 on."""
    is_newer = is_from_2_5(transformer_values(file)) or expected_gemma_version(file) is not None
    return "Gemma 4" if is_newer else "Gemma 3"


def _check_family(encoder: TextEncoderFacts, file: Checkpoint) -> None:
    needed, expected = needed_family(file), expected_gemma_version(file)
    if encoder.family != needed:
        made_with = f"{needed} ({expected})" if expected else needed
        raise ValueError(
            f"The text encoder {encoder.path} is {encoder.family}, but {file.path} was made with {made_with}: the "
            "same prompt would mean something else. Choose the matching text encoder."
        )
    if None not in (expected, encoder.gemma_version) and expected != encoder.gemma_version:
        raise ValueError(
            f"The text encoder {encoder.path} is {encoder.gemma_version!r}, but {file.path} was made with "
            f"{expected!r}: the same prompt would mean something else. Choose the matching text encoder."
        )
    if needed == "Gemma 4" and (expected is None or encoder.gemma_version is None):
        whose = f"the text encoder {encoder.path}" if encoder.gemma_version is None else "its transformer"
        file.warn(
            f"{whose} does not say which text encoder version it is or needs, so it is not checked that they fit. "
            "LTX-2.5 needs its own Gemma 4 (gemma4-12b-ltx-v1), not Google's."
        )
