"""`python -m mgpu_runtime build`: compiles the exchange's native code, which is otherwise done at first use."""

import argparse
import sys


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command, which has no options."""
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from ..exchange.native import build_all

    for line in build_all():
        sys.stdout.write(f"{line}\n")
    return 0
