"""Compares what the ranks call where no memory is theirs together: on several hosts, or in several containers."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Self

import torch
import torch.distributed as dist

from .agree import gather_texts, global_ranks
from .board import call_in_words, unlike_calls
from .errors import ExchangeError
from .layout import Geometry
from .roll_call import RollCall, store_of
from .waiting import Wait

_NONE = "none"


class FirstCalls:
    """Has the ranks tell each other through the group's store what they call, each kind of call the first time.

    Only then, as it costs a wait for all. Ranks that make different calls of kinds that all of them know are not told.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._group, self._name = group, name
        self._known: set[tuple[Geometry, torch.dtype]] = set()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Self | None:
        """Returns one for a group; None, on every rank, where one of them has no store. Collective."""
        said = gather_texts(group, _NONE if store_of(group) is None else os.urandom(8).hex())
        return None if _NONE in said else cls(group, f"calls {said[0]}")

    def meet(
        self,
        number: int,
        geometry: Geometry,
        dtype: torch.dtype,
        what: str,
        begin_wait: Callable[[Callable[[], Sequence[int]]], Wait],
    ) -> None:
        """Waits until all ranks have come to an exchange, if it is the first of its kind here; else returns at once.

        `begin_wait` begins to wait, by a function that tells who is missing. Raises ExchangeError where another rank's
        exchange is another one, and what a Wait raises.
        """
        if (geometry, dtype) in self._known:
            return
        with RollCall(self._group, self._name, f"{dtype} {number} {call_in_words(geometry)}") as roll:
            wait = begin_wait(lambda: roll.missing)
            while roll.words is None:
                if roll.failure:
                    raise ExchangeError(f"the ranks cannot compare their calls in {what}: {roll.failure}")
                wait.check()
                time.sleep(0.001)
        self._compare(roll.words, what)
        self._known.add((geometry, dtype))

    def _compare(self, words: Sequence[str], what: str) -> None:
        rank = dist.get_rank(self._group)
        dtypes, _, calls = zip(*(word.partition(" ") for word in words), strict=True)
        unlike = [other for other, call in enumerate(calls) if call != calls[rank]]
        others = {other: dtype for other, dtype in enumerate(dtypes) if dtype != dtypes[rank]}
        if unlike or others:
            raise unlike_calls(rank, what, unlike, dtypes[rank], others, global_ranks(self._group))
