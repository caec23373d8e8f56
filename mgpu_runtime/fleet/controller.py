"""The handle of a fleet."""

import os
import sys
import threading
import weakref
from collections.abc import Callable

from .devices import check_devices, first_devices, parse_devices
from .errors import FleetError, FleetStartError
from .link import Link, make_start
from .runner import MGPURunner
from .stream import Stream


class MGPUController:
    """Runs one runner class on all devices, one warm process each, one job at a time.

    May be used from any thread. The fleet ends with `shutdown`, when the controller is collected, and when this
    process ends in whatever way. It belongs to the process that started it; a fork of that starts another one.
    """

    def __init__(
        self,
        runner_cls: type[MGPURunner] | str,
        *,
        num_gpus: int | None = None,
        devices: list[str] | None = None,
        group_timeout: float = 600.0,
        cancel_timeout: float = 30.0,
    ) -> None:
        """Describes a fleet; nothing is started yet.

        `runner_cls` is an importable class or 'module:Name'; `devices` is e.g. ['cpu', 'cpu'] or ['cuda:0', 'cuda:1'],
        `num_gpus` the first so many GPUs, neither means all; `group_timeout` is how long, in seconds, a collective may
        wait for a rank; `cancel_timeout` how long, at least, a cancelled job may take to leave before the fleet is
        ended. Raises ValueError for a class that workers cannot import and for devices that are not there.
        """
        if num_gpus is not None and devices is not None:
            raise ValueError(f"num_gpus={num_gpus} and devices={devices} were both given; give one of them.")
        self._runner = _name_runner(runner_cls)
        if devices is not None:
            self.devices = check_devices(list(devices))
        else:
            self.devices = parse_devices("auto") if num_gpus is None else first_devices(num_gpus)
        self._group_timeout = group_timeout
        self._cancel_timeout = cancel_timeout
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._link: Link | None = None

    def start(
        self, *, timeout: float = 300.0, should_stop: Callable[[], bool] | None = None, **setup_kwargs: object
    ) -> None:
        """Starts the fleet and waits until `setup(**setup_kwargs)` is through on every rank.

        `should_stop` is asked 5 times a second whether to give up. Raises FleetStartError after `timeout` seconds, or
        at once when a rank fails; JobCancelled when told to stop; FleetError if it runs already. After whatever is
        raised, also by `should_stop` or by Ctrl-C, nothing of a half-started fleet is left.
        """
        if not sys.platform.startswith("linux"):
            raise FleetStartError(f"Fleets run on Linux only; this is {sys.platform}.")
        if self._pid != os.getpid():  # a forked child: the link, and who holds the lock, are its parent's
            self._pid, self._lock, self._link = os.getpid(), threading.Lock(), None
        with self._lock:
            if self.is_alive:
                raise FleetError("This fleet is running already; call shutdown() first.")
            start = make_start(self._runner, self.devices, timeout, self._group_timeout, setup_kwargs)
            self._link = Link(start, cpu_only=self.devices[0] == "cpu")
            finalizer = weakref.finalize(self, self._link.hang_up)
            finalizer.atexit = False  # at exit the link says goodbye itself
            self._link.wait_until_started(timeout, should_stop)

    def stream(self, *, timeout: float | None = None, **kwargs: object) -> Stream:
        """Starts a job on every rank and returns its stream.

        After `timeout` seconds the job is cancelled and fails with FleetError. Raises ControllerBusyError while another
        job runs, ValueError for a keyword that cannot be sent, FleetError when the fleet is not running.
        """
        link = self._link
        if link is None:
            raise FleetError("This fleet was not started; call start() first.")
        return Stream(link.begin(timeout, self._cancel_timeout, kwargs), link.cancel, owner=self)

    def shutdown(self, *, graceful_timeout: float = 5.0) -> None:
        """Ends the fleet; a running job is cancelled, and what has not left after `graceful_timeout` seconds is killed.

        Safe to call again, from any thread, and on a fleet that has died.
        """
        link = self._link
        if link is not None:
            link.shutdown(graceful_timeout)

    def retire(self) -> None:
        """Ends the fleet as `shutdown` does, but not a running job: then raises ControllerBusyError instead."""
        if self.is_alive:
            self._link.retire()
        self.shutdown()

    @property
    def is_alive(self) -> bool:
        """Whether the fleet is up; turns False by itself when a worker dies."""
        return self._link is not None and self._link.is_alive

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return len(self.devices)

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers, by rank."""
        return [] if self._link is None else self._link.worker_pids

    @property
    def supervisor_pid(self) -> int | None:
        """The process id of the supervisor."""
        return None if self._link is None else self._link.supervisor_pid


def _name_runner(runner_cls: type[MGPURunner] | str) -> str:
    if isinstance(runner_cls, str):
        if runner_cls.count(":") != 1:
            raise ValueError(f"Runner {runner_cls!r} is not of the form 'module:Name', e.g. 'package.module:MyRunner'.")
        return runner_cls
    module, name = runner_cls.__module__, runner_cls.__qualname__
    if module == "__main__" or "<locals>" in name:
        raise ValueError(
            f"Runner {module}.{name} cannot be imported by the workers. Define the class at the top of a module "
            "that can be imported by its plain name."
        )
    return f"{module}:{name}"
