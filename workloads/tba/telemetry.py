"""Metrics of trainer and searcher, and the small HTTP server of every pod (interface.md §3, §4).

Metric names are an API: add, do not rename.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

REGISTRY = CollectorRegistry()
"""Own registry: a library that uses the default one cannot add to or clash with ours."""
ProcessCollector(registry=REGISTRY)
disable_created_metrics()  # a `_created` series beside each counter helps nobody here


def _gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
    return Gauge(name, text, labels, registry=REGISTRY)


def _counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
    return Counter(name, text, labels, registry=REGISTRY)


STEP = _gauge("tba_step", "Optimizer steps done.")
LOSS = _gauge("tba_loss", "Loss of the last step.")
REWARD_MEAN = _gauge("tba_reward_mean", "Mean reward of the last batch.")
LOG_Z = _gauge("tba_log_z", "Mean estimated log partition function of the last batch.")
KL = _gauge("tba_kl", "Mean summed log-ratio to the reference, nats a response.")
ELL_STD = _gauge("tba_ell_std", "Mean within-group standard deviation of the log-ratio.")
BETA_RATIO = _gauge("tba_beta_ratio", "beta * std(ell) / std(reward).")
SIGNAL_GROUPS_FRACTION = _gauge("tba_signal_groups_fraction", "Share of groups whose rewards differ.")
ESS = _gauge("tba_ess", "Effective sample size of the weights as a share of the batch.")
GRAD_NORM = _gauge("tba_grad_norm", "Gradient norm before clipping.")
GRAD_CLIP_FRACTION = _gauge("tba_grad_clip_fraction", "Share of recent steps whose gradient was clipped.")
REPLAY_RATIO = _gauge("tba_replay_ratio", "Rows trained per row ingested over the last 100 steps.")
SNAPSHOT_BYTES = _gauge("tba_snapshot_bytes", "Bytes of the newest snapshot of a kind.", ("kind",))
STALENESS = Histogram(
    "tba_staleness_steps",
    "Optimizer steps between the policy of a trained row and the step that trained it.",
    buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 1024),
    registry=REGISTRY,
)
SYNC_SECONDS = Histogram(
    "tba_sync_seconds",
    "Seconds of one phase of a weight transfer: stage, upload, commit, fetch, apply.",
    ("phase",),
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300),
    registry=REGISTRY,
)
TRAINER_WAIT = _counter("tba_trainer_wait_seconds_total", "Seconds the trainer waited, by what for.", ("for",))
SEARCHER_WAIT = _counter("tba_searcher_wait_seconds_total", "Seconds the searcher waited, by what for.", ("for",))
TRAINER_SECONDS = _counter(
    "tba_trainer_phase_seconds_total",
    "Seconds of the trainer by phase, all of its time: waits, ingest, step, stage, capture, other.",
    ("phase",),
)
SEARCHER_SECONDS = _counter(
    "tba_searcher_phase_seconds_total",
    "Seconds of the searcher by phase, all of its time: generate, swap, waits, other.",
    ("phase",),
)
MODEL_FLOPS = _counter("tba_model_flops_total", "Floating-point operations of the model's own work, recomputation not.")
PEAK_FLOPS = _gauge("tba_peak_flops_per_second", "What the process's GPUs could do in the model's dtype; 0: unknown.")
GENERATED_TOKENS = _counter("tba_generated_tokens_total", "Response tokens sampled.")
TRAINED_TOKENS = _counter("tba_trained_tokens_total", "Response tokens trained on.")
TRAJECTORIES = _counter(
    "tba_trajectories_total", "Rows ingested, of them duplicate and failed; shards quarantined.", ("outcome",)
)
MOP_RECYCLES = _counter("tba_mop_recycles_total", "Times the most-on-policy pool was used up and recycled.")
REWARD_FAILURES = _counter("tba_reward_failures_total", "Responses that could not be scored.", ("reason",))
STORAGE_REQUESTS = _counter("tba_storage_requests_total", "Requests to the object store.", ("op", "outcome"))


def count_storage_request(operation: str, outcome: str) -> None:
    """`observe` of `tba.store.open_store`."""
    STORAGE_REQUESTS.labels(operation, outcome).inc()


Probe = Callable[[], tuple[bool, str]]


class Heartbeat:
    """Liveness of a loop: alive while the age of its last progress is within a budget. Thread-safe."""

    def __init__(self, budget_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._default = budget_seconds
        self._lock = threading.Lock()
        self._last, self._budget, self._what = clock(), budget_seconds, "starting"

    def beat(self, what: str = "") -> None:
        """Progress was made; `what` says what comes next, for the probe's answer."""
        with self._lock:
            self._last, self._what = self._clock(), what or self._what

    @contextmanager
    def allow(self, what: str, budget_seconds: float) -> Iterator[None]:
        """Give one long operation (loading a model, a final upload) its own budget."""
        with self._lock:
            self._last, self._budget, self._what = self._clock(), budget_seconds, what
        try:
            yield
        finally:
            with self._lock:
                self._last, self._budget = self._clock(), self._default

    @property
    def age_seconds(self) -> float:
        """Since the last progress."""
        with self._lock:
            return self._clock() - self._last

    def alive(self) -> tuple[bool, str]:
        """(alive, explanation): the answer of `/healthz`."""
        with self._lock:
            age, budget, what = self._clock() - self._last, self._budget, self._what
        return age <= budget, f"{what}: last progress {age:.0f} s ago, budget {budget:.0f} s"


class JsonRecord(Protocol):
    """What `/progress` answers with: `contracts.history.Progress`."""

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        ...


class Server:
    """A running HTTP server. `port` is the bound one."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self.port: int = server.server_address[1]
        self._thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop and release the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(
    port: int,
    *,
    healthy: Probe,
    ready: Probe,
    progress: Callable[[], JsonRecord] | None = None,
    page: Callable[[], str] | None = None,
    host: str | None = None,
) -> Server:
    """Answer `/metrics`, `/healthz`, `/readyz` and, where given, `/progress` and `/` from a daemon thread.

    `port` 0 takes a free one. `host` None: TBA_HTTP_HOST, else all interfaces (a pod's probes come from outside).
    Raises: OSError if the port is taken.
    """
    routes: dict[str, Callable[[], tuple[int, str, bytes]]] = {
        "/metrics": lambda: (200, CONTENT_TYPE_LATEST, generate_latest(REGISTRY)),
        "/healthz": lambda: _probe(healthy),
        "/readyz": lambda: _probe(ready),
    }
    if progress is not None:
        routes["/progress"] = lambda: (200, "application/json", progress().to_json())
    if page is not None:
        routes["/"] = lambda: (200, "text/html; charset=utf-8", page().encode())
    address = (host if host is not None else os.environ.get("TBA_HTTP_HOST", ""), port)
    return Server(_HttpServer(address, _handler(routes)))


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in address[0] or (not address[0] and socket.has_dualstack_ipv6()):
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """All interfaces are those of both families: pods of some clusters have IPv6 addresses only."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)  # HTTPServer's asks DNS besides, for a name that is not used


def _probe(probe: Probe) -> tuple[int, str, bytes]:
    good, detail = probe()
    return (200 if good else 503), "text/plain; charset=utf-8", f"{'ok' if good else 'not ok'}: {detail}\n".encode()


def _handler(routes: dict[str, Callable[[], tuple[int, str, bytes]]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # a client that stalls must not hold a thread for ever

        def do_GET(self) -> None:  # noqa: N802 - name fixed by the standard library
            route = routes.get(self.path.split("?", 1)[0])
            status, kind, body = route() if route else (404, "text/plain", b"not found\n")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            # The page shows model text: no script, nothing from elsewhere, even if escaping were ever forgotten.
            self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; img-src data:")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - name fixed by the standard library
            """Probes every few seconds are not news."""

    return Handler
