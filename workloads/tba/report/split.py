"""Where each role's time went, from the run history: seconds by phase, idle share, model FLOPs utilisation (MFU)."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tba.contracts.history import SearcherRow, StepRow
from tba.report.history import History

OTHER = "other"
TRAINER_PHASES = {
    "forward_backward": "forward and backward",
    "optimizer": "optimizer",
    "reference": "reference scoring",
    "collate": "collate",
    "ingest": "ingest",
    "stage": "publish: copy to host",
    "capture": "checkpoint: copy to host",
    "wait_data": "wait for data",
    "wait_storage": "wait for storage",
    "wait_engine": "wait until the colocated searcher sleeps",
    OTHER: "other",
}
"""Name in the history -> words, in the order they are shown."""
SEARCHER_PHASES = {
    "generate": "generate",
    "swap": "swap weights",
    "asleep": "asleep: the trainer's turn",
    "wait_weights": "wait for weights",
    "wait_reward": "wait for rewards",
    "wait_storage": "wait for storage",
    "wait_idle": "nothing to do",
    OTHER: "other",
}
_COUNTER = {"swap": "load_seconds"}
"""Searchers' counters are called {phase}_seconds, but for these."""
_COMPUTING = ("reference", "forward_backward")
MAX_STRETCHES = 60


@dataclass(slots=True)
class RoleTime:
    """Seconds of a role, over all its processes."""

    seconds: dict[str, float]
    """By phase, in the order of `TRAINER_PHASES` or `SEARCHER_PHASES`."""
    flops: float = 0.0
    """Of the model's own work, where the GPU's peak is known."""
    possible: float = 0.0
    """What the GPUs could have done in the same time."""
    possible_computing: float = 0.0
    """The same, in the time spent computing alone."""

    @property
    def total(self) -> float:
        """Seconds."""
        return sum(self.seconds.values())

    @property
    def idle_percent(self) -> float | None:
        """Share of the waits; None without any time."""
        return self.percent(*(name for name in self.seconds if name.startswith("wait_")))

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation of all the time, 0..1; None: unknown."""
        return self.flops / self.possible if self.flops and self.possible else None

    @property
    def mfu_computing(self) -> float | None:
        """The same while the model computes."""
        return self.flops / self.possible_computing if self.flops and self.possible_computing else None

    def percent(self, *phases: str) -> float | None:
        """Share of phases, together."""
        return 100 * sum(self.seconds[name] for name in phases) / self.total if self.total > 0 else None

    def add(self, other: "RoleTime") -> None:
        """Another stretch of time of the same role."""
        for name, seconds in other.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.flops += other.flops
        self.possible += other.possible
        self.possible_computing += other.possible_computing


@dataclass(frozen=True, slots=True)
class Stretch:
    """Time between two steps of the trainer."""

    first_step: int
    last_step: int
    time: RoleTime = field(compare=False)


def trainer_time(history: History) -> RoleTime:
    """From the first step of the run to its last: the start of the first trainer is left out."""
    return total(time_of_step(row) for row in (history.steps[1:] or history.steps))


def searcher_time(history: History) -> RoleTime:
    """Of all searcher processes together, as their last shards tell it."""
    return total(_time_of_searcher(row.stats, {}) for row in history.searchers)


def trainer_stretches(history: History) -> list[Stretch]:
    """One a step."""
    return [Stretch(row.step - 1, row.step, time_of_step(row)) for row in history.steps]


def searcher_stretches(history: History) -> list[Stretch]:
    """One for each step at which the trainer told of searchers: what they have done since it did last."""
    before: dict[str, SearcherRow] = {}
    gathered: dict[int, RoleTime] = defaultdict(lambda: RoleTime({}))
    for row in history.searcher_rows:
        earlier = before.get(row.incarnation)
        gathered[max(row.step, 1)].add(_time_of_searcher(row.stats, earlier.stats if earlier else {}))
        before[row.incarnation] = row
    steps = [step for step in sorted(gathered) if gathered[step].total > 0]
    return [Stretch(a, b, gathered[b]) for a, b in zip([0, *steps], steps, strict=False)]


def coarsen(stretches: Sequence[Stretch], limit: int = MAX_STRETCHES) -> list[Stretch]:
    """At most `limit` stretches, each of equally many."""
    size = -(-len(stretches) // limit) or 1
    parts = [stretches[i : i + size] for i in range(0, len(stretches), size)]
    return [Stretch(part[0].first_step, part[-1].last_step, total(s.time for s in part)) for part in parts]


def total(times: Iterable[RoleTime]) -> RoleTime:
    """All of them together."""
    result = RoleTime({})
    for time in times:
        result.add(time)
    return result


def in_words(time: RoleTime, words: Mapping[str, str]) -> str:
    """The split in a sentence: the text alternative of its figure, and a line on a terminal."""
    shares = [(time.percent(name) or 0.0, label) for name, label in words.items() if name in time.seconds]
    told = [f"{label} {share:.1f} %" for share, label in sorted(shares, reverse=True) if share >= 0.05]
    if time.mfu is not None:
        told.append(f"MFU {100 * time.mfu:.1f} %")
    return ", ".join(told)


def time_of_step(row: StepRow) -> RoleTime:
    """All the time since the step before; of a row without phases, what its older fields know."""
    known = row.phase_seconds or {
        "forward_backward": row.train_seconds,
        "reference": row.score_seconds,
        "wait_data": row.wait_data_seconds,
        "wait_storage": row.wait_storage_seconds,
        OTHER: max(row.step_seconds - row.train_seconds - row.score_seconds, 0.0),
    }
    seconds = _ordered(known, TRAINER_PHASES)
    peak = row.peak_flops or 0.0 if row.model_flops else 0.0
    return RoleTime(
        seconds,
        flops=row.model_flops or 0.0 if peak else 0.0,
        possible=peak * sum(seconds.values()),
        possible_computing=peak * sum(seconds[name] for name in _COMPUTING),
    )


def _time_of_searcher(stats: Mapping[str, float], before: Mapping[str, float]) -> RoleTime:
    """Between two shard headers, which are a searcher's own claims: nothing but finite rises counts."""

    def rise(name: str) -> float:
        value = stats.get(name, 0.0) - before.get(name, 0.0)
        return value if math.isfinite(value) and value > 0 else 0.0

    seconds = {phase: rise(_COUNTER.get(phase, f"{phase}_seconds")) for phase in SEARCHER_PHASES}
    if "other_seconds" not in stats:  # an older searcher: what its counters do not explain
        seconds[OTHER] = max(rise("up_seconds") - sum(seconds.values()), 0.0)
    peak = stats.get("peak_flops", 0.0)
    flops = rise("model_flops") if math.isfinite(peak) and peak > 0 else 0.0
    peak = peak if flops else 0.0
    return RoleTime(seconds, flops, peak * sum(seconds.values()), peak * seconds["generate"])


def _ordered(known: Mapping[str, float], words: Mapping[str, str]) -> dict[str, float]:
    """Every phase of `words`; what a newer version tells besides them is "other"."""
    seconds = {name: known.get(name, 0.0) for name in words}
    seconds[OTHER] += sum(value for name, value in known.items() if name not in words)
    return seconds
