"""What can go wrong with a fleet, as exceptions."""


class FleetError(RuntimeError):
    """Says that the machine, not the input, is at fault; `trace` holds the worker's traceback if there is one."""

    def __init__(self, text: str, trace: str = "") -> None:
        super().__init__(text)
        self.trace = trace


class FleetStartError(FleetError):
    """Says that a fleet did not come up; nothing of it is left running."""


class RunnerError(FleetError):
    """Is raised by a runner on purpose, with a sentence for the user."""


class SymmetricRunnerError(RunnerError):
    """Says that a job failed on every rank, or was refused before any rank began it; the fleet is still warm."""


class AsymmetricRunnerError(FleetError):
    """Says that a rank failed or died while others went on; the fleet was ended and the next start is a new one."""


class ControllerBusyError(FleetError):
    """Says that another job is running; `job_id` names it."""

    def __init__(self, text: str, job_id: str) -> None:
        super().__init__(text)
        self.job_id = job_id


class JobCancelled(FleetError):
    """Says that a job was cancelled; all ranks left it at the same step."""
