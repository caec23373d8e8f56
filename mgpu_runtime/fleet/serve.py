"""The life of a worker: join the group, set the runner up, then one job after the other."""

import gc
import logging
import os
import queue
import socket
import sys
import threading
import traceback
from datetime import timedelta
from importlib import import_module
from types import TracebackType

import torch
import torch.distributed as dist

from .codec import pack, unpack
from .errors import FleetError, JobCancelled
from .frames import Channel, Frame
from .records import Answer, Cancel, Drop, Go, Job, Join, Phase, Settle, Setup, Stop
from .runner import JobContext, MGPURunner, RankInfo

_log = logging.getLogger("mgpu")

_LEAVE_TIMEOUT_S = 2.0


class Caught:
    """Keeps what the block raised as text only, so that no frame of it holds tensors."""

    def __init__(self) -> None:
        self.outcome, self.type, self.text, self.trace = "ok", "", "", ""

    def __enter__(self) -> "Caught":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False  # SystemExit and its like end the process, and the supervisor reports that
        self.outcome = "cancelled" if isinstance(error, JobCancelled) else "error"
        self.type, self.text = type(error).__name__, str(error)
        self.trace = "".join(traceback.format_exception(error))
        return True


class Inbox:
    """Reads the connection in a thread of its own, so that a cancel and the end are seen during a job."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._cancelled_job = ""
        self._stopping = False
        threading.Thread(target=self._read, name="mgpu-inbox", daemon=True).start()

    def take(self) -> Frame:
        """Waits for the next frame; the wait ends with the process if the supervisor is gone."""
        return self._frames.get()

    @property
    def is_stopping(self) -> bool:
        """Whether this worker was told to leave."""
        return self._stopping

    def is_cancelled(self, job_id: str) -> bool:
        """Whether this rank was told to leave the job; acting on it alone would hang the peers."""
        return self._stopping or self._cancelled_job == job_id

    def _read(self) -> None:
        try:
            while (frame := self._channel.receive()) is not None:
                if isinstance(frame.record, Cancel):
                    self._cancelled_job = frame.record.job
                    continue
                self._stopping = self._stopping or isinstance(frame.record, Stop)
                self._frames.put(frame)
        except FleetError as error:
            _log.error("%s", error)
        os._exit(1)  # no clean-up: it could wait for peers that are gone as well


class Worker:
    """One rank of the fleet."""

    def __init__(self, channel: Channel, inbox: Inbox, join: Join, store_fd: int) -> None:
        self._channel = channel
        self._inbox = inbox
        self._join = join
        self._store_fd = store_fd  # stays open: the store opens the file anew for every new group

    def start(self, setup: Frame) -> bool:
        """Joins the group and sets the runner up; answers, and returns whether that went well."""
        device = torch.device(self._join.device)
        with Caught() as caught:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # before the import: a library that makes a context then makes it here
            self._say("importing the runner")
            runner_class = _import(self._join.runner)
            self._say("joining the group")
            self._info = self._join_group(device)
            self._say("testing the group")
            _test_group(self._info)
            self._say("setting up")
            self._runner: MGPURunner = runner_class()
            self._runner.info = self._info
            self._runner.setup(**unpack(setup))
        self._answer("", "start", caught)
        return caught.outcome == "ok"

    def run(self) -> None:
        """Serves until told to stop."""
        while not self._inbox.is_stopping:
            frame = self._inbox.take()
            record = frame.record
            if isinstance(record, Job):
                self._serve_job(record.job, unpack(frame))
            elif isinstance(record, Settle):
                self._settle(record.job)
            else:
                assert isinstance(record, Stop), record

    def leave(self) -> None:
        """Leaves the group, but waits for peers only for a moment."""
        leaving = threading.Thread(target=self._destroy_group, name="mgpu-leave", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_TIMEOUT_S)

    def _serve_job(self, job_id: str, kwargs: dict) -> None:
        with Caught() as caught:
            self._runner.check(**kwargs)
        self._answer(job_id, "check", caught)
        order = self._inbox.take().record
        assert isinstance(order, (Go, Drop, Stop)), order
        if not isinstance(order, Go):
            return
        job = JobContext(job_id, self._info, self._channel.send, lambda: self._inbox.is_cancelled(job_id))
        result = None
        with Caught() as caught:
            result = self._runner(job, **kwargs)
            result = pack(self._make_answer(job_id, "run", caught), result if self._join.rank == 0 else None)
        if caught.outcome == "ok":
            self._channel.send(result)
        else:
            del result, kwargs
            gc.collect()  # what the failed job held must not be missing in the next one
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            self._answer(job_id, "run", caught)

    def _settle(self, job_id: str) -> None:
        with Caught() as caught:
            _test_group(self._info)
        self._answer(job_id, "settle", caught)

    def _join_group(self, device: torch.device) -> RankInfo:
        join = self._join
        store = dist.FileStore(f"/proc/self/fd/{self._store_fd}", join.world_size)
        # A rank that is slow to import must not use up the time that a collective has.
        store.set(f"here/{join.rank}", "")
        store.wait([f"here/{rank}" for rank in range(join.world_size)], timedelta(seconds=join.start_timeout))
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=join.rank,
            world_size=join.world_size,
            timeout=timedelta(seconds=join.group_timeout),
            device_id=device if device.type == "cuda" else None,
        )
        return RankInfo(join.rank, join.world_size, device, dist.group.WORLD)

    def _destroy_group(self) -> None:
        if self._info.device.type == "cuda":
            torch.cuda.set_device(self._info.device)  # holds for one thread only; the others start on GPU 0
        dist.destroy_process_group()

    def _make_answer(self, job_id: str, stage: str, caught: Caught) -> Answer:
        return Answer(self._join.rank, job_id, stage, caught.outcome, caught.type, caught.text, caught.trace)

    def _answer(self, job_id: str, stage: str, caught: Caught) -> None:
        self._channel.send(Frame(self._make_answer(job_id, stage, caught)))

    def _say(self, phase: str) -> None:
        self._channel.send(Frame(Phase(self._join.rank, phase)))


def serve(sock: socket.socket, num_threads: int) -> None:
    """Runs the worker whose place the first two frames tell; ends the process."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(num_threads)
    channel = Channel(sock)
    inbox = Inbox(channel)
    join = inbox.take()
    assert isinstance(join.record, Join), join.record
    setup = inbox.take()
    assert isinstance(setup.record, Setup), setup.record
    worker = Worker(channel, inbox, join.record, join.take_block())
    if worker.start(setup):
        worker.run()
        worker.leave()
    else:
        inbox.take()  # the supervisor reads the answer and ends this process
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _import(runner: str) -> type[MGPURunner]:
    module, _, name = runner.partition(":")
    found = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _test_group(info: RankInfo) -> None:
    """Adds the ranks up over the group: a peer path that delivers nothing, or the wrong bytes, must show here."""
    total = torch.tensor([info.rank + 1], dtype=torch.int64, device=info.device)
    dist.all_reduce(total, group=info.group)
    expected = info.world_size * (info.world_size + 1) // 2
    if total.item() != expected:
        raise FleetError(
            f"A test of the connection between the {info.world_size} workers gave {total.item()} instead of "
            f"{expected}. With GPUs, try NCCL_P2P_DISABLE=1 in the environment."
        )
