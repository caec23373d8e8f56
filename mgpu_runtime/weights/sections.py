"""Reads the sections of a checkpoint's config by their form: a value must be of the kind that its default is."""

import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from .bundle import Checkpoint
from .inferred import READERS

Section = Mapping[str, Any]

LARGEST = 2**31 - 1  # no size in a config comes near it


def filled(
    file: Checkpoint, where: str, section: Section, defaults: Section, *, or_zero: Collection[str] = ()
) -> dict[str, Any]:
    """Returns the values of the keys in `defaults`, those absent as there; raises ValueError for one of another kind.

    A list as default stands for a list of such items, a tuple for a list of exactly this form. Whole numbers start at 1
    and lists at one item, but those in `or_zero` may be 0 or empty.
    """
    for key, default in defaults.items():
        least = 0 if key in or_zero else 1
        if key in section and not _fits(section[key], default, least):
            needed = _needed(default, least)
            raise misfit(file, where, f"{key} is {reprlib.repr(section[key])}, where {needed} is needed")
    return {key: section.get(key, default) for key, default in defaults.items()}


def subsection(file: Checkpoint, where: str, section: Section, key: str) -> dict[str, Any]:
    """Returns a section inside a section, empty where there is none; raises ValueError for anything else."""
    value = section.get(key, {})
    if not isinstance(value, dict):
        raise misfit(file, where, f"{key} is {reprlib.repr(value)}, where a group of keys is needed")
    return value


def misfit(file: Checkpoint, where: str, problem: str) -> ValueError:
    """Makes the error for a section, named with dots from the top, that is not as this program knows it."""
    component, _ = READERS.get(where.partition(".")[0], ("transformer", None))
    return ValueError(
        f"{file.supplier(component).path}: the config section {where!r} does not fit: {problem}. The file is damaged "
        "or needs a newer version of this program."
    )


def _fits(value: Any, default: Any, least: int) -> bool:
    """Tells whether a value is of its default's kind."""
    match default:
        case bool() | str():
            return type(value) is type(default)
        case int():
            return type(value) is int and least <= value <= LARGEST  # true and false are no numbers
        case float():
            return type(value) in (int, float) and 0 <= value <= LARGEST and (value > 0 or default == 0)
        case tuple():
            is_long_enough = isinstance(value, list) and len(value) == len(default)
            return is_long_enough and all(_fits(*pair, least) for pair in zip(value, default, strict=True))
        case _:
            is_long_enough = isinstance(value, list) and len(value) >= least
            return is_long_enough and all(_fits(item, default[0], least) for item in value)


def _needed(default: Any, least: int) -> str:
    """Says in words what a value must be."""
    match default:
        case bool():
            return "true or false"
        case str():
            return "a text"
        case int():
            return f"a whole number from {least}"
        case float():
            return "a positive number"
        case tuple():
            return f"a list of the form {list(default)}"
        case _:
            return f"a list such as {default}"
