"""How many shards a trainer takes in: N fake producers write through a real store, a real Ingestor and buffer read.

First a backlog is drained as fast as it goes, plainly and with the latency of a distant store. Then producers write at
a steady rate, a few of them and then all, while the trainer keeps up. No model.

python tests/bench/bench_ingest.py [serve | file:///tmp/bench | s3://bucket/prefix] [--quick]
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from results import Row, record, table, write

from tba.contracts.keys import SHARDS, ShardKey
from tba.contracts.records import FinishReason, Lineage, Outcome, ShardHeader, Span, Trajectory
from tba.protocol.bookkeeping import Bookkeeping
from tba.shards import encode_shard
from tba.store import ObjectStore, open_store
from tba.store.serve import EmbeddedServer
from tba.trainer.buffer import ReplayBuffer
from tba.trainer.ingest import Arrival, Binding, Ingestor

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "ingest.json"
RUN = "f" * 32
PROMPTS = 2000
VOCABULARY = 49152
VISIT = 20  # rows of one prompt
PAGE = 1000  # keys of a LIST page
POLL_SECONDS = 2.0  # the default of sync.pollIntervalSeconds
PUBLISH_SECONDS = 2.0
UPLOADS = 8  # at once, in each producing process
FEW_PRODUCERS = 10
UPLOAD_DOLLARS, LIST_DOLLARS, GET_DOLLARS = 5e-6, 5e-6, 4e-7  # a request, S3 Standard, us-east-1


@dataclass(frozen=True, slots=True)
class Load:
    """What the producers of one process write."""

    uri: str
    producers: tuple[int, ...]
    shards: int
    shards_per_second: float | None  # None: as fast as it goes
    rows: int  # a shard
    tokens: int  # a row, at most


def make_shard(rng: np.random.Generator, producer: int, seq: int, load: Load) -> bytes:
    """Rows of whole visits, as a searcher writes them; half to all of the tokens."""
    tokens = rng.integers(0, VOCABULARY, (load.rows, load.tokens), dtype=np.int32)
    lengths = rng.integers(load.tokens // 2, load.tokens + 1, load.rows).tolist()
    prompts = rng.integers(PROMPTS, size=-(-load.rows // VISIT)).tolist()
    now = time.time()
    rows = [
        Trajectory(
            prompt_id=prompts[i // VISIT],
            visit=seq * load.rows + i // VISIT,
            visit_size=min(VISIT, load.rows - i // VISIT * VISIT),
            prompt_tokens=[prompts[i // VISIT]] * 16,
            response_tokens=tokens[i, : lengths[i]],
            outcome=Outcome.SCORED,
            reward=float(i % 2),
            finish_reason=FinishReason.STOP,
            spans=[Span(lengths[i], 1, 0)],
            temperature=1.0,
            created_at=now,
        )
        for i in range(load.rows)
    ]
    header = ShardHeader(
        run=RUN, searcher=f"searcher-{producer}", incarnation=f"{producer:032x}", seq=seq, reward_version="bench"
    )
    return encode_shard(header, rows)


def produce(load: Load, seed: int, window: Any) -> None:
    """Write `load.shards` shards of its producers in turn. Runs in a process of its own."""
    store = open_store(load.uri)
    rng = np.random.default_rng(seed)
    started = time.monotonic()
    with ThreadPoolExecutor(UPLOADS) as pool:
        uploads = []
        for i in range(load.shards):
            if load.shards_per_second is not None:
                time.sleep(max(0.0, started + i / load.shards_per_second - time.monotonic()))
            producer, seq = load.producers[i % len(load.producers)], i // len(load.producers)
            key = ShardKey(window.value, f"searcher-{producer}", f"{producer:032x}", seq).path
            uploads.append(pool.submit(store.put_once, key, make_shard(rng, producer, seq, load)))
        for upload in uploads:
            upload.result()
    store.close()


class Counting:
    """The reading half of a store: counts requests and may add the latency of a distant one to each GET."""

    def __init__(self, store: ObjectStore, get_seconds: float = 0.0) -> None:
        self._store = store
        self._get_seconds = get_seconds
        self.gets = self.pages = 0

    def get(self, key: str):
        self.gets += 1
        time.sleep(self._get_seconds)
        return self._store.get(key)

    def list_after(self, prefix: str, after: str | None = None):
        keys = 0
        try:
            for info in self._store.list_after(prefix, after):
                keys += 1
                yield info
        finally:
            self.pages += max(1, -(-keys // PAGE))


@dataclass(slots=True)
class Taken:
    """What the trainer's side saw of one part."""

    shards: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    busy_seconds: float = 0.0  # of the loop's thread, in bookkeeping and buffer
    pages: int = 0
    lags: list[float] = field(default_factory=list)  # from the making of a shard to its rows in the buffer
    first_made: float = float("inf")  # unix seconds
    last_taken: float = 0.0

    @property
    def shards_per_second(self) -> float:
        """From the making of the first to the taking in of the last."""
        return self.shards / (self.last_taken - self.first_made)


class Consumer:
    """The training loop without training."""

    def __init__(self, store: Counting, window: Any) -> None:
        from tba.trainer.learner import new_rows  # late: the producers need no torch

        self._new_rows = new_rows
        self._store = store
        self._window = window
        self._book = Bookkeeping.begun(1)
        self._buffer = ReplayBuffer(capacity_per_prompt=100)
        self.taken = Taken()
        self._ingestor = Ingestor(
            store,  # type: ignore[arg-type]
            Binding(RUN, PROMPTS, VOCABULARY),
            lowest_unswept_window=0,
            commit=lambda: window.value,
            is_ingested=lambda shard: self._book.contains(shard),
            starved=lambda: False,
            poll_seconds=lambda: POLL_SECONDS,
            searcher_poll_seconds=lambda: POLL_SECONDS,
            give_up_seconds=600.0,
        )

    def run(self, shards: int, limit_seconds: float) -> Taken:
        """Take in `shards` shards, advancing the window like a trainer that publishes."""
        taken, started = self.taken, time.monotonic()
        self._ingestor.start()
        while taken.shards < shards and time.monotonic() - started < limit_seconds:
            arrivals = self._ingestor.take(0.2)
            begun = time.perf_counter()
            for arrival in arrivals:
                self._accept(arrival)
            self._ingestor.ingested(arrivals)
            taken.busy_seconds += time.perf_counter() - begun
            self._window.value = 1 + int((time.monotonic() - started) / PUBLISH_SECONDS)
        taken.seconds = time.monotonic() - started
        self._ingestor.close()
        taken.pages = self._store.pages
        return taken

    def _accept(self, arrival: Arrival) -> None:
        batch = arrival.batch
        if batch is None or arrival.shard_id is None:
            raise RuntimeError(f"no shard of the bench is bad, got {arrival.key}: {arrival.reason}")
        self._book = self._book.ingest(arrival.shard_id)
        self._buffer.add(self._new_rows(batch, Lineage()))
        self.taken.shards += 1
        self.taken.rows += len(batch)
        self.taken.tokens += len(batch.response_tokens)
        now, made = time.time(), float(batch.created_at[0])
        self.taken.lags.append(now - made)
        self.taken.first_made, self.taken.last_taken = min(self.taken.first_made, made), now


class Bench:
    """Parts in prefixes of their own below one store."""

    def __init__(self, uri: str, options: argparse.Namespace) -> None:
        self._uri = uri
        self._options = options
        self._context = multiprocessing.get_context("spawn")
        self._parts = 0

    def backlog(self, get_seconds: tuple[float, ...]) -> list[Taken]:
        """Write first, then drain once for each latency."""
        uri, window = self._next()
        options = self._options
        for process in self._start(uri, window, options.processes * 4, options.backlog, None):
            _join(process)
        found = []
        for seconds in get_seconds:
            with _opened(uri) as store:
                found.append(Consumer(Counting(store, seconds), window).run(options.backlog, options.seconds * 4))
        self._clear(uri)
        return found

    def live(self, producers: int) -> Taken:
        """Write and take in at once, at the steady rate."""
        uri, window = self._next()
        options = self._options
        shards = int(options.rate * options.seconds)
        processes = self._start(uri, window, producers, shards, options.rate)
        with _opened(uri) as store:
            taken = Consumer(Counting(store), window).run(shards, options.seconds * 4)
        for process in processes:
            _join(process)
        self._clear(uri)
        return taken

    def _next(self) -> tuple[str, Any]:
        self._parts += 1
        return f"{self._uri}/{os.getpid()}-{self._parts}", self._context.Value("q", 1)

    def _start(self, uri: str, window: Any, producers: int, shards: int, rate: float | None) -> list[Any]:
        options, started = self._options, []
        count = min(options.processes, producers)
        for i in range(count):
            mine = tuple(range(i, producers, count))
            share = shards // count + (i < shards % count)
            load = Load(uri, mine, share, rate and rate / count, options.rows, options.tokens)
            started.append(self._context.Process(target=produce, args=(load, i, window), daemon=True))
            started[-1].start()
        return started

    def _clear(self, uri: str) -> None:
        with _opened(uri) as store:
            store.delete([info.key for info in store.list_after(SHARDS)])


def _join(process: Any) -> None:
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"a producer ended with {process.exitcode}: see its error above")


@contextmanager
def _opened(uri: str) -> Iterator[ObjectStore]:
    store = open_store(uri)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def served(uri: str) -> Iterator[str]:
    """The URI itself, or for `serve` that of an embedded S3 server of its own."""
    with ExitStack() as stack:
        if uri == "serve":
            server = stack.enter_context(EmbeddedServer(Path(stack.enter_context(TemporaryDirectory()))))
            os.environ.update(server.env)
            uri = f"s3://{server.bucket}/bench"
        yield uri.rstrip("/")


def backlog_rows(options: argparse.Namespace, near: list[Taken], far: list[Taken]) -> list[Row]:
    """Capacity. The target is what 1,000 searchers write that end a shard every 25 s."""
    first = near[0]
    what = f"{first.rows // first.shards} rows of {first.tokens // first.rows} tokens a shard, {_kind(options)}"
    found = []
    for name, parts, extra in (("backlog", near, ""), ("backlog, distant", far, f"; {options.latency:g} s a GET")):
        for unit, attribute in (("shards/s", "shards"), ("rows/s", "rows"), ("tokens/s", "tokens")):
            runs = [getattr(part, attribute) / part.seconds for part in parts]
            value, target = statistics.median(runs), ">= 40" if attribute == "shards" else None
            note = what + extra
            found.append(record("scale", "ingest", f"{name}: {unit}", value, unit, target=target, runs=runs, note=note))
    own = [part.busy_seconds / part.rows * 1e6 for part in near]
    note = "bookkeeping and buffer"
    found.append(record("scale", "ingest", "loop's own time", statistics.median(own), "us/row", runs=own, note=note))
    return found


def live_rows(options: argparse.Namespace, few: Taken, many: Taken) -> list[Row]:
    """Whether it keeps up with all producers, and whether their number costs anything."""
    offered = options.rate
    name = f"{options.producers} producers"
    dollars = many.shards * (UPLOAD_DOLLARS + GET_DOLLARS) + many.pages * LIST_DOLLARS
    pages = [part.pages / part.shards for part in (few, many)]
    p50, p95 = np.percentile(many.lags, [50, 95])
    note = f"{offered:g} shards/s offered, {_kind(options)}, poll every {POLL_SECONDS:g} s"
    return [
        record(
            "scale",
            "ingest",
            f"{name}: ingested",
            many.shards_per_second,
            "shards/s",
            baseline=("offered", offered),
            target=">= 0.9",
            note=f"{note}; the last poll is in the time",
        ),
        record(
            "scale", "ingest", f"{name}: rows", many.rows / many.shards * many.shards_per_second, "rows/s", note=note
        ),
        record(
            "scale",
            "ingest",
            f"{name}: tokens",
            many.tokens / many.shards * many.shards_per_second,
            "tokens/s",
            note=note,
        ),
        record("scale", "ingest", f"{name}: lag, median", p50, "s", note="made -> in the buffer"),
        record("scale", "ingest", f"{name}: lag, 95 %", p95, "s", target=f"<= {2 * POLL_SECONDS:g}", note="two polls"),
        record(
            "scale",
            "ingest",
            f"{name}: LIST pages a shard",
            pages[1],
            "pages",
            baseline=(f"{FEW_PRODUCERS} producers", pages[0]),
            target="<= 1.5",
            note="pages follow shards, not producers",
        ),
        record("scale", "ingest", "requests", dollars / many.rows * 1e6, "$/M trajectories", note="S3 Standard prices"),
    ]


def _kind(options: argparse.Namespace) -> str:
    return "embedded SeaweedFS" if options.uri == "serve" else f"{options.uri.partition(':')[0]} store"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uri", nargs="?", default="serve", help="store (its objects are deleted afterwards), or: serve")
    parser.add_argument("--producers", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2, choices=range(1, 5))
    parser.add_argument("--rate", type=float, default=40.0, help="shards a second of all producers together")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each live part")
    parser.add_argument("--backlog", type=int, default=600, help="shards")
    parser.add_argument("--repetitions", type=int, default=3, help="of each drain of the backlog")
    parser.add_argument("--latency", type=float, default=0.03, help="seconds added to each GET in the distant part")
    parser.add_argument("--rows", type=int, default=100, help="of a shard")
    parser.add_argument("--tokens", type=int, default=86, help="most of a row; the mean is three quarters of it")
    parser.add_argument("--quick", action="store_true", help="seconds in all; writes only with -o")
    parser.add_argument("-o", "--output", type=Path, help=f"default docs/results/{OUTPUT.name}")
    options = parser.parse_args()
    if options.quick:
        options.producers, options.rate, options.seconds, options.backlog = 100, 20.0, 5.0, 60
    with served(options.uri) as uri:
        bench = Bench(uri, options)
        drained = bench.backlog((0.0, options.latency) * options.repetitions)
        few, many = bench.live(FEW_PRODUCERS), bench.live(options.producers)
    if any(part.shards == 0 for part in (*drained, few, many)):
        raise RuntimeError("a part has ingested nothing: see the log above")
    found = backlog_rows(options, drained[::2], drained[1::2]) + live_rows(options, few, many)
    print(table(found))
    output = options.output or (None if options.quick else OUTPUT)
    if output:
        write(found, output)


if __name__ == "__main__":
    main()
