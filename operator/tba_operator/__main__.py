"""`python -m tba_operator`: the controller's process. Waits for the Lease, works while it holds it, ends with it.

    settings ─▶ HTTP (metrics, probes) ─▶ Lease ─held─▶ controller ─SIGTERM─▶ work ends ─▶ Lease released ─▶ 0
                                            │                └──────kopf or the controller fails──────────▶ 1
                                            └─lost─▶ 1, at once
A replica on standby watches nothing: it costs the API server one GET of the Lease each 2 s, and no memory. When
it takes over it lists everything anew, seconds for thousands of pods, which its decisions want in any case.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace

from tba.contracts.errors import UserError
from tba_operator import log as events
from tba_operator.cluster_api import connect
from tba_operator.controller import Controller, stale_watches
from tba_operator.kubeapi import KubeApi
from tba_operator.lease import Election, LeaseLost
from tba_operator.log import configure, log
from tba_operator.metrics import Metrics, Probe, serve
from tba_operator.settings import read_settings
from tba_operator.world import Settings

SHUTDOWN_SECONDS = 9.0
"""After a signal, or its own end, the process is gone by then, whatever hangs."""


def main() -> int:
    """Exit codes: 0 stopped or to be started anew, 1 failed or Lease lost, 64 settings that cannot be read."""
    try:
        settings = with_identity(read_settings(os.environ))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  (no logging yet)
        return 64
    configure(settings.identity)
    try:
        return asyncio.run(run(settings))
    except Exception:  # the process's top
        log.exception(events.OPERATOR_FAILED)
        return 1


def with_identity(settings: Settings) -> Settings:
    """The pod's name is its host name, if nobody says otherwise."""
    return settings if settings.identity else replace(settings, identity=socket.gethostname())


async def run(settings: Settings) -> int:
    """The process's life; its exit code."""
    stop = asyncio.Event()
    metrics = Metrics()
    election: Election | None = None

    def leading() -> bool:
        return election is not None and election.leading

    _on_signals(stop)
    async with contextlib.AsyncExitStack() as stack:
        api = await stack.enter_async_context(
            connect(
                identity=settings.identity,
                observe=metrics.count_request,
                may_write=leading,
                rate=settings.requests_per_second,
                burst=settings.request_burst,
            )
        )
        election = Election(api, namespace=settings.namespace, name=settings.lease_name, identity=settings.identity)
        healthy, ready = probes(metrics, leading, lambda: election.trouble if election else "")
        port = await stack.enter_async_context(serve(metrics, port=settings.http_port, healthy=healthy, ready=ready))
        log.info(events.OPERATOR_STARTED, port=port, namespaces=settings.watch_namespaces or "all")
        return await _lead(election, api, settings, metrics, stop)


async def _lead(election: Election, api: KubeApi, settings: Settings, metrics: Metrics, stop: asyncio.Event) -> int:
    async def work() -> None:
        log.info(events.LEASE_ACQUIRED, holder=election.identity)
        await Controller(api, settings, metrics).run(spawned=lambda: _on_signals(stop))

    leading = asyncio.create_task(election.run(work))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({leading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopped = not leading.done()
    asyncio.get_running_loop().call_later(SHUTDOWN_SECONDS, os._exit, 0 if stopped else 1)
    if stopped:
        leading.cancel()
    try:
        await leading
    except asyncio.CancelledError:
        log.info(events.OPERATOR_STOPPED, reason="signal")
    except LeaseLost as error:
        log.error(events.LEASE_LOST, error=str(error))
        # Another replica may act by now: no cleanup that could take its time, or write.
        os._exit(1)
    else:
        log.info(events.OPERATOR_STOPPED, reason="to be started anew")
    return 0


def _on_signals(stop: asyncio.Event) -> None:
    """kopf takes both signals when it is spawned; afterwards they are taken back."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


def probes(metrics: Metrics, leading: Callable[[], bool], trouble: Callable[[], str]) -> tuple[Probe, Probe]:
    """(alive, ready). A standby that reaches its Lease is ready: a rollout must not wait for it to lead."""

    def healthy() -> tuple[bool, str]:
        stale = stale_watches(metrics)
        told = ", ".join(f"{kind}: {age:.0f} s" for kind, age in sorted(stale.items()))
        return not stale, f"watches not answered: {told}" if stale else "ok"

    def ready() -> tuple[bool, str]:
        if trouble():
            return False, f"cannot use the Lease: {trouble()}"
        return True, "leading" if leading() else "standby"

    return healthy, ready


if __name__ == "__main__":
    sys.exit(main())
