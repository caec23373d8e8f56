"""What a worker gives back to its machine between jobs."""

import ctypes

import torch


def give_back_freed() -> None:
    """Hands memory that this process has freed back to the system.

    glibc keeps up to some 30 MB of freed weights in each worker, and more where a long-lived block lies above them.
    Does nothing with a C library that has no such call. A GPU's memory is shared with ComfyUI and, where a text encoder
    is spread, with the first rank: what torch keeps for later there would be missing to them.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
