"""Reads the trainers' /progress, each in turn, and wakes the jobs whose progress changed.

every max(progress_seconds, running jobs ÷ 10) a job ──▶ GET POD_IP:8080/progress ──▶ sample ──changed──▶ queue
a trainer that just started ──▶ at once
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
from pydantic import ValidationError

from tba.contracts.explain import first_fault
from tba.contracts.history import Progress
from tba.contracts.newer import read_known
from tba_operator.caches import Caches, Key
from tba_operator.kubeapi import ApiError, KubeApi
from tba_operator.naming import HTTP_PORT
from tba_operator.podstate import belongs_to
from tba_operator.world import Pod, ProgressSample, Ref

MAX_BYTES = 65536
TIMEOUT_SECONDS = 2.0
JOBS_PER_SECOND = 10.0
"""At most this many reads are begun in a second: with many jobs each is read less often."""
MAX_READS = 32
"""Reads at a time: trainers that do not answer must not hold up those that do."""
_PATH = "/progress"

Fetch = Callable[[str, Pod], Awaitable[bytes]]
"""(namespace, trainer) -> body. Raises: Unreachable."""


class Unreachable(Exception):
    """A trainer that gave no answer that can be used; the text says why."""


@dataclass(slots=True)
class _Known:
    """What is known of one job's trainer."""

    pod_uid: str
    due: float
    sample: ProgressSample | None = None


class ProgressPoller:
    """Samples by job. One for the process."""

    def __init__(
        self,
        trainers: Callable[[], Mapping[Key, Pod]],
        fetch: Fetch,
        changed: Callable[[Key], None],
        *,
        interval_seconds: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`trainers`: those to ask. `changed` is called with each job whose progress is another than before."""
        self._trainers = trainers
        self._fetch = fetch
        self._changed = changed
        self._interval = interval_seconds
        self._clock = clock
        self._known: dict[Key, _Known] = {}
        self._reading: set[Key] = set()
        self._slots = asyncio.Semaphore(MAX_READS)

    def sample(self, key: Key, pod_uids: frozenset[str]) -> ProgressSample | None:
        """The newest answer of a job's trainer, if it is one of these pods."""
        known = self._known.get(key)
        return known.sample if known is not None and known.pod_uid in pod_uids else None

    async def run(self) -> None:
        """Read for ever. Cancelling it cancels the reads."""
        async with asyncio.TaskGroup() as reads:
            while True:
                for key, pod in self.due():
                    reads.create_task(self.read(key, pod))
                await asyncio.sleep(1.0)

    def due(self) -> list[tuple[Key, Pod]]:
        """Trainers to read now; each is then due again an interval later."""
        now = self._clock()
        trainers = self._trainers()
        for key in self._known.keys() - trainers.keys():
            del self._known[key]
        interval = max(self._interval, len(trainers) / JOBS_PER_SECOND)
        found: list[tuple[Key, Pod]] = []
        for key, pod in trainers.items():
            known = self._known.get(key)
            if known is None or known.pod_uid != pod.uid:
                known = self._known[key] = _Known(pod.uid, due=now)
            if known.due <= now and key not in self._reading:
                known.due = now + interval
                found.append((key, pod))
        return found

    async def read(self, key: Key, pod: Pod) -> None:
        """Read one trainer and keep its answer; an answer that cannot be used leaves the last one."""
        self._reading.add(key)
        try:
            async with self._slots:
                with suppress(Unreachable):
                    self._keep(key, pod, parse_progress(await self._fetch(key[0], pod), pod))
        finally:
            self._reading.discard(key)

    def _keep(self, key: Key, pod: Pod, progress: Progress) -> None:
        known = self._known.get(key)
        if known is None or known.pod_uid != pod.uid:
            return  # gone or replaced while it answered
        before = known.sample
        known.sample = ProgressSample(progress, self._clock())
        if before is None or _timeless(before.progress) != _timeless(progress):
            self._changed(key)


def running_trainers(caches: Caches) -> dict[Key, Pod]:
    """The trainers that can be asked; the newest of each job. One that is not ready yet tells what it waits for."""
    found: dict[Key, Pod] = {}
    for key in caches.keys_with_pods():
        pods = caches.pods(key)
        trainers = [p for p in pods if p.role == "trainer" and p.node_rank == 0 and belongs_to(p, key[1])]
        running = [p for p in trainers if p.phase == "Running" and p.ip]
        if running:
            found[key] = max(running, key=lambda pod: pod.created)
    return found


def parse_progress(body: bytes, pod: Pod) -> Progress:
    """An answer of /progress.

    Raises: Unreachable if it is none, or of another pod: IPs are given to the next pod at once.
    """
    try:
        progress = read_known(Progress, body)
    except ValidationError as error:
        raise Unreachable(f"{pod.name}: no progress: {first_fault(error)}") from error
    except ValueError as error:
        raise Unreachable(f"{pod.name}: no progress: {error}") from error
    if progress.pod_uid != pod.uid:
        raise Unreachable(f"{pod.name}: answered by pod {progress.pod_uid}")
    return progress


def direct(session: aiohttp.ClientSession, port: int = HTTP_PORT) -> Fetch:
    """By pod IP: what the operator does inside the cluster."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)

    async def fetch(namespace: str, pod: Pod) -> bytes:
        host = f"[{pod.ip}]" if pod.ip and ":" in pod.ip else pod.ip
        try:
            # No redirect: the trainer has none, and another's answer may point anywhere.
            async with session.get(f"http://{host}:{port}{_PATH}", timeout=timeout, allow_redirects=False) as answer:
                if answer.status != 200:
                    raise Unreachable(f"{pod.name}: HTTP {answer.status}")
                return await _read_bounded(answer.content, pod)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{pod.name}: {error or type(error).__name__}") from error

    return fetch


def through_api(api: KubeApi) -> Fetch:
    """Through the API server's pod proxy: an operator outside of the cluster reaches no pod IP."""

    async def fetch(namespace: str, pod: Pod) -> bytes:
        ref = Ref("v1", "Pod", namespace, pod.name)
        try:
            return await api.proxy_get(ref, HTTP_PORT, _PATH, limit=MAX_BYTES, timeout=TIMEOUT_SECONDS)
        except ApiError as error:
            raise Unreachable(f"{pod.name}: {error}") from error

    return fetch


async def _read_bounded(content: aiohttp.StreamReader, pod: Pod) -> bytes:
    body = bytearray()
    async for chunk in content.iter_any():
        body += chunk
        if len(body) > MAX_BYTES:
            raise Unreachable(f"{pod.name}: more than {MAX_BYTES} bytes")
    return bytes(body)


def _timeless(progress: Progress) -> Progress:
    """Without the moment of the answer, which differs every time."""
    return progress.model_copy(update={"last_updated_time": 0.0})
