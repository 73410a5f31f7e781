"""Delta snapshots: bytes by learning rate and steps between publishes, encode and apply rates of one core, and the way
through a store against full snapshots of the same weights.

python tests/bench/bench_delta.py                            (synthetic weights and updates)
python tests/bench/bench_delta.py --model build/smollm2      (a real model, AdamW on real text)

Master weights start anywhere within the rounding interval of their bf16 value, as after long training: fresh from bf16
they lie in its middle, where small updates change next to nothing, and the deltas of the first steps would flatter.
"""

import argparse
import gzip
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from results import Row, record, table, write  # noqa: E402
from torch import Tensor  # noqa: E402

from tba.contracts.keys import WeightsKey, new_nonce  # noqa: E402
from tba.hashing import xxh3_128  # noqa: E402
from tba.models import weight_tensors  # noqa: E402
from tba.snapshots import SnapshotFetcher, delta, publish_snapshot  # noqa: E402
from tba.snapshots.encode import Base, EncodedDelta, encode_delta, tensor_bytes  # noqa: E402
from tba.snapshots.publish import publish_delta  # noqa: E402
from tba.store import ObjectStore, open_store  # noqa: E402
from tba.store.serve import EmbeddedServer  # noqa: E402

INTERVALS = (1, 2, 4)
TEXTS = Path(__file__).parents[2] / "examples" / "gsm8k" / "train.jsonl.gz"
Weights = dict[str, Tensor]


def synthetic(num_bytes: int, lr: float) -> Iterator[Weights]:
    """bf16 weights in SmolLM2-135M's layer shapes; each step moves every one by lr x a normal number, as Adam may."""
    generator = torch.Generator().manual_seed(0)
    shapes = itertools.cycle([(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)])
    master: Weights = {}
    while sum(t.numel() for t in master.values()) * 2 < num_bytes:
        master[f"w{len(master):04d}"] = torch.randn(next(shapes), generator=generator) * 0.02
    while True:
        yield {name: t.bfloat16() for name, t in master.items()}
        for t in master.values():
            t.add_(torch.randn(t.shape, generator=generator), alpha=lr)


def trained(folder: Path, lr: float, warm_steps: int) -> Iterator[Weights]:
    """A model under AdamW on a policy-gradient loss over texts with advantages of both signs, moments warmed up."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + (torch.rand(p.shape) - 0.5) * 2**-8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.0)
    with gzip.open(TEXTS, "rt", encoding="utf-8") as lines:
        texts = itertools.cycle([json.loads(line)["answer"] for line in itertools.islice(lines, 64)])
    for step in itertools.count():
        if step >= warm_steps:
            yield {n: t.to(torch.bfloat16, copy=True) for n, t in weight_tensors(model).items()}
        for sign in (1.0, -0.5):
            ids = torch.tensor([tokenizer(next(texts)).input_ids[:96]])
            (sign * model(input_ids=ids, labels=ids).loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def published(store: ObjectStore, tensors: Weights, made: EncodedDelta | None, version: int) -> tuple[str, float]:
    """Manifest key and seconds of a publish."""
    key, started = WeightsKey(version, 1, new_nonce()), time.perf_counter()
    if made is None:
        publish_snapshot(store, key, tensors, assets={}, parent=None, evaluation=None)
    else:
        publish_delta(store, key, made, parent=None, evaluation=None)
    return key.path, time.perf_counter() - started


def applied(old: Weights, made: EncodedDelta) -> float:
    """Seconds of one core to make the new weights in new memory and to hash them."""
    started = time.perf_counter()
    for entry in made.part.tensors:
        target = bytearray(tensor_bytes(old[entry.name]).data)
        delta.apply(target, tensor_bytes(made.part.blobs[entry.name]).data, old[entry.name].itemsize)
        assert xxh3_128(target) == entry.hash
    return time.perf_counter() - started


def measure(store: ObjectStore, source: Iterator[Weights], lr: float, repetitions: int, note: str) -> list[Row]:
    """Rows of one learning rate: every delta is made from the weights of step 0."""
    steps = list(itertools.islice(source, max(INTERVALS) + 1))
    old, size = steps[0], sum(t.nbytes for t in steps[0].values())
    key = WeightsKey(0, 1, new_nonce())
    manifest = publish_snapshot(store, key, old, assets={}, parent=None, evaluation=None)
    base = Base(key.path, manifest, old)
    rows = []
    for k in INTERVALS:
        new = steps[k]
        changed = sum(int((old[n] != new[n]).sum()) for n in new) / (size / 2)
        made, encodes, applies = None, [], []
        for _ in range(repetitions):
            started = time.perf_counter()
            made = encode_delta(base, new, max_bytes=size, num_threads=1)
            encodes.append(time.perf_counter() - started)
            assert made is not None
            applies.append(applied(old, made))
        assert made is not None
        name, about = f"lr {lr:g}, k={k}", f"{changed:.2%} of elements changed; {note}"
        target = "<= 0.1" if lr <= 1e-6 and k == 1 else None
        rows.append(
            record("perf", "delta", f"bytes, {name}", made.num_bytes, "B", baseline=("full", size), target=target,
                   note=about)
        )  # fmt: skip
        for what, times in (("encode", encodes), ("apply", applies)):
            rates = [size / 1e6 / t for t in times]
            rows.append(
                record("perf", "delta", f"{what}, {name}", statistics.median(rates), "MB/s a core", runs=rates,
                       note=f"of model bytes, hashing included; {about}")
            )  # fmt: skip
        if k == 1:
            rows.append(through_store(store, base, new, repetitions, name, about))
    return rows


def through_store(store: ObjectStore, base: Base, new: Weights, repetitions: int, name: str, about: str) -> Row:
    """Encode, publish and fetch onto the held base, against publish and fetch in full."""
    fulls, deltas = [], []
    for version in range(1, repetitions + 1):
        fetcher = SnapshotFetcher()
        fetcher(store, base.key)
        started = time.perf_counter()
        made = encode_delta(base, new, max_bytes=float("inf"))
        spent = time.perf_counter() - started
        key, seconds = published(store, new, made, version)
        started = time.perf_counter()
        fetcher(store, key)
        deltas.append(spent + seconds + time.perf_counter() - started)
        key, seconds = published(store, new, None, version)
        started = time.perf_counter()
        SnapshotFetcher()(store, key)
        fulls.append(seconds + time.perf_counter() - started)
    return record(
        "perf", "delta", f"publish -> fetched, {name}", statistics.median(deltas), "s", runs=deltas,
        baseline=("full snapshot", statistics.median(fulls)), note=f"embedded S3 server on this machine; {about}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a model to train; default: synthetic weights")
    parser.add_argument("--megabytes", type=float, default=64, help="size of synthetic weights")
    parser.add_argument("--warm-steps", type=int, default=8, help="optimizer steps before the first snapshot")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5], help="learning rates")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    rows: list[Row] = []
    with TemporaryDirectory() as folder, EmbeddedServer(Path(folder)) as server:
        os.environ.update(server.env)
        for lr in options.rates:
            store = open_store(f"s3://{server.bucket}/bench/{lr:g}")
            if options.model:
                source = trained(options.model, lr, options.warm_steps)
                note = f"{options.model.name}, AdamW, {options.warm_steps} warm-up steps"
            else:
                source = synthetic(int(options.megabytes * 1e6), lr)
                note = f"synthetic, {options.megabytes:g} MB, each step lr x normal"
            rows += measure(store, source, lr, options.repetitions, note)
            store.close()
    print(table(rows))
    if options.output:
        write(rows, options.output)


if __name__ == "__main__":
    main()
