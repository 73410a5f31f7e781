"""Publish and fetch of a full snapshot through a store, against plain put and ranged read of the same bytes.

python tests/bench/bench_snapshot.py file:///tmp/bench      (or s3://bucket/prefix, or serve)
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from results import Row, record, table, write

from tba.contracts.keys import WeightsKey, new_nonce
from tba.snapshots import fetch_snapshot, publish_snapshot
from tba.store import ObjectStore, open_store
from tba.store.serve import EmbeddedServer


def tensors(num_bytes: int) -> dict[str, torch.Tensor]:
    """bf16 weights in the shapes of SmolLM2-135M's layers, `num_bytes` in all."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536), (576,), (576,)]
    found: dict[str, torch.Tensor] = {}
    total = 0
    while total < num_bytes:
        shape = shapes[len(found) % len(shapes)]
        name = f"model.layers.{len(found) // len(shapes):03d}.{len(found) % len(shapes)}.weight"
        found[name] = (torch.randn(shape, generator=generator) * 0.02).bfloat16()
        total += found[name].nbytes
    return found


def timed(action: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def once(store: ObjectStore, weights: dict[str, torch.Tensor], raw: bytearray, version: int) -> dict[str, float]:
    """Seconds of publish, fetch, and of the same bytes put and read without hashing or parsing."""
    key = WeightsKey(version, 1, new_nonce())
    plain = f"weights/{version:010d}/000001-{new_nonce()}/raw"
    writes = {
        "plain put": lambda: store.put_once(plain, raw),
        "publish": lambda: publish_snapshot(store, key, weights, assets={}, parent=None, evaluation=None),
    }
    reads = {
        # A fresh buffer, as fetch needs one too.
        "plain read": lambda: store.read_into(plain, memoryview(bytearray(len(raw)))),
        "fetch": lambda: fetch_snapshot(store, key.path),
    }
    found = {}
    for actions in (writes, reads):
        order = list(actions) if version % 2 == 0 else list(actions)[::-1]  # neither has the fresher cache always
        found |= {name: timed(actions[name]) for name in order}
    store.delete([plain, *(info.key for info in store.list_after(key.prefix))])
    return found


@contextmanager
def opened(uri: str, endpoint: str | None) -> Iterator[ObjectStore]:
    """The store at `uri`; `serve` is an embedded S3 server of its own, in a folder that is removed afterwards."""
    with ExitStack() as stack:
        if uri == "serve":
            folder = Path(stack.enter_context(TemporaryDirectory()))
            server = stack.enter_context(EmbeddedServer(folder))
            os.environ.update(server.env)
            uri = f"s3://{server.bucket}/bench"
        store = open_store(uri, endpoint=endpoint)
        stack.callback(store.close)
        yield store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uri", nargs="?", default="serve", help="store (its objects are deleted afterwards), or: serve")
    parser.add_argument("--endpoint", help="of an S3-compatible server")
    parser.add_argument("--megabytes", type=float, default=270, help="size of the snapshot")
    parser.add_argument("--repetitions", type=int, default=4)
    parser.add_argument("-o", "--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    weights = tensors(int(options.megabytes * 1e6))
    raw = bytearray(torch.cat([t.reshape(-1) for t in weights.values()]).view(torch.uint8).numpy().data)
    with opened(options.uri, options.endpoint) as store:
        runs = [once(store, weights, raw, version) for version in range(options.repetitions)]
    found = summarise(
        runs, len(raw), f"{len(raw) / 1e6:.0f} MB, {len(weights)} tensors, {options.uri.partition(':')[0]} store"
    )
    print(table(found))
    if options.output:
        write(found, options.output)


def summarise(runs: list[dict[str, float]], size: int, note: str) -> list[Row]:
    """Medians against the plain transfer of the same bytes."""
    median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    found = []
    for name, plain in (("publish", "plain put"), ("fetch", "plain read")):
        rate = f"{size / 1e6 / median[name]:.0f} MB/s; {note}"
        times = [run[name] for run in runs]
        baseline = (plain, median[plain])
        found.append(record("perf", "snapshot", name, median[name], "s", baseline=baseline, runs=times, note=rate))
    both = [run["publish"] + run["fetch"] for run in runs]
    limit = median["plain put"] + median["plain read"]
    found.append(
        record(
            "perf",
            "snapshot",
            "publish -> fetched",
            statistics.median(both),
            "s",
            baseline=("plain put + read", limit),
            target="<= 1.5",
            runs=both,
            note=note,
        )  # fmt: skip
    )
    return found


if __name__ == "__main__":
    main()
