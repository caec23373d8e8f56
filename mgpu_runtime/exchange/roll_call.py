"""Who of a group has come to a point, and with what word, told through the group's store and not by a collective."""

import contextlib
import threading
from collections.abc import Sequence
from typing import Self

import torch.distributed as dist

_FIRST_PAUSE, _PAUSE = 0.001, 0.25  # seconds between looks
_CLOSE_SECONDS = 1.0  # a store of this machine answers within milliseconds


class RollCall:
    """Leaves this rank's word and reads the others'; each rank's n-th under a name meets the n-th of the others.

    A thread of its own does so: a store whose process stands still answers nobody, and waits for it have no deadline.

    Attributes:
        words: what each rank said, by rank, once all have; None before.
        missing: the ranks that have not come, as far as is known by now.
        failure: why nothing can be known; empty while something can.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, word: str) -> None:
        self.words: list[str] | None = None
        self.missing: Sequence[int] = ()
        self.failure = ""
        self._world_size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._name, self._word = f"ltx-mgpu/{name}", word
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        store = store_of(group)
        if store is None:
            self.failure = "the group has no store"
            return
        self._thread = threading.Thread(target=self._call, args=(store,), name="roll call", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops looking for the others. This rank's word stays."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _call(self, store: dist.Store) -> None:
        try:
            turn = store.add(f"{self._name}/{self._rank}", 1)
            keys = [f"{self._name}/{turn}/{rank}" for rank in range(self._world_size)]
            store.set(keys[self._rank], self._word)
            pause = _FIRST_PAUSE
            while not store.check(keys):
                self.missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                if self._over.wait(pause):
                    return
                pause = min(_PAUSE, 2 * pause)
            self.missing = ()
            self.words = [store.get(key).decode() for key in keys]
            if turn > 1:  # whoever has come here has read the words of the turn before
                with contextlib.suppress(RuntimeError):  # not every store can forget
                    store.delete_key(f"{self._name}/{turn - 1}/{self._rank}")
        except (RuntimeError, ValueError) as error:  # torch's word for a store that is gone; another library's text
            self.failure = f"the group's store does not answer: {error}"


def store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """Returns a group's store; None where there is none, or torch is too old to tell it."""
    try:
        return group.get_group_store()
    except (AttributeError, RuntimeError):
        return None
