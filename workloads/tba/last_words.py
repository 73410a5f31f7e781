"""How a trainer or searcher container ended, left where Kubernetes reads it: its termination message.

`$TBA_TERMINATION_PATH` names the file; without it nothing is written. Pydantic is imported only then.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tba.contracts.history import Progress

_MAX_DETAIL_CHARS = 200

_sources: list["Callable[[], Progress]"] = []


def report_progress(source: "Callable[[], Progress]") -> None:
    """Have the last words of this process carry what `source` says then. For a trainer, once."""
    _sources[:] = [source]


def leave(exit_code: int, message: str) -> None:
    """Write the last words. `message`: the told error, or empty."""
    path = os.environ.get("TBA_TERMINATION_PATH")
    if not path:
        return
    from tba.contracts.termination import MAX_MESSAGE_CHARS, Termination, write_termination

    progress = _sources[0]() if _sources else None
    if progress is not None:  # there is room for 4 KiB, and the error says the same
        progress = progress.model_copy(update={"alerts": [], "detail": progress.detail[:_MAX_DETAIL_CHARS]})
    told = message[:MAX_MESSAGE_CHARS]
    write_termination(Path(path), Termination(exit_code=exit_code, message=told, progress=progress))
