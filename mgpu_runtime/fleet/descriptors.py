"""The limit on open files: every tensor on its way needs a descriptor for a moment."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import FleetError


def out_of_descriptors(kind: type[FleetError] = FleetError) -> FleetError:
    """Returns the error that says so, with the limit of this process and what to do."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return kind(
        f"Process {os.getpid()} is out of file descriptors: {limit} files may be open at once. "
        "Raise the limit with `ulimit -n` before the server is started."
    )


@contextmanager
def naming_the_limit(kind: type[FleetError] = FleetError) -> Iterator[None]:
    """Turns the system's answer to one open file too many into an error that says what to do."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # the latter from torch, which opens files as well
        if os.strerror(errno.EMFILE) not in str(error):
            raise
        raise out_of_descriptors(kind) from error
