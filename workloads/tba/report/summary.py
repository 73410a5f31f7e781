"""The numbers a person looks at first, from a run's history: status, watch, run and report show these."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tba.contracts.history import StepRow
from tba.contracts.records import RunState
from tba.protocol.liveness import searchers_alive
from tba.report.history import BEGINNINGS, History
from tba.report.split import searcher_time, trainer_time

RECENT_STEPS = 20
SILENT_SECONDS = 120.0
"""Without any new row for so long a running trainer is reported as not heard of."""

WAITS = {"waiting": "WaitingForData", "waiting_storage": "WaitingForStorage"}
"""Event -> state. Told again now and then while the wait lasts."""
_STATE_EVENTS = (*BEGINNINGS, *WAITS, "continued", "stopped", "finished")
"""Events after which the trainer does something else; a checkpoint, say, is none."""


@dataclass(frozen=True, slots=True)
class Summary:
    """State of a run. None = not known yet. Means are over the last 20 steps."""

    run_id: str | None
    owner: str | None
    state: str
    detail: str
    epoch: int
    step: int
    total_steps: int | None
    policy_version: int | None
    reward: float | None
    """Of the responses that arrived."""
    trained_reward: float | None
    """Of batches, which may hold replayed rows."""
    eval_score: float | None
    eval_standard_error: float | None
    eval_step: int | None
    staleness_mean: float | None
    staleness_max: int | None
    trainer_idle_percent: float | None
    searcher_idle_percent: float | None
    """Waits for weights, storage and rewards, and having nothing to do, of all searcher processes."""
    trainer_mfu: float | None
    """Model FLOPs utilisation of all the time, 0..1; None: no GPU whose peak is known, or an unknown kind of model."""
    searcher_mfu: float | None
    trainer_seconds: dict[str, float]
    """By phase, over the whole run."""
    searcher_seconds: dict[str, float]
    """The same of all searcher processes together."""
    generated_tokens_per_second: float | None
    trained_tokens_per_second: float | None
    replay_ratio: float | None
    replay_slots: int
    """Prompt slots that took the replay branch, over the whole run."""
    slots: int
    searchers_alive: int
    searchers: int
    """Incarnations, over the whole run."""
    trajectories: int
    failed_trajectories: int
    """Of them, those without a reward."""
    quarantined_shards: int
    eta_seconds: float | None
    newest_row_age_seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        """For `--json`: camelCase names."""
        return {_camel(name): value for name, value in asdict(self).items()}


def summarise(history: History, now: float) -> Summary:
    """`now` in Unix seconds by this machine's clock; it decides who counts as alive."""
    recent = history.steps[-RECENT_STEPS:]
    last = recent[-1] if recent else None
    evaluation = history.evaluations[-1] if history.evaluations else None
    total = history.run.config.objective.total_steps if history.run else None
    latest = history.latest
    age = now - history.newest_time if history.newest_time is not None else None
    state, detail = _state(history, age)
    staleness = sum((Counter(r.staleness) for r in recent), Counter[int]())
    trainer, searchers = trainer_time(history), searcher_time(history)
    step = max(last.step if last else 0, latest.step if latest and not last else 0)
    return Summary(
        run_id=history.run.run_id if history.run else None,
        owner=history.run.owner if history.run else None,
        state=state,
        detail=detail,
        epoch=latest.epoch if latest else 0,
        step=step,
        total_steps=total,
        policy_version=latest.version if latest and latest.manifest else None,
        reward=_mean(rewards_generated(recent)),
        trained_reward=_mean([r.reward_mean for r in recent]),
        eval_score=evaluation.pass_at_1 if evaluation else None,
        eval_standard_error=evaluation.standard_error if evaluation else None,
        eval_step=evaluation.step if evaluation else None,
        staleness_mean=weighted_mean(staleness),
        staleness_max=max(staleness, default=None),
        trainer_idle_percent=trainer.idle_percent if len(history.steps) > 1 else None,
        searcher_idle_percent=searchers.idle_percent,
        trainer_mfu=trainer.mfu,
        searcher_mfu=searchers.mfu,
        trainer_seconds=trainer.seconds,
        searcher_seconds=searchers.seconds,
        generated_tokens_per_second=_rate(recent, "generated_tokens"),
        trained_tokens_per_second=_rate(recent, "trained_tokens"),
        replay_ratio=last.replay_ratio if last else None,
        replay_slots=sum(r.replay_slots for r in history.steps),
        slots=sum(r.slots for r in history.steps),
        searchers_alive=searchers_alive(history.searchers, now),
        searchers=len(history.searchers),
        # Before the first step, and while none is made, searchers' rows are all that is known.
        trajectories=max(last.ingested_rows if last else 0, sum(s.rows for s in history.searchers)),
        failed_trajectories=max(last.failed_rows if last else 0, sum(s.failed for s in history.searchers)),
        quarantined_shards=len(history.quarantines),
        eta_seconds=_eta(recent, total, step) if state not in ("Complete", "Failed", "Stopped") else None,
        newest_row_age_seconds=age,
    )


def staleness_histogram(history: History) -> Counter[int]:
    """Steps of staleness -> trained rows, over the whole run."""
    return sum((Counter(r.staleness) for r in history.steps), Counter[int]())


def weighted_mean(counts: Counter[int]) -> float | None:
    """Mean of the keys, weighted by the counts; None if there are none."""
    total = sum(counts.values())
    return sum(k * n for k, n in counts.items()) / total if total else None


def _state(history: History, age: float | None) -> tuple[str, str]:
    latest = history.latest
    if latest is None:
        return "Absent", "no run here yet: nothing has written `latest`"
    if latest.state is not RunState.RUNNING:
        return latest.state.value, history.events[-1].detail if history.events else ""
    newest = next((e for e in reversed(history.events) if e.event in _STATE_EVENTS), None)
    if newest and newest.event == "stopped":
        return "Stopped", newest.detail
    newest_step_time = history.steps[-1].time if history.steps else -math.inf
    if age is not None and age > SILENT_SECONDS:
        return "Silent", f"no news for {age:.0f} s: the trainer is stopped, stuck or cut off from storage"
    if newest and newest.event in WAITS and newest.time > newest_step_time:
        return WAITS[newest.event], newest.detail
    return ("Training", "") if history.steps else ("Starting", newest.detail if newest else "")


def _rate(rows: list[StepRow], name: str) -> float | None:
    if len(rows) < 2:
        return None
    seconds = rows[-1].wall_seconds - rows[0].wall_seconds
    return (getattr(rows[-1], name) - getattr(rows[0], name)) / seconds if seconds > 0 else None


def _eta(rows: list[StepRow], total: int | None, step: int) -> float | None:
    if total is None or len(rows) < 2 or rows[-1].step <= rows[0].step:
        return None
    return (rows[-1].wall_seconds - rows[0].wall_seconds) / (rows[-1].step - rows[0].step) * (total - step)


def rewards_generated(steps: Sequence[StepRow]) -> list[float]:
    """Mean rewards of the responses that arrived before each of these steps, where any did; else of their batches."""
    arrived = [r.generated_reward_mean for r in steps if r.generated_reward_mean is not None]
    return arrived or [r.reward_mean for r in steps]


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(w.capitalize() for w in rest)
