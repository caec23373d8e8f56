"""The first moments of a worker process, before torch is imported."""

import ctypes
import faulthandler
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG = 1


def main(sock: socket.socket, output: Connection, parent_pid: int, num_threads: int) -> None:
    """Runs one worker until its supervisor ends; called by multiprocessing in a fresh interpreter."""
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which decides what a cancel means
    _redirect(output)
    # Threads that a library makes for itself follow these, not torch.set_num_threads.
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))

    from .serve import serve  # imports torch, and so must come after the lines above

    serve(sock, num_threads)


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent ends, and leaves if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def _redirect(output: Connection) -> None:
    for fd in (1, 2):
        os.dup2(output.fileno(), fd)
    # New streams, as the old ones remember the file they were opened on; by lines, so that last words are not lost.
    sys.stdout, sys.stderr = (
        open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False) for fd in (1, 2)
    )
    output.close()
    faulthandler.enable(all_threads=False)
