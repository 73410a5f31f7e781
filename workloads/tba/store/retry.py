"""Bounded retries with full jitter: the one place that decides whether to wait and try again.

    attempt ── result ─────────────────────────────▶ caller
       │ Transient
       ├─ attempts and budget left ── wait random() · min(cap, base · 2^n) ──▶ attempt
       └─ spent ──▶ StoreUnavailable(what, got, remedy)

Source: full jitter, AWS Architecture Blog "Exponential Backoff And Jitter".
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tba.contracts.errors import StoreUnavailable
from tba.store.protocol import AlreadyExists, Conflict, NotFound

T = TypeVar("T")
Observer = Callable[[str, str], None]
"""Called with (operation, outcome) for every attempt; a call that gives up adds one `unavailable`.

Outcomes: `ok`, `refused` (an answer, such as NotFound), `retried`, `error`.
"""


class Transient(Exception):
    """A failure that may pass: the retrier tries again."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to insist. A call takes at most `budget_seconds` + one request's time limit."""

    budget_seconds: float = 120.0
    max_attempts: int = 20
    base_delay_seconds: float = 0.1
    max_delay_seconds: float = 20.0
    request_timeout_seconds: float = 30.0
    connect_timeout_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or self.budget_seconds < 0:
            raise ValueError(f"need max_attempts >= 1 and budget_seconds >= 0, got {self}")
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
    ) -> None:
        self.policy = policy
        self._clock = clock
        self._sleep = sleep
        self._uniform = uniform
        self._observe = observe or (lambda operation, outcome: None)

    def call(self, operation: str, subject: str, attempt: Callable[[], T], *, remedy: str = "") -> T:
        """Return `attempt()`, tried again after each Transient.

        Raises: StoreUnavailable when attempts or budget are spent; whatever else `attempt` raises, at once.
        """
        deadline = self._clock() + self.policy.budget_seconds
        for number in range(1, self.policy.max_attempts + 1):
            try:
                return self._try(operation, attempt)
            except Transient as error:
                delay = self.delay(number)
                if number == self.policy.max_attempts or self._clock() + delay > deadline:
                    self._observe(operation, "unavailable")
                    raise self.give_up(operation, subject, number, error, remedy) from error
            self._sleep(delay)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _try(self, operation: str, attempt: Callable[[], T]) -> T:
        outcome = "error"
        try:
            result = attempt()
            outcome = "ok"
            return result
        except Transient:
            outcome = "retried"
            raise
        except (NotFound, AlreadyExists, Conflict):
            outcome = "refused"
            raise
        finally:
            self._observe(operation, outcome)

    def delay(self, number: int) -> float:
        """Seconds to wait after failed attempt `number` (from 1): uniform in [0, min(cap, base * 2^(number-1)))."""
        # The exponent is capped: 2.0 ** 1100 would overflow long before the cap is applied.
        ceiling = min(self.policy.max_delay_seconds, self.policy.base_delay_seconds * 2.0 ** min(number - 1, 60))
        return self._uniform() * ceiling

    def give_up(
        self, operation: str, subject: str, attempts: int, error: Exception, remedy: str = ""
    ) -> StoreUnavailable:
        """The exception that ends a call whose budget is spent."""
        advice = remedy or "check that the storage is up and reachable from here"
        return StoreUnavailable(
            f"storage did not serve {operation} {subject} in {attempts} attempts "
            f"(budget {self.policy.budget_seconds:g} s); last error: {error}; {advice}"
        )
