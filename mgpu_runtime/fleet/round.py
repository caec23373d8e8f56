"""One stage of a job in which every rank owes one answer: start, check, run or settle."""

from .records import Answer


class Round:
    """Collects the answers and knows who is missing."""

    def __init__(self, stage: str, job: str, world_size: int, deadline: float | None) -> None:
        self.stage = stage
        self.job = job
        self.deadline = deadline
        self._world_size = world_size
        self._answers: dict[int, Answer] = {}

    def add(self, answer: Answer) -> None:
        """Takes one rank's answer; a second one, or one to another stage, is our mistake."""
        assert (answer.stage, answer.job) == (self.stage, self.job), (answer, self.stage, self.job)
        assert answer.rank not in self._answers, answer
        self._answers[answer.rank] = answer

    def hurry(self, deadline: float) -> None:
        """Moves the deadline forward to the given time, never back."""
        self.deadline = deadline if self.deadline is None else min(self.deadline, deadline)

    @property
    def missing(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in range(self._world_size) if rank not in self._answers]

    @property
    def failures(self) -> list[Answer]:
        """The answers that are not ok, by rank."""
        return [self._answers[rank] for rank in sorted(self._answers) if self._answers[rank].outcome != "ok"]

    @property
    def errors(self) -> list[Answer]:
        """The failures that are not the answer to a cancel, by rank."""
        return [answer for answer in self.failures if answer.outcome == "error"]

    @property
    def is_cancelled(self) -> bool:
        """Whether every rank left because of the cancel."""
        return len(self.failures) == self._world_size and all(a.outcome == "cancelled" for a in self.failures)

    @property
    def all_failed(self) -> bool:
        """Whether every rank failed, so that none can be inside a collective."""
        return len(self.failures) == self._world_size
