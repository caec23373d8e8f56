"""The toy model through the client."""

from mgpu_runtime.pipeline.client import LTXClient
from mgpu_runtime.pipeline.settings import LTXSettings
from tests.weights_files import GEMMA, TOY_23, TOY_UPSAMPLER


def toy_client(devices: str) -> LTXClient:
    """The toy model on some devices."""
    return LTXClient(LTXSettings(str(TOY_23), str(GEMMA), str(TOY_UPSAMPLER), devices))
