"""The sentences about ranks that failed, died or fell silent."""

import signal

from .records import Answer
from .round import Round

ENDED = "The fleet was ended; the next job starts a new one."
_PLAIN_TYPES = {"ValueError", "RunnerError", "JobCancelled"}  # raised on purpose: their text is the whole message
_NUM_TRACE_LINES = 12


def say_ranks(ranks: list[int]) -> str:
    """Returns 'rank 1' or 'ranks 0, 2'."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def say_exit(exitcode: int | None) -> str:
    """Returns how a process ended, from multiprocessing's exit code."""
    if exitcode is None:
        return "closed its connection"
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    name = signal.Signals(-exitcode).name if -exitcode in set(signal.Signals) else "unknown"
    hint = ", often the system's answer to too little memory" if name == "SIGKILL" else ""
    return f"was killed by signal {-exitcode} ({name}{hint})"


def say_moment(round_: Round | None) -> str:
    """Returns during what it happened."""
    if round_ is None:
        return "while the fleet was idle"
    if round_.stage == "start":
        return "during the start"
    return f"during job {round_.job}" + ("" if round_.stage == "run" else f" ({round_.stage})")


def say_failure(answer: Answer) -> str:
    """Returns an error as a person should read it."""
    return answer.text if answer.type in _PLAIN_TYPES else f"{answer.type}: {answer.text}"


def say_symmetric(failures: list[Answer]) -> str:
    """Returns one sentence when all ranks say the same, or one line a rank."""
    texts = {say_failure(answer) for answer in failures}
    if len(texts) == 1 and (len(failures) == 1 or len(texts) < len(failures)):
        return texts.pop()
    return "\n".join(f"Rank {answer.rank}: {say_failure(answer)}" for answer in failures)


def say_refusal(failures: list[Answer], world_size: int) -> str:
    """Returns why a job was refused; names the ranks when only some refused it."""
    text = say_symmetric(failures)
    if len(failures) == world_size:
        return text
    return f"{say_ranks([a.rank for a in failures]).capitalize()} of {world_size} refused the job: {text}"


def say_death(rank: int, device: str, exitcode: int | None, moment: str, lines: list[str]) -> str:
    """Returns the message about a worker that died."""
    last = _say_lines(f"Last lines of rank {rank}", lines)
    return f"Rank {rank} ({device}) {say_exit(exitcode)} {moment}. {ENDED}{last}"


def say_lone_failure(answer: Answer, device: str, moment: str, missing: list[int]) -> str:
    """Returns the message about a rank that raised while others went on."""
    others = f" while {say_ranks(missing)} went on" if missing else " and others did not"
    lines = answer.trace.rstrip().splitlines()[-_NUM_TRACE_LINES:]
    return f"Rank {answer.rank} ({device}) raised {answer.type}: {answer.text} {moment}{others}. {ENDED}" + _say_lines(
        f"Traceback of rank {answer.rank}", lines
    )


def say_silence(missing: list[int], moment: str, seconds: float, phases: dict[int, str]) -> str:
    """Returns the message about ranks that did not answer in time, with what each was last doing."""
    doing = "; ".join(f"rank {rank} was last {phases[rank]}" for rank in missing if rank in phases)
    doing = f" ({doing})" if doing else ""
    return f"No answer from {say_ranks(missing)} within {seconds:g} s {moment}{doing}. {ENDED}"


def _say_lines(title: str, lines: list[str]) -> str:
    return f"\n{title}:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
