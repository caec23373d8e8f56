"""`python -m mgpu_runtime build`: compiles the exchange's native code, which is otherwise done at first use."""

import argparse
import sys


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command, which has no options."""
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from ..exchange.native import CPU_NAME, NOT_BUILT, build_all

    lines = build_all()
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return int(any(line.startswith(f"{CPU_NAME}: {NOT_BUILT}") for line in lines))
