"""Fields of jobs and conditions: whatever kind of number they come as, they become plain values that can travel."""

import operator
from collections.abc import Callable
from typing import Any


def settle(record: Any, owner: str = "", /, **kinds: Callable[[Any], Any]) -> None:
    """Replaces fields of a new frozen record by plain values, each by its kind; None stays None.

    Raises ValueError for a value that its kind cannot read; `owner` stands before the field's name in the sentence.
    """
    for name, kind in kinds.items():
        value = getattr(record, name)
        if value is None:
            continue
        try:
            object.__setattr__(record, name, kind(value))
        except TypeError:
            raise ValueError(f"{owner}{name} cannot be {value!r} ({type(value).__name__})") from None


def whole(value: Any) -> int:
    """Reads a whole number of any library; raises TypeError for anything else."""
    return operator.index(value)


def number(value: Any) -> float:
    """Reads a number of any library; raises TypeError for a text and for a yes or no."""
    if isinstance(value, str | bool):
        raise TypeError
    return float(value)
