"""`python -m mgpu_runtime bench NAME`: ours against its peers, in one run, on the same work."""

import argparse
import json
import sys

from ..bench.plan import BENCHES, DEFAULT_CASES, DEFAULT_TIMEOUT, MIN_RUNS, BenchPlan
from ..fleet import Event

_COLUMNS = "{:<10} {:<8} {:<14} {:>12} {:>12} {:>8}\n"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    defaults = "; ".join(f"{name}: {','.join(cases)}" for name, cases in DEFAULT_CASES.items())
    parser.add_argument("bench", choices=BENCHES, metavar="NAME", help=f"one of {', '.join(BENCHES)}")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--cases", default="", help=f"what to measure, separated by commas ({defaults})")
    parser.add_argument("--transport", default="auto", help="transport of the exchange (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="CPU workers, one thread each (%(default)s)")
    parser.add_argument("--runs", type=int, help=f"timed runs of each, at least {MIN_RUNS} (as many as fit the case)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT,
        help="seconds a worker waits for another before the benchmark is given up (%(default)g)",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from ..bench.launch import run_bench
    from ..exchange.choice import TRANSPORTS

    if arguments.transport not in TRANSPORTS:
        raise ValueError(f"There is no transport {arguments.transport!r}: choose from {', '.join(TRANSPORTS)}")
    plan = BenchPlan(
        bench=arguments.bench,
        cases=tuple(case.strip() for case in arguments.cases.split(",") if case.strip()),
        transport=arguments.transport,
        workers=arguments.workers,
        runs=arguments.runs,
        timeout=arguments.timeout,
    )
    transports: set[str] = set()
    for record in run_bench(plan, _report):
        if not arguments.json and not transports:
            sys.stdout.write(_COLUMNS.format("bench", "case", "peer", "ours", "peer", "speedup"))
        transports.add(record["exchange"])
        sys.stdout.write(json.dumps(record) + "\n" if arguments.json else _row(record))
        sys.stdout.flush()
    if not arguments.json:
        how = f"{plan.workers} CPU workers, one thread each; exchange: {'; '.join(sorted(transports))}"
        sys.stdout.write(f"{how}. Times are medians, speedup = peer / ours.\n")
    return 0


def _row(record: dict) -> str:
    times = (f"{record[key] * 1e3:.2f} ms" for key in ("ours_s", "peer_s"))
    return _COLUMNS.format(record["bench"], record["case"], record["peer"], *times, f"{record['speedup']:.3f}")


def _report(event: Event) -> None:
    if event.kind == "progress":
        sys.stderr.write(f"{event.data['stage']}: run {event.data['step']} of {event.data['of']}\n")
