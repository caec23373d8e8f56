"""Whether the file that an input of Load LTX MGPU names holds what the input is for."""

from collections.abc import Mapping
from functools import lru_cache

from .bundle import Path
from .checkpoint import CheckpointFile
from .header import ContentKey, content_key
from .keymaps import COMPONENTS, SLOTS, TEXT_PROJECTION


def check_roles(files: Mapping[str, Path | None]) -> None:
    """Raises ValueError in one sentence for a file that holds nothing of what its input (a value of SLOTS) takes.

    Its other parts would be used all the same, and what was asked for would silently come from elsewhere.
    """
    for slot, path in files.items():
        if path is not None:
            _check_role(slot, content_key(path))


@lru_cache(maxsize=32)
def _check_role(slot: str, key: ContentKey) -> None:
    file = CheckpointFile(key[0])
    if any(SLOTS[component] == slot for component in file.components):
        return
    wanted = " or ".join(_title(component) for component in COMPONENTS if SLOTS[component] == slot)
    own = " or ".join(dict.fromkeys(SLOTS[component] for component in file.components))
    elsewhere = f", and this one as {own}" if own else ""
    raise ValueError(
        f"{slot} is {file.path}, which holds no {wanted}: it is or has {file.contents}. Choose a file with one as "
        f"{slot}{elsewhere}."
    )


def _title(component: str) -> str:
    return TEXT_PROJECTION if component == "connectors" else COMPONENTS[component]  # the input is named after it
