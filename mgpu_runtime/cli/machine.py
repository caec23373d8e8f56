"""Options that every command shares: the devices and what is computed in."""

import argparse

from ..pipeline.settings import PRECISIONS


def add_machine(group: argparse._ActionsContainer) -> None:
    """Adds --devices and --precision to a parser or a group of it."""
    group.add_argument("--devices", default="auto", help='"auto", a list such as "0,1", or "cpu:2" (%(default)s)')
    group.add_argument(
        "--precision",
        default="auto",
        choices=PRECISIONS,
        help="auto: bf16 on GPUs, fp32 on CPUs; fp8: as auto, big weights rounded to 8 bit (%(default)s)",
    )
