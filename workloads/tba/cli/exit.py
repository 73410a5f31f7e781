"""The one place where errors become exit codes (interface.md §2).

0 done, 1 crash or damaged object, 2 storage unavailable, 3 fenced, 64 user error, 130 Ctrl-C, 143 SIGTERM.
"""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import typer

from tba.contracts.errors import CorruptObject, Fenced, StoreUnavailable, UserError

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""What a person mends, not a programmer: told without a traceback."""
CRASH = 1
INTERRUPTED = 130
TERMINATED = 143
MARK = "error: "
"""How a told error begins; `tba run` looks for it in the logs of its processes."""

# typer vends click under a private name; its public BadParameter leads to the base of all usage errors.
_USAGE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class Terminated(BaseException):
    """SIGTERM arrived; not an Exception, so that nothing on the way swallows it."""


def raise_on_sigterm() -> None:
    """For commands without a shutdown of their own: SIGTERM unwinds the stack and ends with 143."""

    def terminate(_signum: int, _frame: Any) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)


def exit_code(body: Callable[[], Any]) -> int:
    """Run `body` and map what it returns (None or a code) or raises to an exit code, telling errors on stderr."""
    try:
        result = body()
        return result if isinstance(result, int) else 0
    except (UserError, StoreUnavailable, Fenced, CorruptObject) as error:
        tell(str(error))
        return error.exit_code
    except typer.Exit as error:
        return error.exit_code
    except _USAGE_ERROR as error:
        error.show()
        return UserError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Terminated:
        return TERMINATED
    except BrokenPipeError:
        # The reader of our output left (`| head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CRASH
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else CRASH
    except BaseException as error:  # the top of the process
        _tell_crash(error)
        return CRASH


def _tell_crash(error: BaseException) -> None:
    """A full or unwritable disk with its remedy; anything else is a bug, told in full."""
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        tell(f"{error}: make the path writable or free some space, then run this again")
    else:
        traceback.print_exc()


def tell(message: str) -> None:
    """Print an error for people: what, got, remedy; no traceback."""
    sys.stderr.write(f"{MARK}{message}\n")
    sys.stderr.flush()
