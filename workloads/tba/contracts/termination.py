"""The last words of a trainer or searcher container, in its termination message (at most 4 KiB)."""

from pathlib import Path

from pydantic import Field

from tba.contracts.base import Contract
from tba.contracts.history import Progress
from tba.contracts.newer import read_known

MAX_BYTES = 4096
MAX_MESSAGE_CHARS = 2000


class Termination(Contract):
    """Written to TBA_TERMINATION_PATH when a process ends."""

    exit_code: int = Field(ge=0, le=255)
    message: str = Field(default="", max_length=MAX_MESSAGE_CHARS)
    """The told error: what, got, remedy; empty after success."""
    progress: Progress | None = None
    """Of a trainer."""


def read_termination(text: str) -> Termination | None:
    """A container's termination message; null if it is none of ours (a killed process, the end of a log)."""
    try:
        return read_known(Termination, text)
    except ValueError:
        return None


def write_termination(path: Path, termination: Termination) -> None:
    """Best effort: a message that cannot be written must not change an exit code."""
    data = termination.to_json()
    if len(data) > MAX_BYTES:
        data = termination.model_copy(update={"message": termination.message[:500], "progress": None}).to_json()
    try:
        path.write_bytes(data[:MAX_BYTES])
    except OSError:
        return
