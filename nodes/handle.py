"""What travels on an LTX_MGPU wire: an immutable description that finds its warm fleet by content.

ComfyUI may drop a handle at any time; the node makes an equal one again. When no handle of a configuration is left
for a while, its fleet ends.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, replace

from mgpu_runtime.pipeline.client import LTXClient
from mgpu_runtime.pipeline.jobs import LoRASpec
from mgpu_runtime.pipeline.settings import LTXSettings

from .comfy import MemoryGuard, on_host_gpu

# ComfyUI drops the old graph's handle just before it makes the new graph's: the same fleet must live through that.
GRACE_SECONDS = 30.0


@dataclass(eq=False)
class _Users:
    """Is held by every handle of one configuration, so that its end is the end of the last of them.

    The entry in ComfyUI's memory list is theirs together: two entries would drive each other's, and so their one
    fleet, out of the GPU.
    """

    guard: MemoryGuard


_users: weakref.WeakValueDictionary[LTXSettings, _Users] = weakref.WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class LTXHandle:
    """Holds the client of one configuration, its entry in ComfyUI's memory list, and its count of users.

    The LoRAs are for the stages that get this handle; they travel with each job and are no part of the configuration.
    """

    client: LTXClient
    guard: MemoryGuard
    users: object
    loras: tuple[LoRASpec, ...] = ()

    @property
    def settings(self) -> LTXSettings:
        return self.client.settings

    def with_lora(self, lora: LoRASpec) -> LTXHandle:
        """Returns a handle of the same fleet with one LoRA more."""
        return replace(self, loras=(*self.loras, lora))

    def heading(self, num_tokens: int | None = None) -> str:
        """Returns the start of the text line on a node."""
        workers = len(self.client.devices)
        words = f"{workers} worker{'s' if workers > 1 else ''}"
        return words if num_tokens is None else f"{words} · {num_tokens} tokens"


def open_handle(settings: LTXSettings) -> LTXHandle:
    """Makes a handle after reading the files' headers; raises ValueError where the fleet could not run them."""
    client = LTXClient(settings)
    client.check()
    users = _users.get(settings)
    if users is None:
        users = _Users(MemoryGuard(client.release, _num_bytes(client)))
        _users[settings] = users
        weakref.finalize(users, _end_later, client).atexit = False
    return LTXHandle(client, users.guard, users)


def _num_bytes(client: LTXClient) -> int:
    """Returns what the fleet needs of ComfyUI's own GPU: all files on the first worker's, nothing elsewhere."""
    if not on_host_gpu(client.devices):
        return 0
    return sum(size for _, _, size in client.settings.stamps())


def _end_later(client: LTXClient) -> None:
    timer = threading.Timer(GRACE_SECONDS, _end_if_unused, (client,))
    timer.daemon = True
    timer.start()


def _end_if_unused(client: LTXClient) -> None:
    if not _users:  # the one fleet there is may serve another configuration by now
        client.release()
