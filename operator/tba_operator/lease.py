"""Leader election on a Lease: of all replicas one works, the others wait.

    wait ──nobody holds it, or its holder was silent for its duration──▶ lead ──no renewal for too long──▶ LeaseLost
      ▲                                                                   │
      └────────── the next replica, at once ◀── released ◀── work ended ──┘

Clocks of two machines are never compared. A holder leads until `renew_deadline` after it *began* its last good
renewal; a rival waits for the duration, which is longer, after it *saw* the Lease change. Both read their own monotonic
clock, so a holder that was stopped (SIGSTOP, a paused VM) knows that it lost before a rival can have won. What may
overlap is a request on its way: an apply of a desired state, or a deletion by uid, which the next reconcile puts right.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import structlog

from tba_operator.kubeapi import ApiError, Conflict, KubeApi, Object, micro_time
from tba_operator.world import Ref


class LeaseLost(Exception):
    """Another replica may lead now: this process has to end."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds."""

    duration: int = 15
    renew_deadline: float = 10.0
    retry: float = 2.0

    def __post_init__(self) -> None:
        if not self.retry < self.renew_deadline < self.duration:
            raise ValueError(f"retry < renew_deadline < duration, or there may be two leaders; got {self}")


@dataclass(frozen=True, slots=True)
class _Seen:
    """A version of the Lease, and when it was first seen."""

    version: str
    spec: Mapping[str, Any]
    at: float

    @property
    def holder(self) -> str:
        return self.spec.get("holderIdentity") or ""

    @property
    def silent_until(self) -> float:
        """The holder's own word for how long it may stay silent, counted from when this was seen."""
        return self.at + self.spec.get("leaseDurationSeconds", 0)


class Election:
    """One candidate."""

    def __init__(
        self,
        api: KubeApi,
        *,
        namespace: str,
        identity: str,
        name: str,
        timing: Timing = Timing(),
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`identity`, the pod's name, gets a suffix: a restarted container is another candidate. `wall`: for people."""
        self._api = api
        self._ref = Ref("coordination.k8s.io/v1", "Lease", namespace, name)
        self.identity = f"{identity}_{uuid4().hex[:8]}"
        self._timing = timing
        self._wall = wall
        self._seen: _Seen | None = None
        self._leads_until = float("-inf")
        self.trouble = ""
        """Why the Lease could not be read or written at the last try; a standby with trouble is not ready."""

    @property
    def leading(self) -> bool:
        """Whether this process may act, by its own clock."""
        return _now() < self._leads_until

    @property
    def holder(self) -> str:
        """Who led when the Lease was last read; empty: nobody, or not read yet."""
        return self._seen.holder if self._seen else ""

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait to lead, do the work, hand the Lease to the next; cancelling this cancels the work and does the same.

        Raises: LeaseLost if the Lease went before the work ended, which is cancelled then but not waited for.
        """
        await self._acquire()
        task = asyncio.ensure_future(work())
        hold = asyncio.ensure_future(self._hold())
        try:
            await asyncio.wait({task, hold}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                hold.result()
            task.result()
        finally:
            task.cancel()
            if not hold.done():
                # The Lease is kept while the work winds up: the next replica must not meet its last writes.
                await asyncio.wait({task, hold}, return_when=asyncio.FIRST_COMPLETED)
            hold.cancel()
            if task.done() and self.leading:
                await self._release()

    async def _acquire(self) -> None:
        while True:
            try:
                won = await self._try_to_lead()
                self._note("")
                if won:
                    return
            except Conflict:
                self._note("")  # another candidate was faster
            except ApiError as error:
                self._note(str(error))
            await asyncio.sleep(self._timing.retry)

    async def _try_to_lead(self) -> bool:
        lease = await self._api.get(self._ref)
        started = _now()
        if lease is not None:
            self._look(lease)
        seen = self._seen
        if seen and seen.holder not in ("", self.identity) and started < seen.silent_until:
            return False
        if lease is None:
            self._won(await self._api.create(self._record(None)), started)
        else:
            self._won(await self._api.replace(self._record(seen)), started)
        return self.leading

    async def _hold(self) -> None:
        """Renew until that has failed for too long. Raises: LeaseLost."""
        while True:
            try:
                async with asyncio.timeout_at(self._leads_until):
                    await asyncio.sleep(self._timing.retry)
                    await self._renew()
            except TimeoutError:
                pass
            if not self.leading:
                why = self.trouble or "no time to renew it: the process was stopped or its event loop was blocked"
                raise LeaseLost(f"Lease {self._ref.name} lost: {why}")

    async def _renew(self) -> None:
        started = _now()
        try:
            self._won(await self._api.replace(self._record(self._seen)), started)
            self._note("")
        except Conflict:
            await self._look_again()
        except ApiError as error:
            self._note(str(error))  # the deadline decides

    async def _look_again(self) -> None:
        """Somebody wrote the Lease: perhaps this process, in a renewal whose answer was lost."""
        try:
            lease = await self._api.get(self._ref)
        except ApiError as error:
            self._note(str(error))
            return
        if lease is None or self._look(lease).holder != self.identity:
            self._leads_until = float("-inf")
            self._note("it was deleted" if lease is None else f"taken over by {self.holder or 'nobody'}")

    async def _release(self) -> None:
        self._leads_until = float("-inf")
        record = self._record(self._seen)
        record["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
        try:
            await self._api.replace(record)
        except ApiError as error:
            self._note(str(error))  # the next replica has to wait for the duration

    def _won(self, written: Object, started: float) -> None:
        self._seen = _Seen(written["metadata"]["resourceVersion"], written["spec"], started)
        self._leads_until = started + self._timing.renew_deadline

    def _look(self, lease: Object) -> _Seen:
        version = lease["metadata"]["resourceVersion"]
        if self._seen is None or self._seen.version != version:
            self._seen = _Seen(version, lease.get("spec") or {}, _now())
        return self._seen

    def _record(self, seen: _Seen | None) -> Object:
        """The Lease as this process would hold it; `seen`: the version to replace, None to create it."""
        now = micro_time(self._wall())
        spec = seen.spec if seen else {}
        mine = spec.get("holderIdentity") == self.identity
        metadata = {"name": self._ref.name, "namespace": self._ref.namespace}
        return {
            "apiVersion": self._ref.api_version,
            "kind": self._ref.kind,
            "metadata": metadata | {"resourceVersion": seen.version} if seen else metadata,
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": self._timing.duration,
                "acquireTime": spec["acquireTime"] if mine else now,
                "renewTime": now,
                "leaseTransitions": spec.get("leaseTransitions", 0) + (1 if seen and not mine else 0),
            },
        }

    def _note(self, trouble: str) -> None:
        if trouble and trouble != self.trouble:
            structlog.get_logger().warning("lease_failed", lease=str(self._ref), error=trouble)
        self.trouble = trouble


def _now() -> float:
    return asyncio.get_running_loop().time()
