"""Draws batches from the replay buffer (system.md §6). Pure and seeded: same state, same data, same batches.

For each of P prompt slots: with probability m the most-on-policy (MOP) branch, else the replay branch. A branch of
probability 0 is never used; a slot whose branch has no eligible prompt takes the other one.
MOP: the newest complete visit of a prompt, K of its rows as they were generated (a response that came twice counts
twice). Replay: any distinct rows of a prompt. P prompt slots, K responses a group.
Staleness = step - effective version, with `step` = optimizer steps done = version of the live weights.

The pool holds whole *arrivals*: all visits that completed between two batches, as the paper's holds all that came with
a sync. Within an arrival the order of completion says nothing of age but much of length (the visits that an engine
finishes last are short ones begun late), so that a pool cut inside of it would train on short responses.
"""

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, Self

import numpy as np

from tba.contracts.config import LiveConfig, RunConfig
from tba.trainer.buffer import ReplayBuffer

RATIO_STEPS = 100  # window of the replay ratio


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """What a draw depends on; live fields may differ from step to step."""

    prompts_per_batch: int  # P
    responses_per_prompt: int  # K
    interval_steps: int  # k of the pool size ceil(k * P)
    ingest: Literal["Continuous", "AtSync"] = "Continuous"
    on_policy_probability: float = 0.95  # m
    sampling: Literal["Reward", "Uniform", "Recency"] = "Reward"
    inverse_temperature: float = 1.0
    min_initial_trajectories: int = 0
    max_replay_ratio: float | None = None
    max_policy_lag: int | None = None
    max_replay_lag: int | None = None

    @classmethod
    def from_config(cls, config: RunConfig, live: LiveConfig) -> Self:
        """Frozen fields from `config`, live ones from `live`."""
        return cls(
            prompts_per_batch=config.objective.prompts_per_batch,
            responses_per_prompt=config.objective.responses_per_prompt,
            interval_steps=live.sync.interval_steps,
            ingest=live.sync.ingest,
            on_policy_probability=config.buffer.on_policy_probability,
            sampling=config.buffer.sampling,
            inverse_temperature=config.buffer.inverse_temperature,
            min_initial_trajectories=config.buffer.min_initial_trajectories,
            max_replay_ratio=live.buffer.max_replay_ratio,
            max_policy_lag=live.buffer.max_policy_lag,
            max_replay_lag=live.buffer.max_replay_lag,
        )


@dataclass(frozen=True, slots=True)
class Ready:
    """A batch can be drawn."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """No batch can be drawn yet."""

    reason: str  # what is awaited, in words


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """Which rows make the batch. Row ids are those of the buffer it was drawn from, valid until its next change."""

    step: int  # optimizer steps done before this batch
    rows: np.ndarray  # (P, K) int64, as drawn; a repeated row is repeated here
    weights: np.ndarray  # (P, K) float32: multiplicity at a row's first place in its group, 0 at repeats; sums to K
    prompt_ids: np.ndarray  # (P,) int64
    replay: np.ndarray  # (P,) bool: slot took the replay branch
    with_replacement: np.ndarray  # (P,) bool: fewer than K candidates
    staleness: np.ndarray  # (P, K) int64, steps
    mop_recycles: int  # cumulative: times the MOP pool was exhausted and recycled


class Sampler:
    """Draws batches; owns the random stream, the MOP pool's use and the replay bag."""

    def __init__(self, seed: int) -> None:
        """`seed` of the only random stream."""
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._used: set[int] = set()  # completion numbers of pool visits drawn in this pass
        self._bag = np.zeros(0, "i4")  # prompt slots; the first _bag_size are left
        self._bag_size = 0
        self._sync: tuple[int, int] | None = None  # AtSync: the pool's completion numbers [start, end)
        self._arrivals = [0]  # Continuous: completion numbers at which arrivals begin, ascending; old ones go
        self._history: deque[tuple[int, int]] = deque(maxlen=RATIO_STEPS + 1)  # (rows ingested so far, rows trained)
        self._pool_key: tuple[int, ...] | None = None
        self._pool: list[tuple[int, int]] = []  # (slot, completion number)
        self._pool_start = 0  # completion number where the pool begins
        self._fresh: list[tuple[int, int]] = []  # of the pool, not drawn in this pass
        self.mop_recycles = 0  # cumulative
        self.trained_rows = 0  # P * K a batch, cumulative

    def on_sync(self, buffer: ReplayBuffer, *, extend: bool = False) -> None:
        """A snapshot was published: under AtSync the visits completed since the last call become the pool.

        If there are none, the old pool stays. The caller adds held-back shards right before. `extend`: they join the
        pool in place of replacing it, for what trickles in while the trainer waits. Without effect on Continuous.
        """
        start = 0 if self._sync is None else self._sync[0 if extend else 1]
        if buffer.complete_visits > start:
            self._sync = (start, buffer.complete_visits)

    def readiness(self, buffer: ReplayBuffer, step: int, settings: SamplingSettings) -> Ready | Waiting:
        """Whether `sample` may be called; draws nothing, so that waiting never changes the random stream."""
        wanted, have = settings.min_initial_trajectories, buffer.ingested_rows
        if have < wanted:
            failed = buffer.failed_rows
            why = f"; {failed} responses have no reward: see reward_failed in the searchers' logs" if failed else ""
            return Waiting(f"initial trajectories: {have} of minInitialTrajectories {wanted}{why}")
        if buffer.complete_visits < settings.prompts_per_batch:
            return Waiting(f"complete visits: {buffer.complete_visits} of promptsPerBatch {settings.prompts_per_batch}")
        if not (self._mop_pool(buffer, step, settings) or self._may_replay(buffer, step, settings)):
            return Waiting(_missing(buffer, step, settings))
        limit = settings.max_replay_ratio
        ratio = self._ratio(buffer, settings.prompts_per_batch * settings.responses_per_prompt)
        if limit is not None and ratio > limit:
            would = _told_above(ratio, limit)
            return Waiting(f"new trajectories: replay ratio would be {would}, above maxReplayRatio {limit:g}")
        return Ready()

    def replay_ratio(self, buffer: ReplayBuffer) -> float:
        """Rows trained / rows ingested (before de-duplication) over the last 100 steps; 0 before the first step."""
        return self._ratio(buffer, 0)

    def sample(self, buffer: ReplayBuffer, step: int, settings: SamplingSettings) -> BatchPlan:
        """Draw the batch of the next optimizer step. Raises: RuntimeError if not ready."""
        state = self.readiness(buffer, step, settings)
        if isinstance(state, Waiting):
            raise RuntimeError(f"no batch can be drawn, waiting for {state.reason}: ask readiness first")
        num_prompts, size = settings.prompts_per_batch, settings.responses_per_prompt
        pool, may_replay = self._mop_pool(buffer, step, settings), self._may_replay(buffer, step, settings)
        wants_mop = self._rng.random(num_prompts) < settings.on_policy_probability
        replay = ~wants_mop & may_replay if pool else np.ones(num_prompts, bool)
        rows = np.empty((num_prompts, size), "i8")
        slots, with_replacement = [], np.zeros(num_prompts, bool)
        for i in range(num_prompts):
            if replay[i]:
                slot, rows[i], num = self._draw_replay(buffer, step, settings)
            else:
                slot, rows[i], num = self._draw_mop(buffer, size)
            slots.append(slot)
            with_replacement[i] = num < size
        self._history.append((buffer.ingested_rows, rows.size))
        # Only here, never while waiting: when readiness is asked, and under which limits, must not show in later draws.
        self._used &= {number for _, number in pool}
        if settings.on_policy_probability > 0:
            self._note_arrival(buffer, settings)
        self.trained_rows += rows.size
        return BatchPlan(
            step=step,
            rows=rows,
            weights=_multiplicities(rows),
            prompt_ids=buffer.prompts.ids(np.array(slots)),
            replay=replay,
            with_replacement=with_replacement,
            staleness=step - buffer.versions(rows),
            mop_recycles=self.mop_recycles,
        )

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "rng": self._rng.bit_generator.state,
            "used": sorted(self._used),
            "bag": self._bag[: self._bag_size].tolist(),
            "sync": self._sync,
            "arrivals": self._arrivals,
            "history": [list(entry) for entry in self._history],
            "mop_recycles": self.mop_recycles,
            "trained_rows": self.trained_rows,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state` was taken, with a buffer restored from the same moment."""
        self._rng.bit_generator.state = state["rng"]
        self._used = set(state["used"])
        self._bag = np.array(state["bag"], "i4")
        self._bag_size = len(self._bag)
        self._sync = None if state["sync"] is None else (state["sync"][0], state["sync"][1])
        self._arrivals = list(state["arrivals"])
        self._history = deque(((ingested, trained) for ingested, trained in state["history"]), maxlen=RATIO_STEPS + 1)
        self.mop_recycles = state["mop_recycles"]
        self.trained_rows = state["trained_rows"]
        self._pool_key = None

    # -- private: what may be drawn

    def _mop_pool(self, buffer: ReplayBuffer, step: int, settings: SamplingSettings) -> list[tuple[int, int]]:
        """The pool's visits, none older than maxPolicyLag; empty if m is 0."""
        if settings.on_policy_probability == 0:
            return []
        oldest = _bound(step, settings.max_policy_lag)
        limit = math.ceil(settings.interval_steps * settings.prompts_per_batch)
        at_sync = settings.ingest == "AtSync"
        start, end = (0, buffer.complete_visits) if self._sync is None else self._sync
        key = (id(buffer), buffer.changes, oldest, *((start, end) if at_sync else (limit,)))
        if key != self._pool_key:
            self._pool_key = key
            if not at_sync:
                start, end = self._newest_arrivals(buffer, limit, oldest), buffer.complete_visits
            self._pool_start = start
            self._pool = buffer.prompts.visits_between(start, end, oldest)
            self._fresh = [visit for visit in self._pool if visit[1] not in self._used]
        return self._pool

    def _note_arrival(self, buffer: ReplayBuffer, settings: SamplingSettings) -> None:
        """What completes from now on is the next arrival."""
        self._arrivals = [begin for begin in self._arrivals if begin >= self._pool_start]
        if buffer.complete_visits > (self._arrivals[-1] if self._arrivals else 0):
            self._arrivals.append(buffer.complete_visits)
        if settings.ingest != "AtSync":  # where a live change to it goes on from: else its pool would be all there is
            self._sync = (self._pool_start, buffer.complete_visits)

    def _newest_arrivals(self, buffer: ReplayBuffer, limit: int, oldest: int) -> int:
        """Completion number from which on whole arrivals hold visits of at least `limit` prompts; 0 if all do not.

        Where the arrival that it takes is forgotten, because a live change has made the pool larger or a cap has taken
        newer visits, that one alone is cut: all that came before it is no substitute.
        """
        newest = buffer.prompts.newest_visits(limit, oldest)
        if len(newest) < limit:
            return 0
        begun = bisect_right(self._arrivals, newest[-1][1])
        return self._arrivals[begun - 1] if begun else newest[-1][1]

    def _may_replay(self, buffer: ReplayBuffer, step: int, settings: SamplingSettings) -> bool:
        if settings.on_policy_probability == 1:
            return False
        newest = buffer.prompts.newest_version()
        return newest is not None and newest >= _bound(step, settings.max_replay_lag)

    def _ratio(self, buffer: ReplayBuffer, extra_rows: int) -> float:
        """Of the last 100 steps; the next step is one of them if it trains `extra_rows`."""
        window = RATIO_STEPS - (extra_rows > 0)
        history = list(self._history)
        before = history[-window - 1][0] if len(history) > window else 0
        trained = sum(rows for _, rows in history[-window:]) + extra_rows
        return trained / max(buffer.ingested_rows - before, 1)  # finite, because it is written as JSON

    # -- private: draws

    def _draw_mop(self, buffer: ReplayBuffer, size: int) -> tuple[int, np.ndarray, int]:
        """(slot, K rows, candidates): a pool visit not drawn in this pass, its rows as generated."""
        if not self._fresh:
            self.mop_recycles += 1
            self._fresh, self._used = list(self._pool), set()
        slot, number = self._fresh.pop(int(self._rng.integers(len(self._fresh))))
        self._used.add(number)
        rows = buffer.prompts.visit_rows(slot)
        if len(rows) >= size:
            return slot, rows[self._rng.permutation(len(rows))[:size]], len(rows)
        return slot, rows[self._rng.integers(len(rows), size=size)], len(rows)

    def _draw_replay(self, buffer: ReplayBuffer, step: int, settings: SamplingSettings) -> tuple[int, np.ndarray, int]:
        """(slot, K rows, candidates): the next prompt of the bag, its distinct rows by priority."""
        oldest, size = _bound(step, settings.max_replay_lag), settings.responses_per_prompt
        rows = np.zeros(0, "i4")
        slot = -1
        while not len(rows):  # ends: _may_replay found a prompt, and a refilled bag holds it
            slot = self._next_of_bag(buffer, oldest)
            rows = buffer.members(slot, oldest)
        scores = _scores(buffer, rows, step, settings)
        if len(rows) >= size:  # Gumbel top-K = draws one by one without replacement
            keys = scores + self._rng.gumbel(size=len(rows))
            return slot, rows[np.argsort(-keys, kind="stable")[:size]], len(rows)
        cumulative = np.cumsum(np.exp(scores - scores.max()))
        picks = np.searchsorted(cumulative, self._rng.random(size) * cumulative[-1], side="right")
        return slot, rows[np.minimum(picks, len(rows) - 1)], len(rows)

    def _next_of_bag(self, buffer: ReplayBuffer, oldest: int) -> int:
        """A prompt slot without replacement; an empty bag is refilled with all that may be drawn now."""
        if self._bag_size == 0:
            self._bag = buffer.prompts.replayable(oldest)
            self._bag_size = len(self._bag)
        i = int(self._rng.integers(self._bag_size))
        slot = int(self._bag[i])
        self._bag_size -= 1
        self._bag[i] = self._bag[self._bag_size]
        return slot


def _bound(step: int, lag: int | None) -> int:
    """The oldest version within the lag."""
    return 0 if lag is None else max(step - lag, 0)


def _scores(buffer: ReplayBuffer, rows: np.ndarray, step: int, settings: SamplingSettings) -> np.ndarray:
    """Unnormalised log-priorities, float64."""
    if settings.sampling == "Uniform":
        return np.zeros(len(rows))
    value = buffer.rewards(rows).astype("f8") if settings.sampling == "Reward" else buffer.versions(rows) - float(step)
    return value * settings.inverse_temperature


def _multiplicities(rows: np.ndarray) -> np.ndarray:
    """(P, K) float32: how often a row stands in its group, at its first place; 0 at the others."""
    equal = rows[:, :, None] == rows[:, None, :]  # (P, K, K)
    first = equal.argmax(2) == np.arange(rows.shape[1])
    return np.where(first, equal.sum(2), 0).astype("f4")


def _told_above(value: float, limit: float) -> str:
    """`value` with as many digits as show that it is above `limit`, two at least."""
    tellings = (f"{value:.{digits}f}" for digits in count(2))
    return next(told for told in tellings if float(told) > limit)


def _missing(buffer: ReplayBuffer, step: int, settings: SamplingSettings) -> str:
    """What would make a branch eligible."""
    newest, m = buffer.prompts.newest_version(), settings.on_policy_probability
    branches = [
        (what, name, lag)
        for what, name, lag, used in (
            ("complete visit", "maxPolicyLag", settings.max_policy_lag, m > 0),
            ("trajectory", "maxReplayLag", settings.max_replay_lag, m < 1),
        )
        if used
    ]
    lags = [f"a {what} at most {lag} steps old ({name})" for what, name, lag in branches if lag is not None]
    have = "none is left" if newest is None else f"the newest is {step - newest} steps old"
    never, k = "", settings.interval_steps
    if all(lag is not None and lag < k - 1 for _, _, lag in branches):
        never = f"; with sync.intervalSteps {k} even new ones may be {k - 1}: allow that, or lower intervalSteps"
    return f"{' or '.join(lags) or 'a complete visit'}: {have}{never}"
