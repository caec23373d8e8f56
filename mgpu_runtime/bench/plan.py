"""What a benchmark is asked to do, checked before any worker starts. Imports nothing heavy."""

import re
from dataclasses import dataclass

DEFAULT_TIMEOUT = 300.0  # seconds; the largest usual case keeps the other workers waiting for about ten
MIN_RUNS = 5
EXCHANGE_HEADS, EXCHANGE_HEAD_DIM = 32, 64  # of a token in `bench exchange`, float32
SP_HEADS, SP_HEAD_DIM, SP_BLOCKS = 8, 64, 4

DEFAULT_CASES = {"exchange": ("8MiB", "64MiB"), "sp": ("2048", "8192")}
BENCHES = tuple(DEFAULT_CASES)
_HEADS = {"exchange": EXCHANGE_HEADS, "sp": SP_HEADS}
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_DEFAULT_RUNS = 9
_SLOW_TOKENS = 4096  # from here on a run takes seconds, and fewer do


@dataclass(frozen=True)
class BenchPlan:
    """One benchmark: its cases and how they are run. Raises ValueError for what cannot be.

    `runs` None takes a number that fits each case; `transport` is a name of the exchange's, or auto; `timeout` is how
    many seconds a worker waits for another.
    """

    bench: str
    cases: tuple[str, ...] = ()
    transport: str = "auto"
    workers: int = 2
    runs: int | None = None
    timeout: float = DEFAULT_TIMEOUT

    def __post_init__(self) -> None:
        if self.bench not in BENCHES:
            raise ValueError(f"There is no benchmark {self.bench!r}: choose from {', '.join(BENCHES)}")
        if not self.cases:
            object.__setattr__(self, "cases", DEFAULT_CASES[self.bench])
        heads = _HEADS[self.bench]
        if self.workers < 2 or heads % self.workers:
            allowed = ", ".join(str(count) for count in range(2, heads + 1) if heads % count == 0)
            raise ValueError(f"--workers must be one of {allowed} for bench {self.bench}, got {self.workers}")
        if self.runs is not None and self.runs < MIN_RUNS:
            raise ValueError(f"--runs must be at least {MIN_RUNS}, so that a median means something, got {self.runs}")
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"--timeout must be more than 0 seconds, got {self.timeout:g}")
        for case in self.cases:
            if self.bench == "exchange":
                exchange_tokens(case)
            elif sp_tokens(case) % self.workers:
                raise ValueError(f"Case {case} does not divide over {self.workers} workers: choose a multiple")

    def num_runs(self, case: str) -> int:
        """Returns how often everything is timed in a case."""
        if self.runs is not None:
            return self.runs
        return MIN_RUNS if self.bench == "sp" and sp_tokens(case) >= _SLOW_TOKENS else _DEFAULT_RUNS


def exchange_tokens(case: str) -> int:
    """Returns the tokens of a tensor such as "8MiB" on each rank; ValueError where it is no whole number of them."""
    match = re.fullmatch(r"([1-9]\d{0,3})(KiB|MiB|GiB)", case)
    token_bytes = 4 * EXCHANGE_HEADS * EXCHANGE_HEAD_DIM
    if match is None or int(match[1]) * _UNITS[match[2]] % token_bytes:
        raise ValueError(f"Case {case!r} is no tensor size in steps of {token_bytes >> 10}KiB: write 8MiB or 64MiB")
    return int(match[1]) * _UNITS[match[2]] // token_bytes


def sp_tokens(case: str) -> int:
    """Returns the video tokens of a case such as "2048"."""
    if not re.fullmatch(r"[1-9]\d{0,6}", case):
        raise ValueError(f"A case of bench sp is a number of video tokens, such as 2048; got {case!r}")
    return int(case)
