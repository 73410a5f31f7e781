"""Metrics of the controller and the HTTP server with /metrics, /healthz and /readyz (interface.md §4).

Metric names are an API: add, do not rename. Series of a job exist from its first reconcile to `forget`.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from tba_operator.api import Job, JobStatus, parse_time
from tba_operator.caches import Key

Probe = Callable[[], tuple[bool, str]]
"""(good, explanation)."""


class Metrics:
    """All series of one controller process."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self._watches: dict[str, float] = {}
        self._jobs = _Jobs()
        ProcessCollector(registry=self.registry)
        self.registry.register(self._jobs)
        self._reconcile_seconds = Histogram(
            "tba_reconcile_seconds",
            "Seconds of one reconcile of a TBAJob.",
            buckets=(0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=self.registry,
        )
        self._reconcile_errors = Counter(
            "tba_reconcile_errors_total", "Reconciles that failed, by what with.", ["kind"], registry=self.registry
        )
        self._api_requests = Counter(
            "tba_api_requests_total",
            "Requests to the API server; outcome: ok or the error.",
            ["verb", "kind", "outcome"],
            registry=self.registry,
        )
        self._queue_depth = Gauge("tba_queue_depth", "TBAJobs due that no worker has taken.", registry=self.registry)
        self._leader = Gauge("tba_leader", "1 if this replica leads.", registry=self.registry)
        self._watch_age = Gauge(
            "tba_watch_age_seconds", "Seconds since a watch was last heard of.", ["kind"], registry=self.registry
        )

    def set_job(self, job: Job, status: JobStatus) -> None:
        """What is now known of a job; `status` replaces the job's own."""
        self._jobs.known[job.key] = _series_of(job, status)

    def forget(self, key: Key) -> None:
        """A job is gone: so are its series."""
        self._jobs.known.pop(key, None)

    def reconcile_timer(self) -> AbstractContextManager[object]:
        """Times one reconcile."""
        return self._reconcile_seconds.time()

    def count_error(self, kind: str) -> None:
        """A reconcile failed, or could not do all it wanted."""
        self._reconcile_errors.labels(kind).inc()

    def count_request(self, verb: str, kind: str, outcome: str) -> None:
        """`observe` of cluster_api."""
        self._api_requests.labels(verb, kind, outcome).inc()

    def watch_heard(self, kind: str) -> None:
        """A watch gave a sign of life."""
        if kind not in self._watches:
            self._watch_age.labels(kind).set_function(lambda: self.watch_ages()[kind])
        self._watches[kind] = self._clock()

    def watch_ages(self) -> dict[str, float]:
        """Seconds since each watch was last heard of."""
        now = self._clock()
        return {kind: now - heard for kind, heard in self._watches.items()}

    def follow(self, *, queue_depth: Callable[[], int], leading: Callable[[], bool]) -> None:
        """Where to read what is asked for at each scrape."""
        self._queue_depth.set_function(queue_depth)
        self._leader.set_function(lambda: float(leading()))

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


@dataclass(frozen=True, slots=True)
class _Series:
    """What is kept of a job: a parsed one takes 29 KiB."""

    about: tuple[str, ...]
    """Phase, model, objective, engine."""
    conditions: tuple[tuple[str, str], ...]
    """(type, status)."""
    result: str
    seconds: float | None
    """From start to end; null: not finished."""


def _series_of(job: Job, status: JobStatus) -> _Series:
    spec = job.spec
    about = (status.phase or "", spec.model.uri, spec.objective.type, spec.searcher.engine.type)
    started, ended = parse_time(status.start_time), parse_time(status.completion_time)
    return _Series(
        about=about,
        conditions=tuple((found.type, found.status) for found in status.conditions),
        result="Complete" if status.is_true("Complete") else "Failed",
        seconds=ended - started if started is not None and ended is not None else None,
    )


class _Jobs:
    """Series made from the jobs at each scrape: none can be left over."""

    def __init__(self) -> None:
        self.known: dict[Key, _Series] = {}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        names = ["namespace", "name"]
        info = GaugeMetricFamily(
            "tba_job_info", "1 for each TBAJob.", labels=[*names, "phase", "model", "objective", "engine"]
        )
        condition = GaugeMetricFamily(
            "tba_job_condition", "1 for the current status of a condition.", labels=[*names, "type", "status"]
        )
        duration = GaugeMetricFamily(
            "tba_job_execution_duration_seconds", "Start to end of a finished TBAJob.", labels=[*names, "result"]
        )
        for key, series in self.known.items():
            info.add_metric([*key, *series.about], 1)
            for found in series.conditions:
                condition.add_metric([*key, *found], 1)
            if series.seconds is not None:
                duration.add_metric([*key, series.result], series.seconds)
        yield from (info, condition, duration)


@asynccontextmanager
async def serve(metrics: Metrics, *, port: int, healthy: Probe, ready: Probe) -> AsyncIterator[int]:
    """Answer HTTP on all addresses; yields the port, which for `port` 0 is a free one."""

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def probe(asked: Probe) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(_: web.Request) -> web.Response:
            good, text = asked()
            return web.Response(text=text + "\n", status=200 if good else 503)

        return answer

    application = web.Application()
    application.add_routes(
        [web.get("/metrics", scrape), web.get("/healthz", probe(healthy)), web.get("/readyz", probe(ready))]
    )
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        # With port 0 each family gets a port of its own: tell IPv4's, whose address is the shorter tuple.
        yield min(runner.addresses, key=len)[1]
    finally:
        await runner.cleanup()
