"""Counters of a searcher process since its start: into shard headers, metrics and the log."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Literal

from tba import telemetry, trace

Phase = Literal["generate", "load", "asleep", "wait_weights", "wait_storage", "wait_reward", "wait_idle"]
PHASES: tuple[Phase, ...] = (
    "generate", "load", "asleep", "wait_weights", "wait_storage", "wait_reward", "wait_idle",
)  # fmt: skip
_SHOWN = {"load": "swap"}
"""Phases that metrics and traces call otherwise than the counters, whose names are an API."""


@dataclass(slots=True)
class SearcherStats:
    """Names are an API: the report shows them. The phases and `other_seconds` sum to `up_seconds`."""

    generated_rows: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    """A prompt counts once a visit: its responses share it."""
    visits: int = 0
    failed_rows: int = 0
    timed_out_rows: int = 0
    eval_rows: int = 0
    eval_blocks: int = 0
    versions_loaded: int = 0
    generate_seconds: float = 0.0
    load_seconds: float = 0.0
    asleep_seconds: float = 0.0
    """Colocated with the trainer, whose turn it was."""
    wait_weights_seconds: float = 0.0
    wait_storage_seconds: float = 0.0
    wait_reward_seconds: float = 0.0
    wait_idle_seconds: float = 0.0
    """After the end of the run, or while an evaluation's next block is looked for."""
    other_seconds: float = 0.0
    up_seconds: float = 0.0
    model_flops: float = 0.0
    """Of prompts and responses; 0: unknown kind of model."""
    peak_flops: float = 0.0
    """What its GPUs could do a second; 0: unknown."""
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    _began: float | None = field(default=None, repr=False)
    _marked: dict[str, float] = field(default_factory=dict, repr=False)

    @contextmanager
    def piece(self, phase: Phase) -> Iterator[None]:
        """Count the time spent inside; pieces do not nest."""
        shown = _SHOWN.get(phase, phase)
        started = self.clock()
        try:
            with trace.span(shown):
                yield
        finally:
            seconds = self.clock() - started
            name = f"{phase}_seconds"
            setattr(self, name, getattr(self, name) + seconds)
            telemetry.SEARCHER_SECONDS.labels(shown).inc(seconds)
            if phase.startswith("wait_") and phase != "wait_idle":
                telemetry.SEARCHER_WAIT.labels(phase.removeprefix("wait_")).inc(seconds)

    def begin(self) -> None:
        """The loop begins: its time counts from now."""
        self._began = self.clock()

    def mark(self) -> None:
        """Take the split of the time so far, between two pieces: what headers carry until the next mark."""
        if self._began is None:
            return
        self.up_seconds = self.clock() - self._began
        other = max(self.up_seconds - sum(getattr(self, f"{phase}_seconds") for phase in PHASES), 0.0)
        telemetry.SEARCHER_SECONDS.labels("other").inc(max(other - self.other_seconds, 0.0))
        self.other_seconds = other
        self._marked = {name: getattr(self, name) for name in _TIMES}

    def worked(self, flops: float) -> None:
        """The model has done so much."""
        self.model_flops += flops
        telemetry.MODEL_FLOPS.inc(flops)

    def to_dict(self) -> dict[str, float]:
        """For a shard header. Times are those of the last mark, so that they sum."""
        counters = {f.name: float(getattr(self, f.name)) for f in fields(self) if f.name not in _INNER}
        return counters | dict.fromkeys(_TIMES, 0.0) | self._marked


_TIMES = (*(f"{phase}_seconds" for phase in PHASES), "other_seconds", "up_seconds")
_INNER = ("clock", "_began", "_marked")
