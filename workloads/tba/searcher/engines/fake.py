"""An engine without a model, for load tests: configurable lengths, rewards and speed; long responses finish later.

Every `step()` gives each request in flight `tokensPerStep` more tokens. Responses end with `eosToken` unless the limit
cut them. With `distinct` n, a prompt has n different responses, so that duplicates are frequent.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import xxhash
from pydantic import Field, ValidationError

from tba.contracts.base import Contract
from tba.contracts.errors import UserError
from tba.contracts.records import FinishReason, PolicyId, Span
from tba.searcher.engines.engine import Request, Response

if TYPE_CHECKING:
    from tba.snapshots import Snapshot


class Lengths(Contract):
    """Distribution of response lengths in tokens, end-of-sequence included."""

    distribution: Literal["lognormal", "fixed", "uniform"] = "lognormal"
    median: float = Field(40.0, ge=1)
    """Of lognormal; the value of fixed."""
    sigma: float = Field(0.8, ge=0)
    """Of lognormal."""
    low: int = Field(1, ge=1)
    """Of uniform."""
    high: int = Field(100, ge=1)
    """Of uniform, inclusive."""


class FakeSettings(Contract):
    """`engine.extraArgs` of type fake."""

    lengths: Lengths = Field(default_factory=lambda: Lengths.model_validate({}))
    vocabulary: int = Field(256, ge=2)
    """Token ids are below it: at most the model's, or the trainer will refuse them."""
    eos_token: int = Field(0, ge=0)
    tokens_per_step: int = Field(16, ge=1)
    tokens_per_second: float | None = Field(None, gt=0)
    """Of the whole engine; null: as fast as it can."""
    distinct: int | None = Field(None, ge=1)
    """Different responses a prompt; null: no limit."""
    reward_mean: float | None = 0.5
    """null: the job's reward function scores the responses."""
    version_gain: float = 0.0
    """Added to the mean for each policy version, so that there is something to see."""
    reward_noise: float | None = Field(None, ge=0)
    """null: rewards are 0 or 1 with that mean; else the standard deviation of normal noise around it."""


@dataclass(slots=True)
class _Row:
    request: Request
    tokens: list[int]
    finish_reason: FinishReason
    spans: list[Span]
    done: int = 0


class FakeEngine:
    """See the module. Deterministic in (prompt, seed) up to timing."""

    needs_weights = False
    takes_adapters = False

    def __init__(
        self,
        settings: FakeSettings,
        *,
        capacity: int = 256,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings = settings
        self._max_rows = capacity
        self._clock, self._sleep = clock, sleep
        self._policy: PolicyId | None = None
        self._rows: list[_Row] = []
        self._ready_at = clock()

    @property
    def capacity(self) -> int:
        """Responses it wants in flight."""
        return self._max_rows if self._policy else 0

    @property
    def in_flight(self) -> int:
        """Submitted and not yet returned."""
        return len(self._rows)

    def load(self, snapshot: "Snapshot") -> None:
        """Remember whose weights these are."""
        self._policy = snapshot.manifest.policy

    def submit(self, request: Request) -> None:
        """Decide the whole response; it takes shape step by step."""
        if self._policy is None:
            raise RuntimeError("load a snapshot before submitting requests")
        s = self._settings
        rng = np.random.Generator(np.random.PCG64(self._identity(request)))
        wanted = self._length(rng)
        length = min(wanted, request.max_tokens)
        ids = rng.integers(0, s.vocabulary - 1, length)
        tokens = (ids + (ids >= s.eos_token)).tolist()  # any id but the end
        reason = FinishReason.STOP if wanted <= request.max_tokens else FinishReason.LENGTH
        if reason is FinishReason.STOP:
            tokens[-1] = s.eos_token
        self._rows.append(_Row(request, tokens, reason, []))

    def _identity(self, request: Request) -> list[int]:
        seed = 0 if request.greedy else request.seed
        if self._settings.distinct is not None:
            seed %= self._settings.distinct
        prompt = xxhash.xxh3_64_intdigest(np.asarray(request.prompt_tokens, np.int64).tobytes())
        return [prompt, seed]

    def _length(self, rng: np.random.Generator) -> int:
        wanted = self._settings.lengths
        if wanted.distribution == "fixed":
            return int(wanted.median)
        if wanted.distribution == "uniform":
            return int(rng.integers(wanted.low, wanted.high, endpoint=True))
        return max(1, round(wanted.median * float(np.exp(wanted.sigma * rng.standard_normal()))))

    def step(self) -> list[Response]:
        """More tokens for every request in flight."""
        if not self._rows:
            return []
        assert self._policy is not None
        new = 0
        for row in self._rows:
            count = min(self._settings.tokens_per_step, len(row.tokens) - row.done)
            self._extend(row, count, self._policy)
            new += count
        self._pace(new)
        ended = [row for row in self._rows if row.done == len(row.tokens)]
        self._rows = [row for row in self._rows if row.done < len(row.tokens)]
        return [
            Response(row.request.id, row.tokens, row.finish_reason, row.spans, None, self._reward(row)) for row in ended
        ]

    @staticmethod
    def _extend(row: _Row, count: int, policy: PolicyId) -> None:
        row.done += count
        if row.spans and (row.spans[-1].epoch, row.spans[-1].version) == policy:
            row.spans[-1] = row.spans[-1]._replace(num_tokens=row.spans[-1].num_tokens + count)
        else:
            row.spans.append(Span(count, policy.epoch, policy.version))

    def _pace(self, tokens: int) -> None:
        if self._settings.tokens_per_second is None:
            return
        now = self._clock()
        self._ready_at = max(self._ready_at, now) + tokens / self._settings.tokens_per_second
        self._sleep(self._ready_at - now)

    def _reward(self, row: _Row) -> float | None:
        s = self._settings
        if s.reward_mean is None:
            return None
        mean = s.reward_mean + s.version_gain * row.spans[0].version
        rng = np.random.Generator(np.random.PCG64([*self._identity(row.request), 1]))
        if s.reward_noise is not None:
            return float(mean + s.reward_noise * rng.standard_normal())
        return float(rng.random() < mean)

    def decode(self, tokens: Sequence[int]) -> str:
        """Ids as text."""
        return " ".join(str(t) for t in tokens if t != self._settings.eos_token)

    def sleep(self, *, free_memory: bool) -> None:
        """There is no device."""

    def wake(self) -> None:
        """Speed counts from now."""
        self._ready_at = self._clock()

    def abort(self) -> None:
        """Forget all requests."""
        self._rows.clear()

    def close(self) -> None:
        """Nothing to free."""
        self.abort()


def fake_settings(extra_args: dict[str, object]) -> FakeSettings:
    """Raises: UserError if extraArgs do not fit."""
    try:
        return FakeSettings.model_validate(extra_args)
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(str(part) for part in found["loc"])
        raise UserError(
            f"searcher.engine.extraArgs.{where}: {found['msg']}, got {found['input']!r}; "
            f"engine fake takes {', '.join(f.alias or n for n, f in FakeSettings.model_fields.items())}"
        ) from error
