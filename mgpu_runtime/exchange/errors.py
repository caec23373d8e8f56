"""Errors of the exchange, in the words of whoever waits."""

from collections.abc import Sequence


class ExchangeError(RuntimeError):
    """An exchange cannot be done: a transport that cannot work was asked for, or the exchange has failed before."""


class ExchangeTimeout(ExchangeError):
    """Ranks did not arrive in time. `missing` names them; it is empty where the transport cannot tell."""

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class PeerGone(ExchangeTimeout):
    """Ranks will never arrive: their processes have ended. `missing` names them."""


class AgreementLost(ExchangeError):
    """A rank has left the ranks' agreement on an exchange, or says there what belongs elsewhere."""


class GaveUp(ExchangeError):
    """Another rank has failed in opening a transport, and the ranks have agreed by that to do without it."""


def unusable(reason: str) -> ExchangeError:
    """Returns the error of an exchange that is called again after it has failed or was closed."""
    return ExchangeError(f"this exchange cannot be used any more: {reason}")


def timed_out(
    rank: int,
    what: str,
    timeout: float,
    missing: Sequence[int],
    stopped: Sequence[int] = (),
    global_ranks: Sequence[int] = (),
) -> ExchangeError:
    """Returns the error of a rank that waited `timeout` seconds in vain; `stopped` are those known to stand still.

    `global_ranks` holds the ranks of the group's members in the world, where those are others.
    """
    waiting, awaited = ranks([rank], global_ranks), ranks(missing, global_ranks)
    text = f"{waiting} waited {timeout:g} s in {what} for {awaited}"
    if stopped:
        text += f"; the process of {ranks(stopped, global_ranks)} is stopped and must be continued or ended"
    elif missing:
        text += ". Look for an error there; if it only needs longer, raise the exchange's timeout"
    else:
        text += ", and the transport cannot tell for which. Look for an error on one of them, or raise the timeout"
    return ExchangeTimeout(text, missing)


def peers_gone(rank: int, what: str, missing: Sequence[int], global_ranks: Sequence[int] = ()) -> PeerGone:
    """Returns the error of a rank whose peers' processes have ended."""
    return PeerGone(
        f"{ranks([rank], global_ranks)} cannot finish {what}: the process of {ranks(missing, global_ranks)} has ended. "
        "Look for its last error (or for the system's memory killer), and start the ranks anew",
        missing,
    )


def ranks(numbers: Sequence[int], global_ranks: Sequence[int] = ()) -> str:
    """Returns ranks in words: "rank 1", "ranks 1 and 2", "the other ranks" where none is known.

    With `global_ranks`, of a group that is not the world, "rank 1 of the group (rank 3)".
    """
    if not numbers:
        return "the other ranks"
    if global_ranks:
        return f"{ranks(numbers)} of the group ({ranks([global_ranks[number] for number in numbers])})"
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(str(number) for number in numbers[:-1])} and {numbers[-1]}"
