"""The words that the server, the supervisor and the workers say to each other.

A record is a small frozen dataclass and travels as JSON. Tensors and nested values ride beside it as an opaque
payload (`codec.py`), so that the supervisor can hand them on without reading them.
"""

import json
from dataclasses import asdict, dataclass
from typing import get_args

WIRE_VERSION = 1


@dataclass(frozen=True)
class Start:
    """Server to supervisor: starts the workers; the payload is the keywords of `setup`.

    `deadline` is on the monotonic clock, which all processes of a Linux machine share.
    """

    runner: str
    devices: list[str]
    timeout: float
    deadline: float
    group_timeout: float


@dataclass(frozen=True)
class Join:
    """Supervisor to worker: who you are; the block is the memory of the file store to meet at."""

    rank: int
    world_size: int
    device: str
    runner: str
    start_timeout: float
    group_timeout: float


@dataclass(frozen=True)
class Setup:
    """Supervisor to worker: the keywords of `setup` are in the payload."""


@dataclass(frozen=True)
class Job:
    """Server to workers: check this job, and wait for Go; the payload is its keywords."""

    job: str
    timeout: float | None
    cancel_timeout: float


@dataclass(frozen=True)
class Go:
    """Supervisor to worker: every rank accepted the job, run it."""

    job: str


@dataclass(frozen=True)
class Drop:
    """Supervisor to worker: forget the job, a rank refused it or it was cancelled."""

    job: str


@dataclass(frozen=True)
class Settle:
    """Supervisor to worker: every rank left the job early, prove that the group is still in step."""

    job: str


@dataclass(frozen=True)
class Cancel:
    """Server to workers: leave the job at the next step boundary."""

    job: str


@dataclass(frozen=True)
class Stop:
    """Server to workers: leave; after `graceful_timeout` seconds the supervisor terminates, then kills."""

    graceful_timeout: float


@dataclass(frozen=True)
class Phase:
    """Worker to supervisor: what the worker does now, for the error of a start that takes too long."""

    rank: int
    text: str


@dataclass(frozen=True)
class Answer:
    """Worker to supervisor: this rank is through with a stage of a job; outcome is ok, cancelled or error."""

    rank: int
    job: str
    stage: str
    outcome: str
    type: str = ""
    text: str = ""
    trace: str = ""


@dataclass(frozen=True)
class Emit:
    """Worker to server: an event of a job; the payload is its data."""

    rank: int
    job: str
    kind: str


@dataclass(frozen=True)
class Line:
    """Supervisor to server: a line that a worker printed."""

    rank: int
    text: str


@dataclass(frozen=True)
class Started:
    """Supervisor to server: every rank is ready."""

    pids: list[int]


@dataclass(frozen=True)
class JobDone:
    """Supervisor to server: every rank is through; the payload is rank 0's result."""

    job: str


@dataclass(frozen=True)
class JobFailed:
    """Supervisor to server: no result, but the fleet is warm; reason is error, cancelled or timeout."""

    job: str
    reason: str
    text: str
    trace: str = ""


@dataclass(frozen=True)
class Ended:
    """Supervisor to server: the workers are gone; reason is stopped, start, asymmetric, timeout or descriptors."""

    reason: str
    text: str
    trace: str = ""


Record = (
    Start | Join | Setup | Job | Go | Drop | Settle | Cancel | Stop
    | Phase | Answer | Emit | Line | Started | JobDone | JobFailed | Ended
)  # fmt: skip

_KINDS = {kind.__name__: kind for kind in get_args(Record)}


def write_record(record: Record) -> bytes:
    """Returns the record as JSON text."""
    return json.dumps({"version": WIRE_VERSION, "record": type(record).__name__, **asdict(record)}).encode()


def read_record(text: bytes) -> Record:
    """Returns the record that `write_record` wrote; the two ends are of one release, so a mismatch is our mistake."""
    fields = json.loads(text)
    version = fields.pop("version")
    assert version == WIRE_VERSION, f"the other end speaks version {version}, this one {WIRE_VERSION}"
    return _KINDS[fields.pop("record")](**fields)
