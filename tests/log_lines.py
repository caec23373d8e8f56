"""Collects what a logger says."""

import logging


class Lines(logging.Handler):
    """Keeps the messages, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def take(self) -> list[str]:
        """Returns the messages and forgets them."""
        lines, self.lines = self.lines, []
        return lines
