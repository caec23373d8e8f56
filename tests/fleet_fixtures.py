"""Fleets of tests that end them."""

import pytest

from mgpu_runtime.fleet import MGPUController

START_TIMEOUT_S = 120


@pytest.fixture
def fleet(shared: MGPUController) -> MGPUController:
    """The module's fleet `shared`, running: started anew after each test that ended it."""
    if not shared.is_alive:
        shared.start(timeout=START_TIMEOUT_S)
    return shared
