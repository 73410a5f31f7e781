"""The error kinds that decide an exit code. Everything else is a bug and crashes loudly."""


class UserError(ValueError):
    """Wrong input by the user: the message says what, got, remedy. Exit code 64; ends the job."""

    exit_code = 64


class StoreUnavailable(RuntimeError):
    """Storage could not be reached within its retry budget. Exit code 2; retried, not counted."""

    exit_code = 2


class Fenced(RuntimeError):
    """A newer trainer owns the run: nothing more of this process may be published. Exit code 3."""

    exit_code = 3


class CorruptObject(RuntimeError):
    """An object's bytes do not match its recorded size or hash, or cannot be parsed."""

    exit_code = 1


class NotFound(KeyError):
    """No such object: its address. Exit code 1 where nobody expected that."""

    exit_code = 1


class RanksMissing(RuntimeError):
    """Other ranks of this trainer did not come. Exit code 1; retried, counted."""

    exit_code = 1


class LeftAlone(RuntimeError):
    """Rank 0 of this trainer did not come, or has gone. Exit code 143; retried, not counted: rank 0's own end is."""

    exit_code = 143
