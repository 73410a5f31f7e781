"""Bounded retries with full jitter: the one place that decides whether to wait and try again.

    attempt ── result ─────────────────────────────▶ caller
       │ Transient
       ├─ attempts and budget left ── wait random() · min(cap, base · 2^n) ──▶ attempt
       └─ spent ──▶ StoreUnavailable(what, got, remedy)
       │ OutOfSpace ───────────────────────────────────▶ caller, at once
       │ WrongIdentity: the same, within the patience of `Rotation` ──▶ UserError, AccessDenied

Source: full jitter, AWS Architecture Blog "Exponential Backoff And Jitter".
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tba.contracts.errors import StoreUnavailable, UserError
from tba.store.protocol import AccessDenied, AlreadyExists, Conflict, NotFound, OutOfSpace

T = TypeVar("T")
Observer = Callable[[str, str], None]
"""Called with (operation, outcome) for every attempt; a call that gives up adds one `unavailable`.

Outcomes: `ok`, `refused` (an answer, such as NotFound), `retried`, `error`.
"""


class Transient(Exception):
    """A failure that may pass: the retrier tries again."""

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause or message
        """In a few words, such as `Connection refused`."""


class WrongIdentity(UserError):
    """The server does not know these credentials. During a rotation that passes: see `Rotation`."""


class Trouble(NamedTuple):
    """Requests fail, one after another."""

    since: float
    """Unix seconds of the first."""
    error: str
    """Of the newest."""


class Wait(NamedTuple):
    """A call was not served and sleeps before its next attempt."""

    place: str
    """The endpoint or directory."""
    cause: str
    """Why, in a few words."""
    seconds: float
    """From the call's beginning to the next attempt."""
    left_seconds: float
    """From now until the call gives up, at the most."""


WaitListener = Callable[[Wait], None]
"""Told before every sleep, in the thread of the call."""


class Weather:
    """Whether requests of a process succeed. Any thread may tell or ask: `trouble` is replaced whole."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.trouble: Trouble | None = None
        """None if the last request was answered."""

    def failed(self, error: str) -> None:
        """A request got no answer that counts."""
        before = self.trouble
        self.trouble = Trouble(before.since if before else self._clock(), error)

    def answered(self) -> None:
        """A request was served, or refused for good."""
        self.trouble = None


@dataclass(frozen=True, slots=True)
class Rotation:
    """How long a server's refusal of our keys is sat out, for credentials that are read again."""

    first_seconds: float = 0.0
    """Before the server has ever known them: they are most likely wrong."""
    later_seconds: float = 0.0
    """Afterwards: the old key is gone and the new one is on its way."""
    where: str = ""
    """Where the keys come from, for the error."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to insist. A call takes at most its budget + one request's time limit."""

    budget_seconds: float = 120.0
    first_budget_seconds: float | None = None
    """That of calls before the store has served any: a shorter one suits an address that may be mistyped. None: the
    same."""
    max_attempts: int = 20
    base_delay_seconds: float = 0.1
    max_delay_seconds: float = 20.0
    request_timeout_seconds: float = 30.0
    connect_timeout_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or min(self.budget_seconds, self.first_budget_seconds or 0) < 0:
            raise ValueError(f"need max_attempts >= 1 and budgets >= 0, got {self}")
        if min(self.request_timeout_seconds, self.connect_timeout_seconds, self.base_delay_seconds) <= 0:
            raise ValueError(f"timeouts and delays must be positive, got {self}")


class Retrier:
    """Runs attempts under one policy; clock, sleep and random generator are given, so tests need no time."""

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[], float] = random.random,
        observe: Observer | None = None,
        weather: Weather | None = None,
        rotation: Rotation | None = None,
        place: Callable[[], str] = lambda: "the storage",
        on_wait: WaitListener | None = None,
    ) -> None:
        """`place`: where requests go now, for people."""
        self.policy = policy
        self._clock = clock
        self._sleep = sleep
        self._uniform = uniform
        self._observe = observe or (lambda operation, outcome: None)
        self._weather = weather or Weather()
        self._rotation = rotation or Rotation()
        self._place = place
        self._on_wait = on_wait or (lambda wait: None)
        self._known = False  # the server has taken our credentials once

    def call(self, operation: str, subject: str, attempt: Callable[[], T], *, remedy: str = "") -> T:
        """Return `attempt()`, tried again after each Transient, and after WrongIdentity during a rotation.

        Raises: StoreUnavailable when attempts or budget are spent; AccessDenied for keys that were known once and stay
        unknown; whatever else `attempt` raises, at once.
        """
        started = self._clock()
        number = 0
        while True:
            number += 1
            try:
                return self._try(operation, attempt)
            except Transient as error:
                cause, delay, patience = error.cause, self.delay(number), self._budget_seconds
                if number >= self.policy.max_attempts or self._clock() + delay > started + patience:
                    self._observe(operation, "unavailable")
                    raise self.give_up(operation, subject, number, error, remedy) from error
            except WrongIdentity as error:
                cause, delay, patience = str(error), self.delay(number), self._rotation_seconds
                if self._clock() + delay >= started + patience:
                    raise self._refused(error) from error
            waited = self._clock() - started
            self._on_wait(Wait(self._place(), cause, waited + delay, patience - waited))
            self._sleep(delay)

    @property
    def _budget_seconds(self) -> float:
        first = self.policy.first_budget_seconds
        return self.policy.budget_seconds if self._known or first is None else first

    @property
    def _rotation_seconds(self) -> float:
        return self._rotation.later_seconds if self._known else self._rotation.first_seconds

    def _try(self, operation: str, attempt: Callable[[], T]) -> T:
        outcome = "error"
        try:
            result = attempt()
            outcome = "ok"
            return result
        except (Transient, WrongIdentity) as error:
            outcome = "retried"
            self._weather.failed(str(error))
            raise
        except OutOfSpace as error:
            outcome = "unavailable"
            self._weather.failed(str(error))
            raise
        except (NotFound, AlreadyExists, Conflict):
            outcome = "refused"
            raise
        except AccessDenied:
            self._known = True
            raise
        finally:
            self._observe(operation, outcome)
            if outcome not in ("retried", "unavailable"):
                self._weather.answered()
            if outcome in ("ok", "refused") and operation != "now":  # the server's clock is told to anybody
                self._known = True

    def _refused(self, error: WrongIdentity) -> UserError:
        """Final at the start of a process, or if the keys never change; else denied access, which many sit out."""
        where = f"; the keys come from {self._rotation.where}" if self._rotation.where else ""
        passing = self._known and self._rotation.later_seconds > 0
        return (AccessDenied if passing else UserError)(f"{error}{where}")

    def delay(self, number: int) -> float:
        """Seconds to wait after failed attempt `number` (from 1): uniform in [0, min(cap, base * 2^(number-1)))."""
        # The exponent is capped: 2.0 ** 1100 would overflow long before the cap is applied.
        ceiling = min(self.policy.max_delay_seconds, self.policy.base_delay_seconds * 2.0 ** min(number - 1, 60))
        return self._uniform() * ceiling

    def give_up(
        self, operation: str, subject: str, attempts: int, error: Exception, remedy: str = ""
    ) -> StoreUnavailable:
        """The exception that ends a call whose budget is spent."""
        advice = remedy or f"check that {self._place()} is up and reachable from here"
        return StoreUnavailable(
            f"storage did not serve {operation} {subject} in {attempts} attempts "
            f"(budget {self._budget_seconds:g} s); last error: {error}; {advice}"
        )
