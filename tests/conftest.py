"""What test modules share: a ComfyUI server, which takes many seconds to start, and a checkpoint.

Imports are in the fixtures, so that a module that needs neither does not wait for them, nor for ComfyUI to be there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from comfy_host import ComfyHost


@pytest.fixture(scope="session")
def host() -> Iterator[ComfyHost]:
    """Gives the one server of all modules that neither start workers on it nor end it."""
    from comfy_host import ComfyHost
    from tests.host_fixtures import furnished

    with furnished(ComfyHost()) as server:
        yield server


@pytest.fixture(scope="session")
def six_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gives a checkpoint that 1, 2 and 3 workers can run."""
    from tests.six_heads import write_six_heads

    return write_six_heads(tmp_path_factory.mktemp("six") / "six.safetensors")
