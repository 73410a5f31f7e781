"""Follows `latest` in a thread of its own and has verified weights ready when the loop wants them.

    poll latest (jittered, If-None-Match) ─► manifest that nobody here holds? ─► fetch + verify ─► staged ─► loop.take()
                                          └► evaluation wanted?               ─► the same, kept apart

Which weights are newer is never decided here: whatever `latest` names is wanted if it is not the one held.
A snapshot that is missing or corrupt is tried again later; the weights in use go on serving. A searcher without any may
get older ones of the same chain of deltas, under their own name, and goes on asking for the wanted ones.
Whoever made another run under the same prefix gets nothing more from here: `RunReplaced` ends the process.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from tba import telemetry, trace
from tba.contracts.errors import CorruptObject, StoreUnavailable
from tba.contracts.keys import LATEST, RUN
from tba.contracts.records import Latest, RunRecord
from tba.log import SNAPSHOT_REJECTED, STORAGE_RETRIED, log
from tba.snapshots import Snapshot
from tba.store import AccessDenied, NotFound, ObjectStore

_LONGEST_RETRY_SECONDS = 60.0

Fetch = Callable[[ObjectStore, str], Snapshot]


class RunReplaced(StoreUnavailable):
    """The run was deleted, or another one has its place. Exit code 2: started again, a searcher finds the new one."""


@dataclass(slots=True)
class _Retry:
    failures: int = 0
    at: float = 0.0


class Poller:
    """Thread-safe. `poll_once` is what the thread repeats."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        run_id: str,
        interval_seconds: Callable[[], float],
        fetch: Fetch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._interval_seconds = interval_seconds
        self._fetch = fetch
        self._clock = clock
        self._rng = random.Random()  # of its own: an engine seeds the module's alike in every searcher
        self._lock = threading.Lock()
        self._etag: str | None = None
        self._latest: Latest | None = None
        self._held: str | None = None
        self._staged: Snapshot | None = None
        self._evaluation: Snapshot | None = None
        self._finished_evaluations: set[str] = set()
        self._retries: dict[str, _Retry] = {}
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.detail = "nothing polled yet"
        """What is awaited or went wrong last, for probes and logs."""

    def start(self) -> None:
        """Begin polling."""
        self._thread = threading.Thread(target=self._run, name="sync", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop polling; a fetch under way is left behind (the thread is a daemon)."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2.0)

    def check(self) -> None:
        """Raise what ended the thread."""
        if self._error is not None:
            raise self._error

    @property
    def latest(self) -> Latest | None:
        """Newest body seen."""
        with self._lock:
            return self._latest

    @property
    def window(self) -> int:
        """Newest commit seen: the window of shards. 0 before the first."""
        latest = self.latest
        return latest.commit if latest else 0

    @property
    def has_staged(self) -> bool:
        """Whether `take` would return weights."""
        with self._lock:
            return self._staged is not None

    def take(self) -> Snapshot | None:
        """The newest staged weights, once; from then on they count as held."""
        with self._lock:
            staged, self._staged = self._staged, None
            if staged is not None:
                self._held = staged.key
            return staged

    def refused(self, key: str, error: Exception, *, held: str | None) -> None:
        """The engine would not have these weights and goes on with `held`: they are fetched again later.

        Else, with a strict maxPolicyLag, trainer and searcher could wait for each other for ever.
        """
        with self._lock:
            self._held = held
        self._put_off(key, error)

    def evaluation(self) -> tuple[str, Snapshot | None] | None:
        """(manifest key, weights) of the wanted evaluation if it can begin; weights None = they are the held ones."""
        with self._lock:
            key = self._wanted_evaluation()
            if key is None:
                return None
            if key == self._held:
                return key, None
            for snapshot in (self._evaluation, self._staged):
                if snapshot is not None and snapshot.key == key:
                    return key, snapshot
            return None

    def evaluation_started(self, key: str) -> None:
        """These weights are the held ones now."""
        with self._lock:
            self._held = key
            self._evaluation = None
            if self._staged is not None and self._staged.key == key:
                self._staged = None

    def evaluation_finished(self, key: str) -> None:
        """Nothing is left to do here for this evaluation."""
        with self._lock:
            self._finished_evaluations.add(key)
            self._evaluation = None

    def poll_once(self) -> None:
        """Read `latest` if it changed, and fetch what it names unless it is here already. Raises: RunReplaced."""
        try:
            self._read_latest()
            for key in self._missing():
                self._fetch_guarded(key)
        except RunReplaced:
            raise
        except StoreUnavailable as error:
            self.detail = f"storage unavailable: {error}"
            log.warning(STORAGE_RETRIED, task="sync", error=str(error))

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.poll_once()
                # Jitter: searchers that started together must not poll together for ever.
                self._stop.wait(self._interval_seconds() * self._rng.uniform(0.5, 1.5))
        except BaseException as error:
            self._error = error

    def _read_latest(self) -> None:
        try:
            stored = self._store.get_if_changed(LATEST, self._etag)
        except (NotFound, AccessDenied) as error:
            # Without the right to list, S3 denies what does not exist: both may be a run that has yet to begin.
            self.detail = f"no readable `{LATEST}` yet: {error}"
            if self._latest is not None:
                self._check_run()
            return
        if stored is None:
            return
        self._check_run()
        try:
            latest = Latest.parse(stored.data)
        except CorruptObject as error:
            self.detail = str(error)
            log.error(SNAPSHOT_REJECTED, key=LATEST, error=self.detail)
            return
        with self._lock:
            self._latest, self._etag = latest, stored.etag
        self.detail = f"commit {latest.commit}, version {latest.version}"

    def _check_run(self) -> None:
        """Once for every change of `latest`: its numbers alone cannot tell a new run from the one that we know."""
        try:
            found = RunRecord.model_validate_json(self._store.get(RUN).data).run_id
        except AccessDenied:
            return  # credentials may be about to rotate
        except NotFound:
            found = "gone"
        except ValidationError:
            found = "unreadable"
        if found != self._run_id:
            raise RunReplaced(
                f"{self._store.uri}/{RUN} is {found}, this searcher works for run {self._run_id}, which was deleted: "
                "start the searcher again for the run that is there now"
            )

    def _missing(self) -> list[str]:
        with self._lock:
            latest = self._latest
            if self._evaluation is not None and self._evaluation.key != self._wanted_evaluation():
                self._evaluation = None  # withdrawn before it began
            here = {s.key for s in (self._staged, self._evaluation) if s is not None} | {self._held}
            wanted = [latest.manifest if latest else None, self._wanted_evaluation()]
        now = self._clock()
        keys = dict.fromkeys(k for k in wanted if k is not None and k not in here)
        return [k for k in keys if now >= self._retries.get(k, _Retry()).at]

    def _wanted_evaluation(self) -> str | None:
        key = self._latest.evaluation if self._latest else None
        return None if key in self._finished_evaluations else key

    def _fetch_guarded(self, key: str) -> None:
        started = time.perf_counter()
        try:
            with trace.span("fetch"):
                snapshot = self._fetch(self._store, key)
        except (CorruptObject, NotFound, AccessDenied) as error:  # denied: so S3 answers for one that was swept
            self._put_off(key, error)
            return
        if snapshot.key == key:
            self._retries.pop(key, None)
        else:
            self._put_off(key, CorruptObject(f"a delta of its chain cannot be read; {snapshot.key} can"))
        telemetry.SYNC_SECONDS.labels("fetch").observe(time.perf_counter() - started)
        with self._lock:
            if self._latest is not None and key == self._latest.manifest:
                self._staged = snapshot
            else:
                self._evaluation = snapshot

    def _put_off(self, key: str, error: Exception) -> None:
        retry = self._retries.setdefault(key, _Retry())
        retry.failures += 1
        wait = min(_LONGEST_RETRY_SECONDS, self._interval_seconds() * 2.0**retry.failures)
        retry.at = self._clock() + wait
        self.detail = f"snapshot {key} refused: {error}"
        log.error(SNAPSHOT_REJECTED, key=key, failures=retry.failures, retry_seconds=round(wait, 1), error=str(error))
