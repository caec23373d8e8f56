"""Checks every golden case of a directory: `python tests/conformance.py DIR [--world-size N]`.

DIR holds `checkpoints/` (tiny checkpoints in the true file layout) and `golden/` (inputs and the official
implementation's outputs). The first part of a file's name says what kind of case it is; nothing here knows a particular
case. Prints a table and exits with 1 if any case fails.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.conformance_bench import Row  # noqa: E402
from tests.conformance_checks import check_all  # noqa: E402
from tests.spawn import run  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """Runs the checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--world-size", type=int, default=1)
    arguments = parser.parse_args(argv)
    if not (arguments.directory / "golden").is_dir():
        parser.error(f"{arguments.directory} has no folder golden/")
    if arguments.world_size < 1:
        parser.error(f"--world-size must be at least 1, got {arguments.world_size}")
    rows = run(check_all, arguments.world_size, str(arguments.directory))[0]
    _print(rows)
    passed = [row for row in rows if row.verdict == "ok"]
    return 1 if any(row.failed for row in rows) or not passed else 0


def _print(rows: list[Row]) -> None:
    width = max((len(row.case) for row in rows), default=4)
    wide = max((len(row.component) for row in rows), default=9)
    sys.stdout.write(f"{'case':{width}}  {'component':{wide}}  max abs   relative  verdict\n")
    for row in rows:
        figures = f"{row.max_abs:8.1e}  {row.relative:8.1e}" if row.reason is None else f"{'-':>8}  {'-':>8}"
        sys.stdout.write(f"{row.case:{width}}  {row.component:{wide}}  {figures}  {row.verdict}\n")
    counts = {word: sum(row.verdict.split(":")[0] == word for row in rows) for word in ("ok", "FAIL", "not covered")}
    sys.stdout.write(f"{counts['ok']} passed, {counts['FAIL']} failed, {counts['not covered']} not covered\n")


if __name__ == "__main__":
    sys.exit(main())
