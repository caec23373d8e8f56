"""How the ranks of a machine come to map each other's memory, and load csrc/exchange_cpu.c."""

import ctypes

import torch.distributed as dist

from . import native
from .agree import gather_or_fail
from .errors import ExchangeError
from .processes import Processes
from .segment import MAX_RANKS, Segment

OPENING = 120.0  # seconds the ranks wait for each other at first; one of them may be compiling


def open_segments(group: dist.ProcessGroup, processes: Processes) -> tuple[ctypes.CDLL, list[Segment]]:
    """Returns the library and every rank's memory. Collective; raises ExchangeError, maybe on some ranks only."""
    rank, own, offer, reason = dist.get_rank(group), None, "", ""
    try:
        library = _declared(native.cpu_library())
        own = Segment.create()
        offer = f"{own.descriptor} {own.token}"
    except (ExchangeError, OSError) as error:
        reason = str(error)
    segments, opened = [] if own is None else [own], False
    try:
        offers = gather_or_fail(group, reason, offer, timeout=OPENING)
        try:
            for peer, text in enumerate(offers):
                if peer != rank:
                    segments.insert(peer, _of_peer(peer, text, processes))
        except (ExchangeError, OSError) as error:
            reason = str(error)
        gather_or_fail(group, reason, timeout=OPENING)  # only then may it be closed under the others
        opened = True
        return library, segments
    finally:
        if not opened:
            for part in segments:
                part.close()


def _of_peer(rank: int, offer: str, processes: Processes) -> Segment:
    first, _, rest = offer.partition(" ")
    pid = processes.pid(rank)
    if pid is None:
        raise ExchangeError(f"the process of rank {rank} is on another host, or in another container")
    if rank >= MAX_RANKS:
        raise ExchangeError(f"more than {MAX_RANKS} ranks")
    try:
        return Segment.of_peer(pid, int(first), rest)
    except OSError as error:
        raise ExchangeError(f"the memory of rank {rank} (process {pid}) cannot be opened: {error}") from error


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    word, size, address = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
    library.exchange_send.argtypes = [address] * 4 + [word] * 2 + [size, word, ctypes.c_int]
    library.exchange_send.restype = None
    library.exchange_copy.argtypes = [address] * 3 + [ctypes.c_int]
    library.exchange_copy.restype = None
    library.exchange_wait.argtypes = [address, word, word, size, address, ctypes.c_int64, ctypes.c_int64]
    library.exchange_wait.restype = size
    library.exchange_populate.argtypes = [address, size]
    library.exchange_prefer_large_pages.argtypes = [address, size]
    library.exchange_prefer_large_pages.restype = None
    library.exchange_populate.restype = ctypes.c_int
    return library
