"""The exchange of heads for tokens between ranks. Knows tensors and process groups, nothing of LTX."""

from .all2all import All2All, exchange_for
from .torch_distributed import TorchAll2All

__all__ = ["All2All", "TorchAll2All", "exchange_for"]
