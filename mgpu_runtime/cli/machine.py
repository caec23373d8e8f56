"""Options that commands share: the devices, what is computed in, how workers exchange tensors."""

import argparse

from ..exchange.choice import TRANSPORTS
from ..pipeline.settings import PRECISIONS, TIMEOUT_VARIABLE


def add_machine(group: argparse._ActionsContainer) -> None:
    """Adds --devices and --precision to a parser or a group of it."""
    group.add_argument("--devices", default="auto", help='"auto", a list such as "0,1", or "cpu:2" (%(default)s)')
    group.add_argument(
        "--precision",
        default="auto",
        choices=PRECISIONS,
        help="auto: bf16 on GPUs, fp32 on CPUs; fp8: as auto, big weights rounded to 8 bit (%(default)s)",
    )


def add_exchange(group: argparse._ActionsContainer) -> None:
    """Adds --transport and --exchange-timeout to a parser or a group of it."""
    group.add_argument(
        "--transport",
        default="auto",
        choices=TRANSPORTS,
        help="how workers exchange tensors in sequence parallelism; auto: the fastest that works here (%(default)s)",
    )
    group.add_argument(
        "--exchange-timeout",
        type=float,
        metavar="SECONDS",
        help=f"how long a worker waits for another in an exchange (10, or what {TIMEOUT_VARIABLE} says)",
    )
