"""The one place where errors become exit codes (interface.md §2).

0 done, 1 crash or damaged object, 2 storage unavailable, 3 fenced, 64 user error, 130 Ctrl-C, 143 SIGTERM.
"""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import typer

from tba.contracts.errors import CorruptObject, Fenced, LeftAlone, NotFound, RanksMissing, StoreUnavailable, UserError

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""What a person mends, not a programmer: told without a traceback."""
CRASH = 1
INTERRUPTED = 130
TERMINATED = 143
MARK = "error: "
"""How a told error begins; `tba run` looks for it in the logs of its processes."""

# typer vends click under a private name; its public BadParameter leads to the base of all usage errors.
_USAGE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a command ended."""

    code: int
    message: str = ""
    """The told error, without its mark; of a crash the last line of its traceback."""


class Terminated(BaseException):
    """SIGTERM arrived; not an Exception, so that nothing on the way swallows it."""


def raise_on_sigterm() -> None:
    """For commands without a shutdown of their own: SIGTERM unwinds the stack and ends with 143."""
    signal.signal(signal.SIGTERM, _terminate)


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """The same, for a while: a process that has no handler yet and is process 1 would never get the signal."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_code(body: Callable[[], Any]) -> int:
    """The code alone of `ending_of`."""
    return ending_of(body).code


def ending_of(body: Callable[[], Any]) -> Ending:
    """Run `body` and map what it returns (None or a code) or raises to an ending, telling errors on stderr."""
    try:
        result = body()
        return Ending(result if isinstance(result, int) else 0)
    except (UserError, StoreUnavailable, Fenced, CorruptObject, RanksMissing, LeftAlone) as error:
        return Ending(error.exit_code, tell(str(error)))
    except (NotFound, FloatingPointError) as error:
        return Ending(CRASH, tell(_no_bug(error)))
    except typer.Exit as error:
        return Ending(error.exit_code)
    except _USAGE_ERROR as error:
        error.show()
        return Ending(UserError.exit_code, error.format_message())
    except (KeyboardInterrupt, typer.Abort):
        return Ending(INTERRUPTED)
    except Terminated:
        return Ending(TERMINATED)
    except BrokenPipeError:
        # The reader of our output left (`| head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Ending(CRASH)
    except SystemExit as error:
        return Ending(error.code if isinstance(error.code, int) else CRASH)
    except BaseException as error:  # the top of the process
        return Ending(CRASH, _tell_crash(error))


def end_process(code: int) -> NoReturn:
    """Leave with this code, also amid a group of ranks.

    The threads of torch.distributed's groups may still drop tensors, for which they need the interpreter: one that ends
    before they have done so aborts (134 in place of 64, and a job is tried again that cannot succeed).
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _terminate(_signum: int, _frame: Any) -> None:
    raise Terminated


def _no_bug(error: NotFound | FloatingPointError) -> str:
    if isinstance(error, NotFound):
        return f"{error.args[0]} has gone: a sweep or a person deleted it. Restore it if you can"
    return str(error)  # of the optimizer, which says what would help


def _tell_crash(error: BaseException) -> str:
    """A full or unwritable disk with its remedy; anything else is a bug, told in full. Returns its last line."""
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return tell(f"{error}: make the path writable or free some space, then run this again")
    traceback.print_exc()
    return "".join(traceback.format_exception_only(error)).strip()


def tell(message: str) -> str:
    """Print an error for people: what, got, remedy; no traceback. Returns it."""
    sys.stderr.write(f"{MARK}{message}\n")
    sys.stderr.flush()
    return message
