"""Weights from trainer to engine through a real store: full snapshots, and deltas by learning rate and interval.

    stage ─► publish (serialise, hash, upload, manifest) ─► fetch (download, verify) ─► engine.load
    limit of the link: the same bytes put as plain objects and read into a buffer, in the same run

Deltas: AdamW steps on real gradients (worked answers of `count`) after a warm-up of the moments, encoded as a trainer
does. A random model gives no meaningful deltas: of its shape only full snapshots are measured.

PYTHONPATH=workloads:tests python tests/bench/gpu/bench_sync.py --model FOLDER [--store s3] [--engine vllm] [-o FILE]
PYTHONPATH=workloads:tests python tests/bench/gpu/bench_sync.py --rehearse
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bench.gpu.places import count_task, tiny_start
from bench.gpu.weights import load, random_assets, random_model, staged
from bench.results import Row, own_command, record, table, write
from torch import Tensor
from torch.nn.functional import cross_entropy

from tba.contracts.config import Engine, Model
from tba.contracts.keys import WeightsKey, new_nonce
from tba.searcher.engines import build
from tba.snapshots import SnapshotFetcher, publish_snapshot
from tba.snapshots.encode import Base, encode_delta
from tba.snapshots.publish import publish_delta
from tba.store import ObjectStore, open_store

_LINK_PART_BYTES = 64 * 2**20
WARM_UP_STEPS = 10
MAX_MODEL_LEN = 512


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model whose deltas are measured")
    parser.add_argument(
        "--what",
        nargs="+",
        default=["model", "deltas", "1.5b"],
        help="full snapshots of the model, its deltas, full snapshots of a random model; one engine a process",
    )
    parser.add_argument("--store", choices=["file", "s3"], default="file")
    parser.add_argument("--folder", type=Path, help="of the store; default: a temporary one")
    parser.add_argument("--engine", default="none", help="vllm, transformers, or none: without the swap")
    parser.add_argument("--utilization", type=float, default=0.4)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-6, 1e-5, 3e-5])
    parser.add_argument("--intervals", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.rehearse:
            options.model = tiny_start(Path(folder) / "start") / "start"
            options.what, options.engine, options.repetitions = ["model", "deltas", "tiny"], "transformers", 2
            options.intervals, options.learning_rates = [1, 2], [1e-6, 1e-3]
        if options.model is None:
            parser.error("name --model, or --rehearse")
        with opened(options, Path(folder)) as store:
            rows = measure(options, store)
    print(table(rows))
    if options.output:
        write(rows, options.output)


@contextmanager
def opened(options: argparse.Namespace, folder: Path) -> Iterator[ObjectStore]:
    """The store: a directory, or a bucket of a server of our own."""
    if options.store == "file":
        yield open_store(f"file://{folder / 'store'}")
        return
    import os

    from tba.store.serve import EmbeddedServer

    with EmbeddedServer(folder / "server") as server:
        os.environ.update(server.env)
        yield open_store("s3://tba/bench", endpoint=server.endpoint)


def measure(options: argparse.Namespace, store: ObjectStore) -> list[Row]:
    """All rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[Row] = []
    if {"model", "deltas"} & set(options.what):
        loaded = load(options.model, max_model_len=MAX_MODEL_LEN, dtype="bfloat16")
        model = loaded.model.to(device)
        rows += full_rows(options, store, options.model.name, model, loaded.assets) if "model" in options.what else []
        rows += delta_rows(options, store, model, loaded) if "deltas" in options.what else []
    for shape in options.what:
        if shape not in ("model", "deltas"):
            made = random_model(shape, device=device, dtype=torch.bfloat16)
            rows += full_rows(options, store, shape, made, random_assets(shape, options.model))
    return rows


def full_rows(
    options: argparse.Namespace, store: ObjectStore, name: str, model: Any, assets: Mapping[str, bytes]
) -> list[Row]:
    """Publish, fetch, swap: seconds of each, against the link's own speed."""
    engine = None if options.engine == "none" else build(
        Engine(type=options.engine, gpu_memory_utilization=options.utilization, max_num_seqs=64),
        model=Model(uri="file:///none", dtype="bfloat16", max_model_len=MAX_MODEL_LEN),
    )  # fmt: skip
    parts: dict[str, list[float]] = {"stage": [], "publish": [], "fetch": [], "load": [], "link": []}
    total = 0
    for repetition in range(options.repetitions + 1):
        seconds: dict[str, float] = {}
        tensors, seconds["stage"] = clocked(lambda: staged(model))
        total = sum(t.nbytes for t in tensors.values())
        key = WeightsKey(repetition, 1, new_nonce())
        _, seconds["publish"] = clocked(
            lambda k=key, t=tensors: publish_snapshot(store, k, t, assets=assets, parent=None, evaluation=None)
        )
        fetched, seconds["fetch"] = clocked(lambda k=key: SnapshotFetcher()(store, k.path))
        _, seconds["load"] = clocked(lambda s=fetched: engine.load(s) if engine else None)
        seconds["link"] = link_seconds(store, total)
        if repetition:  # the first one warms up, and starts the engine
            for what, took in seconds.items():
                parts[what].append(took)
        remove(store, "weights/")
    if engine:
        engine.close()
    runs = [p + f + s for p, f, s in zip(parts["publish"], parts["fetch"], parts["load"], strict=True)]
    medians = {what: statistics.median(v) for what, v in parts.items()}
    note = (
        f"{total / 1e9:.2f} GB, store {options.store}, engine {options.engine}: "
        + ", ".join(f"{what} {took:.3f} s" for what, took in medians.items() if what != "link")
        + f"; the link, put and get: {2 * total / medians['link'] / 1e9:.2f} GB/s"
    )
    return [
        record(
            "perf", "gpu_sync", f"{name}: full snapshot, publish to swapped", statistics.median(runs), "s",
            baseline=("the link", medians["link"]), target="<= 1.5", runs=runs, command=command(), note=note,
        )
    ]  # fmt: skip


def link_seconds(store: ObjectStore, size: int) -> float:
    """Put and get of the same number of bytes as plain objects, nothing hashed or checked."""
    buffer = memoryview(bytearray(min(size, _LINK_PART_BYTES)))
    names = [f"link/{i}-{new_nonce()}" for i in range(-(-size // len(buffer)))]
    started = time.perf_counter()
    for name in names:
        store.put_once(name, buffer)
    for name in names:
        store.read_into(name, buffer)
    seconds = time.perf_counter() - started
    remove(store, "link/")
    return seconds * size / (len(names) * len(buffer))


def delta_rows(options: argparse.Namespace, store: ObjectStore, model: Any, loaded: Any) -> list[Row]:
    """Bytes of a delta over those of a full snapshot."""
    start = {n: t.detach().clone() for n, t in model.state_dict().items()}
    rows = []
    for rate in options.learning_rates:
        model.load_state_dict(start)
        train = trainer(model, loaded.tokenizer, rate)
        for _ in range(WARM_UP_STEPS):
            next(train)
        for interval in options.intervals:
            ratios, encode, fetch = [], [], []
            full = 0
            for _ in range(options.repetitions):
                fetcher = SnapshotFetcher()
                before = staged(model)
                key = WeightsKey(0, 1, new_nonce())
                anchor = publish_snapshot(store, key, before, assets=loaded.assets, parent=None, evaluation=None)
                fetcher(store, key.path)
                for _ in range(interval):
                    next(train)
                after = staged(model)
                full = sum(t.nbytes for t in after.values())
                base = Base(key.path, anchor, before)
                delta, took = clocked(lambda b=base, a=after, f=full: encode_delta(b, a, max_bytes=2 * f))
                assert delta is not None, "a delta of twice the bytes is refused"
                encode.append(took)
                ratios.append(delta.num_bytes / full)
                second = WeightsKey(1, 1, new_nonce())
                publish_delta(store, second, delta, parent=key.path, evaluation=None)
                _, took = clocked(lambda s=second, f=fetcher: f(store, s.path))
                fetch.append(took)
                remove(store, "weights/")
            note = (
                f"{full / 1e9:.2f} GB full; encode {statistics.median(encode):.3f} s, fetch and apply "
                f"{statistics.median(fetch):.3f} s; AdamW after {WARM_UP_STEPS} steps on worked answers"
            )
            target = "<= 0.1" if rate <= 1e-6 and interval == 1 else None
            rows.append(
                record(
                    "perf", "gpu_sync", f"delta bytes / full, lr {rate:g}, k {interval}", statistics.median(ratios),
                    "of a full snapshot", target=target, runs=ratios, command=command(), note=note,
                )
            )  # fmt: skip
    return rows


def trainer(model: Any, tokenizer: Any, rate: float) -> Iterator[None]:
    """An optimizer step a `next`: 32 worked answers, float32 weights, bfloat16 autocast on a GPU."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    device = next(model.parameters()).device
    made, number = count_task(), 0
    while True:
        rows: list[Tensor] = []
        for _ in range(32):
            item = made.make_item("count", "delta", number)
            number += 1
            rows.append(torch.tensor(tokenizer(f"{item.question}\n{item.worked}")["input_ids"]))
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=ids).logits[:, :-1]
        loss = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield


def clocked(action: Any) -> tuple[Any, float]:
    """Result and seconds."""
    started = time.perf_counter()
    result = action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - started


def remove(store: ObjectStore, prefix: str) -> None:
    """What was measured goes: 3 GB a repetition."""
    store.delete([info.key for info in store.list_after(prefix)])


def command() -> str:
    """Of this process, with the import path it needs."""
    return own_command().replace("PYTHONPATH=workloads ", "PYTHONPATH=workloads:tests ")


if __name__ == "__main__":
    main()
