"""Where a command writes what `--output` names."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tba.contracts.errors import UserError

_WRONG_PATH = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Around what makes `path`. Raises: UserError if nothing can be made there; a full disk is another matter."""
    try:
        yield
    except _WRONG_PATH as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"--output {path} cannot be written ({reason}): name a path that can be made") from error
