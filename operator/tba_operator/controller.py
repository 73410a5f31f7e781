"""The controller while it leads: kopf's watches, workers on the queue, the progress poller, the resync.

events of watches ─┐
progress ──────────┼─▶ queue ─▶ N workers ─▶ reconcile
resync ────────────┘
Nothing enters the queue before all kinds were listed: a pass over half a view would tell of missing pods.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import kopf

from tba_operator import handlers
from tba_operator import log as events
from tba_operator.apply import Applier
from tba_operator.caches import Key, RecentWrites
from tba_operator.kubeapi import (
    ApiError,
    Conflict,
    KubeApi,
    NamespaceTerminating,
    NotLeading,
    TooManyRequests,
)
from tba_operator.log import log
from tba_operator.metrics import Metrics
from tba_operator.mirror import Mirror, Stream
from tba_operator.observe import Observer
from tba_operator.progress import ProgressPoller, direct, running_trainers, through_api
from tba_operator.queue import WorkQueue
from tba_operator.reconcile import Reconciler
from tba_operator.streams import STALE_SECONDS, Streams
from tba_operator.world import Settings

TERMINATING_SECONDS = 30.0
"""A namespace that goes away is asked again this often, and nothing is said about it."""
STOP_SECONDS = 3.0
"""How long work in hand, and then kopf, get to end."""


class Controller:
    """One term of leadership."""

    def __init__(self, api: KubeApi, settings: Settings, metrics: Metrics) -> None:
        self._api = api
        self._settings = settings
        self._metrics = metrics
        self._queue: WorkQueue[Key] = WorkQueue()
        self._recent = RecentWrites()

    async def run(self, spawned: Callable[[], None]) -> None:
        """Work until cancelled, or until the process has to start anew. `spawned`: kopf took the signal handlers."""
        kueue = await self._api.has_kind(handlers.WORKLOADS.api_version, handlers.WORKLOADS.kind)
        self._metrics.follow(queue_depth=lambda: self._queue.depth, leading=lambda: True)
        mirror = Mirror(self._streams(kueue), self._queue.add)
        async with self._watches(mirror, kueue, spawned) as watching, self._fetch_session() as session:
            parts = self._parts(mirror, session, kueue)
            await self._until_one_ends([watching, *(asyncio.create_task(part) for part in parts)])

    def _parts(self, mirror: Mirror, session: aiohttp.ClientSession, kueue: bool) -> list[Coroutine[Any, Any, None]]:
        fetch = through_api(self._api) if self._settings.progress_through_api else direct(session)
        interval, caches = self._settings.progress_seconds, mirror.caches
        poller = ProgressPoller(lambda: running_trainers(caches), fetch, self._queue.add, interval_seconds=interval)
        observer = Observer(self._api, caches, self._recent, poller, kueue=kueue)
        applier = Applier(self._api, self._recent)
        reconciler = Reconciler(observer, applier, self._recent, settings=self._settings, metrics=self._metrics)
        workers = [work(self._queue, reconciler.reconcile, self._metrics) for _ in range(self._settings.workers)]
        return [*workers, _once_listed(mirror, poller.run), _once_listed(mirror, lambda: self._resync(observer, kueue))]

    @asynccontextmanager
    async def _watches(
        self, mirror: Mirror, kueue: bool, spawned: Callable[[], None]
    ) -> AsyncIterator[asyncio.Task[None]]:
        """kopf, embedded. Its own end, of an error, is the task's."""
        for stream in self._streams(kueue):
            self._metrics.watch_heard(stream)  # one that never begins must go stale too
        streams = Streams(self._metrics.watch_heard, mirror.page)
        registry = handlers.make_registry(mirror, streams, kueue=kueue)
        stop = asyncio.Event()
        others = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=registry,
            settings=handlers.kopf_settings(),
            standalone=True,
            clusterwide=not self._settings.watch_namespaces,
            namespaces=self._settings.watch_namespaces,
            stop_flag=stop,
            # Else kopf asks for the name of the process's user, which a pod's UID has none of.
            identity=self._settings.identity,  # pyright: ignore[reportArgumentType] (a NewType that kopf keeps to itself)
        )
        spawned()
        watching = asyncio.create_task(kopf.run_tasks(tasks, ignored=others))
        try:
            yield watching
        finally:
            stop.set()
            await asyncio.wait({watching}, timeout=STOP_SECONDS)

    def _streams(self, kueue: bool) -> dict[str, Stream]:
        kinds, places = handlers.kinds(kueue=kueue), self._settings.watch_namespaces
        if not places:
            return {kind.plural: Stream(kind.kind, None) for kind in kinds}
        return {f"{kind.plural} in {place}": Stream(kind.kind, place) for kind in kinds for place in places}

    async def _until_one_ends(self, tasks: list[asyncio.Task[None]]) -> None:
        """Workers finish what they have in hand; nothing else has anything to finish."""
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._queue.close()
            watching, *own = tasks
            workers = own[: self._settings.workers]
            for task in own[len(workers) :]:
                task.cancel()
            await asyncio.wait(workers, timeout=STOP_SECONDS)
            for task in workers:
                task.cancel()
            await asyncio.gather(*own, return_exceptions=True)

    async def _resync(self, observer: Observer, kueue: bool) -> None:
        """Every job now and then, spread out; ends when Kueue has come or gone: the watches are chosen at the start."""
        while True:
            await asyncio.sleep(self._settings.resync_seconds)
            for key in observer.known_jobs():
                self._queue.add(key, random.uniform(0.0, self._settings.resync_seconds / 10))
            try:
                if await self._api.has_kind(handlers.WORKLOADS.api_version, handlers.WORKLOADS.kind) != kueue:
                    log.warning(events.KUEUE_CHANGED, installed=not kueue)
                    return
            except ApiError:
                continue

    @staticmethod
    @asynccontextmanager
    async def _fetch_session() -> AsyncIterator[aiohttp.ClientSession]:
        # Not from the environment: a proxy has no way to a pod's IP.
        async with aiohttp.ClientSession(trust_env=False) as session:
            yield session


async def _once_listed(mirror: Mirror, part: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await mirror.complete.wait()
    await part()


async def work(
    queue: WorkQueue[Key], reconcile: Callable[[Key], Coroutine[Any, Any, float | None]], metrics: Metrics
) -> None:
    """A worker: what a pass ends with decides when its job is looked at again."""
    while (key := await queue.get()) is not None:
        try:
            with metrics.reconcile_timer():
                again = await reconcile(key)
        except NotLeading:
            return
        except ApiError as error:
            metrics.count_error(type(error).__name__)
            _come_back(queue, key, error)
        except Exception as error:  # the process's top as far as a job goes: its bug must not stop the others
            metrics.count_error(type(error).__name__)
            log.exception(events.RECONCILE_FAILED, run=key[1], namespace=key[0], retry_seconds=queue.retry(key))
        else:
            queue.forget(key)
            if again is not None:
                queue.add(key, again)
        finally:
            queue.done(key)


def _come_back(queue: WorkQueue[Key], key: Key, error: ApiError) -> None:
    if isinstance(error, NamespaceTerminating):
        queue.add(key, TERMINATING_SECONDS)
    elif isinstance(error, TooManyRequests):
        queue.add(key, error.retry_after)
    elif isinstance(error, Conflict):
        queue.retry(key)  # somebody was faster: nothing to tell
    else:
        wait = round(queue.retry(key), 2)
        log.warning(events.RECONCILE_FAILED, run=key[1], namespace=key[0], error=str(error), retry_seconds=wait)


def stale_watches(metrics: Metrics) -> dict[str, float]:
    """Watches that have not been answered for too long, with their age in seconds."""
    return {kind: age for kind, age in metrics.watch_ages().items() if age > STALE_SECONDS}
