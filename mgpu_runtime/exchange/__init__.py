"""The exchange of heads for tokens between ranks. Knows tensors and process groups, nothing of LTX."""

from .all2all import DEFAULT_TIMEOUT, All2All, OneRank, Pending
from .choice import TRANSPORTS, exchange_for
from .errors import ExchangeError, ExchangeTimeout, PeerGone

__all__ = [
    "DEFAULT_TIMEOUT",
    "TRANSPORTS",
    "All2All",
    "ExchangeError",
    "ExchangeTimeout",
    "OneRank",
    "PeerGone",
    "Pending",
    "exchange_for",
]
