"""What processes print: whole lines out of a pipe, and the last lines of a memory file."""

import os
import re

NUM_LAST_LINES = 20
_MAX_LINE = 500
_LINE_END = re.compile(r"[\r\n]+")  # progress bars end their lines with \r
_CHUNK = 1 << 16


class LineSplitter:
    """Puts lines together from pieces of text."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes, *, is_end: bool = False) -> list[str]:
        """Returns the lines that are whole now; at the end also what is left."""
        self._partial += data
        cut = len(self._partial) if is_end else max(self._partial.rfind(b"\n"), self._partial.rfind(b"\r")) + 1
        if cut == 0 and len(self._partial) > _CHUNK:
            cut = len(self._partial)
        whole, self._partial = self._partial[:cut], self._partial[cut:]
        return _split(whole)


def read_last_lines(fd: int) -> list[str]:
    """Returns the last lines of a memory file that processes have printed to."""
    size = os.fstat(fd).st_size
    return _split(os.pread(fd, _CHUNK, max(0, size - _CHUNK)))[-NUM_LAST_LINES:]


def _split(text: bytes) -> list[str]:
    return [line[:_MAX_LINE] for line in _LINE_END.split(text.decode("utf-8", "backslashreplace")) if line.strip()]
