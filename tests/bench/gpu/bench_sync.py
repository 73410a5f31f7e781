"""Weights from trainer to engine through a real store: full snapshots, and deltas by learning rate and interval.

    stage ─► publish (serialise, hash, upload, manifest) ─► fetch (download, verify) ─► engine.load
    limit of the link: the same bytes put as plain objects and read into a buffer, in the same run

Each `--what` in a process of its own: two vLLM engines in one crash when the second captures its CUDA graphs.

Deltas: AdamW steps on real gradients (worked answers of `count`) after a warm-up of the moments, encoded as a trainer
does. A random model gives no meaningful deltas: of its shape only full snapshots are measured.

PYTHONPATH=workloads:tests python tests/bench/gpu/bench_sync.py --model FOLDER [--store s3] [--engine vllm] [-o FILE]
PYTHONPATH=workloads:tests python tests/bench/gpu/bench_sync.py --rehearse
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bench.gpu.places import count_task, flags, in_child, tiny_start
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
PASSED_ON = ("model", "store", "folder", "engine", "utilization", "repetitions", "learning_rates", "intervals")
Found = dict[str, Any]
"""What a part measured: seconds by name, bytes."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model whose deltas are measured")
    parser.add_argument(
        "--what",
        nargs="+",
        default=["model", "deltas", "1.5b"],
        help="full snapshots of the model, its deltas, full snapshots of a random model",
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
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.rehearse:
            options.model = tiny_start(Path(folder) / "start") / "start"
            options.what, options.engine, options.repetitions = ["model", "deltas", "tiny"], "transformers", 2
            options.intervals, options.learning_rates = [1, 2], [1e-6, 1e-3]
        if options.model is None:
            parser.error("name --model, or --rehearse")
        if options.part:
            with opened(options, Path(folder)) as store:
                options.result.write_text(json.dumps(measure(options, store)))
            return
        rows: list[Row] = []
        for what in options.what:  # written after each, so that a sitting cut short leaves what it measured
            rows += rows_of(options, what, in_child([__file__, "--part", what, *flags(options, PASSED_ON)]))
            if options.output:
                write(rows, options.output)
    print(table(rows))


@contextmanager
def opened(options: argparse.Namespace, folder: Path) -> Iterator[ObjectStore]:
    """The store: a directory, or a bucket of a server of our own."""
    if options.store == "file":
        yield open_store(f"file://{folder / 'store'}")
        return
    from tba.store.serve import EmbeddedServer

    with EmbeddedServer(folder / "server") as server:
        os.environ.update(server.env)
        yield open_store("s3://tba/bench", endpoint=server.endpoint)


def measure(options: argparse.Namespace, store: ObjectStore) -> list[Found]:
    """One part."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.part not in ("model", "deltas"):
        made = random_model(options.part, device=device, dtype=torch.bfloat16)
        return [measure_full(options, store, made, random_assets(options.part, options.model))]
    loaded = load(options.model, max_model_len=MAX_MODEL_LEN, dtype="bfloat16")
    model = loaded.model.to(device)
    if options.part == "model":
        return [measure_full(options, store, model, loaded.assets)]
    return measure_deltas(options, store, model, loaded)


def rows_of(options: argparse.Namespace, what: str, found: list[Found]) -> list[Row]:
    """Rows for docs/results of one part."""
    if what == "deltas":
        return [delta_row(one) for one in found]
    return [full_row(options, options.model.name if what == "model" else what, one) for one in found]


def measure_full(options: argparse.Namespace, store: ObjectStore, model: Any, assets: Mapping[str, bytes]) -> Found:
    """Publish, fetch, swap: seconds of each, and of the link itself."""
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
    return {"parts": parts, "bytes": total}


def full_row(options: argparse.Namespace, name: str, found: Found) -> Row:
    """Publish to swapped, against the link's own speed."""
    parts, total = found["parts"], found["bytes"]
    runs = [p + f + s for p, f, s in zip(parts["publish"], parts["fetch"], parts["load"], strict=True)]
    medians = {what: statistics.median(v) for what, v in parts.items()}
    note = (
        f"{total / 1e9:.2f} GB, store {options.store}, engine {options.engine}: "
        + ", ".join(f"{what} {took:.3f} s" for what, took in medians.items() if what != "link")
        + f"; the link, put and get: {2 * total / medians['link'] / 1e9:.2f} GB/s"
    )
    return record(
        "perf", "gpu_sync", f"{name}: full snapshot, publish to swapped", statistics.median(runs), "s",
        baseline=("the link", medians["link"]), target="<= 1.5", runs=runs, command=command(), note=note,
    )  # fmt: skip


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


def measure_deltas(options: argparse.Namespace, store: ObjectStore, model: Any, loaded: Any) -> list[Found]:
    """Bytes of a delta over those of a full snapshot, by learning rate and interval."""
    start = {n: t.detach().clone() for n, t in model.state_dict().items()}
    found: list[Found] = []
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
            times = {"encode": encode, "fetch": fetch}
            found.append({"rate": rate, "interval": interval, "bytes": full, "ratios": ratios, **times})
    return found


def delta_row(found: Found) -> Row:
    """Bytes of a delta over those of a full snapshot, of one rate and interval."""
    rate, interval = found["rate"], found["interval"]
    note = (
        f"{found['bytes'] / 1e9:.2f} GB full; encode {statistics.median(found['encode']):.3f} s, fetch and apply "
        f"{statistics.median(found['fetch']):.3f} s; AdamW after {WARM_UP_STEPS} steps on worked answers"
    )
    return record(
        "perf", "gpu_sync", f"delta bytes / full, lr {rate:g}, k {interval}", statistics.median(found["ratios"]),
        "of a full snapshot", target="<= 0.1" if rate <= 1e-6 and interval == 1 else None, runs=found["ratios"],
        command=command(), note=note,
    )  # fmt: skip


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
