"""The command line: `generate` runs the two-stage pipeline without ComfyUI, `inspect` says what files are.

`bench` measures, `build` compiles the exchange's native code.
"""

import argparse
import logging
import sys

from ..exchange.errors import ExchangeError
from ..fleet import FleetError
from . import bench, build, generate, inspect


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0 done, 1 refused or failed, 2 for a wrong command line."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return arguments.run(arguments)
    except (ValueError, FleetError, ExchangeError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mgpu_runtime", description="LTX-2 on several GPUs.")
    commands = parser.add_subparsers(dest="command", required=True)
    generate.add(commands.add_parser("generate", help="make a clip: prompt, two stages, decode, MP4"))
    inspect.add(commands.add_parser("inspect", help="say what model files are, what they need, whether they fit"))
    bench.add(commands.add_parser("bench", help="measure ours against its peers, in one run on the same work"))
    build.add(commands.add_parser("build", help="compile the exchange's native code, else done at first use"))
    return parser
