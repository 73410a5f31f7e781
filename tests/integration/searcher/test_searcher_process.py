"""The real process over a directory or an S3 server: it needs the bucket and nothing else."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_models import save_tiny

from tba.contracts.config import (
    LiveConfig,
    Model,
    Prompts,
    Reward,
    RunConfig,
    Sampling,
    SearcherSettings,
    Storage,
    Task,
)
from tba.contracts.keys import LATEST, RUN, WeightsKey, new_nonce, prompts_key
from tba.contracts.records import EvalRequest, Latest, RunRecord
from tba.evaluation import decode_block
from tba.models import LoadedModel, load_model, weight_tensors
from tba.prompts import materialize
from tba.scoring import Scorer
from tba.shards import ShardBatch, decode_shard
from tba.snapshots import fetch_manifest, publish_snapshot
from tba.snapshots.encode import Base, encode_delta
from tba.snapshots.publish import publish_delta
from tba.store import ObjectStore, open_store

SAMPLES = 4


def make_run(root: Path, uri: str | None = None) -> tuple[ObjectStore, LoadedModel, RunRecord]:
    """A bucket as a trainer leaves it after publishing version 0."""
    save_tiny(root / "model", tied=True)
    (root / "p.jsonl").write_text(
        "".join(json.dumps({"question": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(8))
    )
    model = Model(uri="file://model", dtype="float32", max_model_len=40)
    prompts = Prompts(uri="file://p.jsonl", chat_template="off")
    loaded = load_model(model, base_dir=root)
    sha, data = materialize(prompts, loaded.tokenizer, base_dir=root, max_prompt_tokens=20)
    store = open_store(uri or f"file://{root / 'store'}")
    store.put_once(prompts_key(sha), data)
    task = Task(prompts=prompts, reward=Reward(name="arithmetic"), sampling=Sampling(max_tokens=12))
    live = LiveConfig(storage=Storage(uri=store.uri), searcher=SearcherSettings(samples_per_prompt=SAMPLES))
    record = RunRecord(
        run_id=new_nonce(), owner="default/test", config=RunConfig(model=model, task=task), model_revision="r",
        train_prompts=prompts_key(sha), live=live,
    )  # fmt: skip
    store.put_once(RUN, record.to_json())
    return store, loaded, record


def publish(store: ObjectStore, loaded: LoadedModel, version: int, *, request: EvalRequest | None = None) -> WeightsKey:
    key = WeightsKey(version, 1, new_nonce())
    tensors = {n: t.clone() for n, t in weight_tensors(loaded.model).items()}
    publish_snapshot(store, key, tensors, assets=loaded.assets if version == 0 else {}, parent=None, evaluation=request)
    announce(store, key, request=request)
    return key


def publish_onto(store: ObjectStore, loaded: LoadedModel, version: int, base: Base) -> Base:
    """A delta, visible at once. Returns what the next one may build on."""
    key = WeightsKey(version, 1, new_nonce())
    tensors = {n: t.clone() for n, t in weight_tensors(loaded.model).items()}
    encoded = encode_delta(base, tensors, max_bytes=float("inf"))
    assert encoded is not None
    manifest = publish_delta(store, key, encoded, parent=base.key, evaluation=None)
    announce(store, key)
    return Base(key.path, manifest, tensors)


def announce(store: ObjectStore, key: WeightsKey, *, request: EvalRequest | None = None) -> None:
    """Make `latest` name a snapshot."""
    try:
        old = store.get(LATEST)
        commit, etag = Latest.model_validate_json(old.data).commit + 1, old.etag
    except KeyError:
        commit, etag = 1, None
    body = Latest(
        commit=commit, epoch=1, version=key.version, step=key.version, manifest=key.path, nonce=new_nonce(),
        evaluation=key.path if request else None,
    )  # fmt: skip
    store.cas(LATEST, body.to_json(), etag)


def shards(store: ObjectStore, record: RunRecord) -> list[ShardBatch]:
    return [decode_shard(store.get(i.key).data, run_id=record.run_id) for i in store.list_after("shards/")]


def newest(store: ObjectStore, record: RunRecord) -> int:
    """Oldest-span version of the last row of the last shard."""
    info = list(store.list_after("shards/"))[-1]
    return int(decode_shard(store.get(info.key).data, run_id=record.run_id).policies()[1][-1])


def wait_for(process: subprocess.Popen, condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the searcher ended"
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.5)


def log_probability_errors(loaded: LoadedModel, batches: list[ShardBatch], version: int) -> list[float]:
    """Of the sums of the first 64 responses sampled by `version` alone."""
    rows = [r for b in batches for r in map(b.row, range(len(b)))]
    rows = [r for r in rows if {s.version for s in r.spans} == {version}][:64]
    scorer = Scorer(loaded.model, temperature=1.0)
    with torch.no_grad():
        pairs = scorer.pack([np.array(r.prompt_tokens) for r in rows], [np.array(r.response_tokens) for r in rows])
        own = scorer.sequence_logprobs(pairs)
    recorded = np.array([sum(r.sampler_logprobs or [np.nan]) for r in rows])
    return np.abs(own.numpy() - recorded).tolist()


@pytest.mark.timeout(280)
def test_a_searcher_that_knows_the_bucket_alone_follows_weights_evaluates_and_ends_on_sigterm(tmp_path):
    store, loaded, record = make_run(tmp_path)
    request = EvalRequest(prompts=record.train_prompts, num_prompts=8, block_prompts=3, sampling="greedy", samples=1)
    first = publish(store, loaded, 0, request=request)
    env = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": "workloads"}
    command = [sys.executable, "-m", "tba.cli", "searcher", "--storage", store.uri, "--name", "searcher-0"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        blocks = f"eval/{0:010d}/{1:06d}-{first.nonce}/"
        wait_for(
            process, lambda: len(list(store.list_after(blocks))) == 3 and len(list(store.list_after("shards/"))) > 1
        )
        rows = [r for i in store.list_after(blocks) for r in decode_block(store.get(i.key).data).rows]
        assert sorted(r.prompt_id for r in rows) == list(range(8))
        before = log_probability_errors(loaded, shards(store, record)[:2], 0)
        assert before and max(before) < 1e-4
        with torch.no_grad():
            for tensor in weight_tensors(loaded.model).values():
                tensor.mul_(1.1)
        publish(store, loaded, 2)
        wait_for(process, lambda: newest(store, record) == 2)
        after = log_probability_errors(loaded, shards(store, record)[-2:], 2)
        assert after and max(after) < 1e-4
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    finally:
        process.kill()
        process.wait()
        print((tmp_path / "log").read_text()[-3000:])
    visits: dict[int, int] = {}
    for batch in shards(store, record):
        assert batch.header.searcher == "searcher-0"
        for visit in batch.visits.tolist():
            visits[visit] = visits.get(visit, 0) + 1
    assert set(visits.values()) == {SAMPLES}
    print(f"max |delta log p| {max(before + after):.1e} over {len(before + after)} responses")


def moved(loaded: LoadedModel, share: float) -> None:
    """Change about a tenth of the weights."""
    generator = torch.Generator().manual_seed(round(share * 1000))
    with torch.no_grad():
        for tensor in weight_tensors(loaded.model).values():
            chosen = torch.rand(tensor.shape, generator=generator) < 0.1
            tensor.copy_(torch.where(chosen, tensor * share, tensor))


@pytest.mark.timeout(280)
def test_a_searcher_follows_deltas_and_a_damaged_one_costs_it_nothing_but_that_version(tmp_path, s3_uri, s3_env):
    store, loaded, record = make_run(tmp_path, s3_uri)
    first = publish(store, loaded, 0)
    weights = {n: t.clone() for n, t in weight_tensors(loaded.model).items()}
    base = Base(first.path, fetch_manifest(store, first.path), weights)
    env = {**os.environ, **s3_env, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": "workloads"}
    command = [sys.executable, "-m", "tba.cli", "searcher", "--storage", store.uri, "--name", "searcher-0"]
    text = tmp_path / "log"
    with text.open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        wait_for(process, lambda: list(store.list_after("shards/")) and newest(store, record) == 0)
        for version in (2, 4):  # a delta on the anchor and one on the delta
            moved(loaded, 1.0 + version / 20)
            base = publish_onto(store, loaded, version, base)
            wait_for(process, lambda version=version: newest(store, record) == version)
        errors = log_probability_errors(loaded, shards(store, record)[-2:], 4)
        assert errors and max(errors) < 1e-4
        moved(loaded, 1.5)
        damaged = WeightsKey(6, 1, new_nonce())
        encoded = encode_delta(base, dict(weight_tensors(loaded.model)), max_bytes=float("inf"))
        assert encoded is not None
        publish_delta(store, damaged, encoded, parent=base.key, evaluation=None)
        (data,) = [i.key for i in store.list_after(damaged.prefix) if i.key != damaged.path]
        flipped = bytearray(store.get(data).data)
        flipped[-3] ^= 4
        store.delete([data])
        store.put_once(data, flipped)
        announce(store, damaged)
        wait_for(process, lambda: "the bytes were changed" in text.read_text())
        before = len(list(store.list_after("shards/")))
        wait_for(process, lambda: len(list(store.list_after("shards/"))) > before + 1)
        assert newest(store, record) == 4, "it goes on with what it has"
        publish(store, loaded, 8)
        wait_for(process, lambda: newest(store, record) == 8)
        errors = log_probability_errors(loaded, shards(store, record)[-2:], 8)
        assert errors and max(errors) < 1e-4
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    finally:
        process.kill()
        process.wait()
        print(text.read_text()[-3000:])
    rows = [batch.row(i) for batch in shards(store, record) for i in range(len(batch))]
    assert {span.version for row in rows for span in row.spans} == {0, 2, 4, 8}
