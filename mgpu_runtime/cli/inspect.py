"""`python -m mgpu_runtime inspect FILE ...`: what model files are, what they need beside them, whether they fit."""

import argparse
import sys
from pathlib import Path

from ..fleet import parse_devices
from ..pipeline.fit import fit
from ..weights.report import inspect
from .machine import add_machine


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.add_argument("file", type=Path, nargs="+", help="a model file or Gemma folder; several that make one model")
    add_machine(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    devices = parse_devices(arguments.devices)
    report = inspect(*arguments.file)
    lines = report.lines() + [f"memory     {device.line()}" for device in fit(report, devices, arguments.precision)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
