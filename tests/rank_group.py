"""Ranks of one gloo group that stay alive and do what a test tells them, one call after another."""

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from tests.spawn import PRELOAD, _strict_matrix_products


class RankFailed(AssertionError):
    """A call raised on a rank; the text holds the rank, and the error's class and message."""


class RankGroup:
    """`world_size` processes, each with a state that `setup(rank, group)` made. Kills them at the end.

    Functions that are sent must be module-level and are called fn(state, *args) on the rank. To be used in `with`.
    """

    def __init__(self, world_size: int, setup: Callable[[int, dist.ProcessGroup], Any]) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipes, self.processes = [], []
        self._told = [0] * world_size  # number of each rank's last call
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_main, args=(rank, world_size, self._folder.name, setup, theirs), daemon=True
            )
            with _strict_matrix_products():  # the first start also starts the server that all tests use
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> Self:
        self.hear_all()  # each has set itself up
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def tell(self, rank: int, fn: Callable[..., Any], *args: Any) -> None:
        """Has a rank call a function; `hear` gets what it returns."""
        self._told[rank] += 1
        self._pipes[rank].send((self._told[rank], fn, args))

    def hear(self, rank: int, timeout: float = 60.0) -> Any:
        """Returns what a rank's last call returned. Raises RankFailed if it raised, TimeoutError if it does not end."""
        number = -1
        while number != self._told[rank]:  # a test that failed may have left answers behind
            if not self._pipes[rank].poll(timeout):
                raise TimeoutError(f"rank {rank} has not answered within {timeout:g} s")
            try:
                number, error, value = self._pipes[rank].recv()
            except EOFError:
                raise RankFailed(f"rank {rank} has ended") from None
        if error:
            raise RankFailed(f"rank {rank}: {error}")
        return value

    def hear_all(self, ranks: Iterable[int] | None = None, timeout: float = 60.0) -> list[Any]:
        """Returns what the ranks' last calls returned."""
        return [self.hear(rank, timeout) for rank in (range(self.world_size) if ranks is None else ranks)]

    def ask(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Has every rank call a function and returns what each returned."""
        for rank in range(self.world_size):
            self.tell(rank, fn, *args)
        return self.hear_all(timeout=timeout)

    def stop(self, rank: int) -> None:
        """Stops a rank's process, and returns when it stands still; `resume` lets it go on."""
        pid = self.processes[rank].pid
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def resume(self, rank: int) -> None:
        os.kill(self.processes[rank].pid, signal.SIGCONT)

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].join()


def _main(rank: int, world_size: int, folder: str, setup: Callable[..., Any], pipe: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    state, number = None, 0

    def set_up() -> None:
        nonlocal state
        state = setup(rank, dist.group.WORLD)

    call: Callable[[], Any] = set_up
    while True:
        try:
            answer = number, "", call()
        except (RuntimeError, ValueError, AssertionError, OSError) as error:
            answer = number, f"{type(error).__name__}: {error}", None
        pipe.send(answer)
        number, fn, args = pipe.recv()

        def call(fn: Callable[..., Any] = fn, args: tuple = args) -> Any:
            return fn(state, *args)
