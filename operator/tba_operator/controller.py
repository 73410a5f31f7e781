"""The controller while it leads: kopf's watches, workers on the queue, the progress poller, the resync.

on.event ─┐
progress ─┼─▶ queue ─▶ N workers ─▶ reconcile
resync ───┘
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
from tba_operator.api import JOB_LABEL
from tba_operator.apply import Applier
from tba_operator.caches import Caches, Key, RecentWrites
from tba_operator.kubeapi import (
    ApiError,
    Conflict,
    KubeApi,
    NamespaceTerminating,
    NotFound,
    NotLeading,
    TooManyRequests,
)
from tba_operator.log import log
from tba_operator.metrics import Metrics
from tba_operator.observe import Observer
from tba_operator.progress import ProgressPoller, direct, ready_trainers, through_api
from tba_operator.queue import WorkQueue
from tba_operator.reconcile import Reconciler
from tba_operator.streams import STALE_SECONDS, Streams
from tba_operator.world import Settings

TERMINATING_SECONDS = 30.0
"""A namespace that goes away is asked again this often, and nothing is said about it."""
VANISHED_RETRY_SECONDS = 5.0
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
        self._caches: asyncio.Future[Caches] = asyncio.get_running_loop().create_future()
        self._listed_again: asyncio.Queue[handlers.Kind] = asyncio.Queue()

    async def run(self, spawned: Callable[[], None]) -> None:
        """Work until cancelled, or until the process has to start anew. `spawned`: kopf took the signal handlers."""
        kueue = await self._api.has_kind(handlers.WORKLOADS.api_version, handlers.WORKLOADS.kind)
        self._metrics.follow(queue_depth=lambda: self._queue.depth, leading=lambda: True)
        async with self._watches(kueue, spawned) as watching, self._fetch_session() as session:
            parts = self._parts(await self._caches, session, kueue)
            await self._until_one_ends([watching, *(asyncio.create_task(part) for part in parts)])

    def _parts(self, caches: Caches, session: aiohttp.ClientSession, kueue: bool) -> list[Coroutine[Any, Any, None]]:
        fetch = through_api(self._api) if self._settings.progress_through_api else direct(session)
        interval = self._settings.progress_seconds
        poller = ProgressPoller(lambda: ready_trainers(caches), fetch, self._queue.add, interval_seconds=interval)
        observer = Observer(self._api, caches, self._recent, poller, kueue=kueue)
        applier = Applier(self._api, self._recent)
        reconciler = Reconciler(observer, applier, self._recent, settings=self._settings, metrics=self._metrics)
        workers = [work(self._queue, reconciler.reconcile, self._metrics) for _ in range(self._settings.workers)]
        return [*workers, poller.run(), self._resync(observer, kueue), self._bury(caches)]

    @asynccontextmanager
    async def _watches(self, kueue: bool, spawned: Callable[[], None]) -> AsyncIterator[asyncio.Task[None]]:
        """kopf, embedded. Its own end, of an error, is the task's."""
        by_plural = {kind.plural: kind for kind in handlers.kinds(kueue=kueue)}
        streams = Streams(
            self._metrics.watch_heard, lambda stream: self._listed_again.put_nowait(by_plural[stream.split()[0]])
        )
        for stream in self._stream_names(by_plural):
            self._metrics.watch_heard(stream)  # one that never begins must go stale too
        registry = handlers.make_registry(self._queue.add, streams, self._caches.set_result, kueue=kueue)
        stop = asyncio.Event()
        others = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=registry,
            settings=handlers.kopf_settings(),
            standalone=True,
            clusterwide=not self._settings.watch_namespaces,
            namespaces=self._settings.watch_namespaces,
            stop_flag=stop,
        )
        spawned()
        watching = asyncio.create_task(kopf.run_tasks(tasks, ignored=others))
        try:
            yield watching
        finally:
            stop.set()
            await asyncio.wait({watching}, timeout=STOP_SECONDS)

    def _stream_names(self, plurals: dict[str, handlers.Kind]) -> list[str]:
        places = self._settings.watch_namespaces
        return [f"{plural} in {place}" for plural in plurals for place in places] if places else list(plurals)

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

    async def _bury(self, caches: Caches) -> None:
        """After a kind was listed again: forget what only the indices still have."""
        while True:
            kind = await self._listed_again.get()
            try:
                gone = await vanished(self._api, caches, kind, self._settings.watch_namespaces)
            except ApiError:
                await asyncio.sleep(VANISHED_RETRY_SECONDS)
                self._listed_again.put_nowait(kind)
                continue
            if gone:
                log.warning(events.OBJECTS_VANISHED, kind=kind.kind, count=len(gone))
                caches.bury(gone)
                for key in gone.values():
                    self._queue.add(key)

    @staticmethod
    @asynccontextmanager
    async def _fetch_session() -> AsyncIterator[aiohttp.ClientSession]:
        # Not from the environment: a proxy has no way to a pod's IP.
        async with aiohttp.ClientSession(trust_env=False) as session:
            yield session


async def vanished(api: KubeApi, caches: Caches, kind: handlers.Kind, namespaces: tuple[str, ...]) -> dict[str, Key]:
    """uid -> job of what the indices hold and the API server does not.

    kopf indexes what a second list has and never removes what it lacks: an object that was deleted while no watch was
    open would stay for ever. A uid that was indexed before a list and is not in it is gone; uids never return.
    """
    before = caches.uids(kind.kind)
    selector = None if kind == handlers.JOBS else JOB_LABEL
    alive: set[str] = set()
    for namespace in namespaces or (None,):
        items = await api.list(kind.api_version, kind.kind, namespace, label_selector=selector)
        alive |= {item["metadata"]["uid"] for item in items}
    return {uid: key for uid, key in before.items() if uid not in alive}


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
    elif isinstance(error, Conflict | NotFound):
        queue.retry(key)  # somebody was faster, or the namespace has just gone: nothing to tell
    else:
        wait = round(queue.retry(key), 2)
        log.warning(events.RECONCILE_FAILED, run=key[1], namespace=key[0], error=str(error), retry_seconds=wait)


def stale_watches(metrics: Metrics) -> dict[str, float]:
    """Watches that have not been answered for too long, with their age in seconds."""
    return {kind: age for kind, age in metrics.watch_ages().items() if age > STALE_SECONDS}
