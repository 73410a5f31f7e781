"""Read a run's history from its bucket, incrementally, without the rows of discarded futures (system.md §4).

metrics/{epoch}/{seq}.jsonl --new objects--> rows by kind --drop discarded futures--> History
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import ValidationError

from tba.contracts import keys
from tba.contracts.history import (
    ROW,
    AnyRow,
    EvalRow,
    EventRow,
    LengthRow,
    PublishRow,
    QuarantineRow,
    Row,
    SampleRow,
    SearcherRow,
    StepRow,
)
from tba.contracts.records import Latest, RunRecord
from tba.run_record import find_run_record
from tba.store.protocol import NotFound, ObjectStore

BEGINNINGS = ("started", "resumed")
"""Events that open an epoch; the `step` of such a row is where the epoch resumed."""

R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True)
class History:
    """What is known of a run. Rows are in the order of (epoch, log position); discarded futures are gone."""

    latest: Latest | None = None
    run: RunRecord | None = None
    steps: list[StepRow] = field(default_factory=list)
    evaluations: list[EvalRow] = field(default_factory=list)
    """One an evaluated policy, by step."""
    publishes: list[PublishRow] = field(default_factory=list)
    searchers: list[SearcherRow] = field(default_factory=list)
    """The newest row of each incarnation, first seen first."""
    searcher_rows: list[SearcherRow] = field(default_factory=list)
    """All of them."""
    quarantines: list[QuarantineRow] = field(default_factory=list)
    samples: list[SampleRow] = field(default_factory=list)
    events: list[EventRow] = field(default_factory=list)
    """All of them: what happened in a discarded future did happen."""
    lengths: LengthRow | None = None
    discarded_rows: int = 0
    unreadable_lines: int = 0
    """Lines of the log that are no row of this version."""

    @property
    def newest_time(self) -> float | None:
        """Time of the newest row, Unix seconds."""
        kinds = (self.steps, self.events, self.publishes, self.evaluations, self.searcher_rows)
        last = [rows[-1].time for rows in kinds if rows]
        return max(last, default=None)


class HistoryReader:
    """Reads only what is new at each `refresh`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._rows: list[AnyRow] = []
        self._read: dict[int, str] = {}  # epoch -> last key read
        self._unreadable = 0
        self._run: RunRecord | None = None
        self._latest: Latest | None = None
        self._latest_etag: str | None = None

    def refresh(self) -> History:
        """The history as of now. Raises: UserError if the run is of another release; StoreUnavailable."""
        changed = self._read_latest()
        if self._run is None or changed:
            self._follow(find_run_record(self._store))
        self._read_logs()
        return assemble(self._rows, run=self._run, latest=self._latest, unreadable_lines=self._unreadable)

    def _read_latest(self) -> bool:
        """Whether it is another than before."""
        try:
            found = self._store.get_if_changed(keys.LATEST, self._latest_etag)
        except NotFound:
            changed = self._latest is not None
            self._latest = self._latest_etag = None
            return changed
        if found is not None:
            self._latest, self._latest_etag = Latest.parse(found.data), found.etag
        return found is not None

    def _follow(self, run: RunRecord | None) -> None:
        """A run that was deleted, or made anew under this address, has none of the rows that are known."""
        if self._run is not None and (run is None or run.run_id != self._run.run_id):
            self._rows, self._read, self._unreadable = [], {}, 0
        self._run = run

    def _read_logs(self) -> None:
        # An epoch that was fenced may still have written after its successor began: each has its own cursor. Only
        # the newest two are looked at again; older ones have nothing that would be kept.
        epochs = sorted(self._read)[-2:]
        for epoch in epochs[:-1]:
            self._read_objects(keys.LogKey("metrics", epoch, 0).prefix, self._read[epoch])
        after = self._read[epochs[-1]] if epochs else None
        self._read_objects(keys.METRICS, after)

    def _read_objects(self, prefix: str, after: str | None) -> None:
        for info in self._store.list_after(prefix, after):
            try:
                key = keys.LogKey.parse(info.key)
            except ValueError:
                continue  # not ours
            self._parse(self._store.get(info.key).data)
            self._read[key.epoch] = info.key

    def _parse(self, data: bytes) -> None:
        for line in data.splitlines():
            if not line.strip():
                continue
            try:
                self._rows.append(ROW.validate_json(line))
            except ValidationError:
                self._unreadable += 1  # written by a newer version, or damaged: the rest is still worth reading


def read_history(store: ObjectStore) -> History:
    """The whole history of the run in `store`; empty if there is none yet. Raises: as `refresh`."""
    return HistoryReader(store).refresh()


def assemble(
    rows: Sequence[AnyRow], *, run: RunRecord | None = None, latest: Latest | None = None, unreadable_lines: int = 0
) -> History:
    """Sort rows by kind and drop discarded futures."""
    limits = kept_steps(rows)
    kept = [r for r in rows if isinstance(r, EventRow) or r.step <= limits.get(r.epoch, math.inf)]
    kept.sort(key=lambda r: r.epoch)  # stable: within an epoch the order of the log
    evaluations = {
        (r.policy_epoch, r.step): r
        for r in kept
        if isinstance(r, EvalRow) and r.step <= limits.get(r.policy_epoch, math.inf)
    }
    searcher_rows = _only(kept, SearcherRow)
    searchers = {r.incarnation: r for r in searcher_rows}
    lengths = _only(kept, LengthRow)
    return History(
        latest=latest,
        run=run,
        steps=_only(kept, StepRow),
        evaluations=sorted(evaluations.values(), key=lambda r: r.step),
        publishes=_only(kept, PublishRow),
        searcher_rows=searcher_rows,
        searchers=sorted(searchers.values(), key=lambda r: (r.first_seen, r.searcher)),
        quarantines=list({r.key: r for r in _only(kept, QuarantineRow)}.values()),
        samples=_only(kept, SampleRow),
        events=_only(kept, EventRow),
        lengths=lengths[-1] if lengths else None,
        discarded_rows=len(rows) - len(kept),
        unreadable_lines=unreadable_lines,
    )


def kept_steps(rows: Iterable[AnyRow]) -> dict[int, float]:
    """Epoch -> the last step of it that counts: the least resume step of all later epochs."""
    resumed: dict[int, int] = {}
    epochs: set[int] = set()
    for row in rows:
        epochs.add(row.epoch)
        if isinstance(row, EventRow) and row.event in BEGINNINGS:
            resumed.setdefault(row.epoch, row.step)
    limits: dict[int, float] = {}
    limit = math.inf
    for epoch in sorted(epochs, reverse=True):
        limits[epoch] = limit
        limit = min(limit, resumed.get(epoch, math.inf))
    return limits


def _only(rows: Iterable[AnyRow], kind: type[R]) -> list[R]:
    return [r for r in rows if isinstance(r, kind)]
