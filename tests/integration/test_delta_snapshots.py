"""Delta snapshots through a real S3 server, published by real processes that get killed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.processes import cluster, job_for
from support.weights_chain import Chain, moving_weights, same

from tba.contracts.config import Delta, Engine
from tba.contracts.errors import CorruptObject
from tba.contracts.keys import LATEST, WeightsKey
from tba.contracts.records import Latest, RunState
from tba.protocol.garbage import Retention
from tba.report.history import read_history
from tba.shards import decode_shard
from tba.snapshots import SnapshotFetcher, fetch_snapshot
from tba.store import ObjectStore
from tba.trainer.committer import Committer
from tba.trainer.garbage import Sweeper
from tba.trainer.publish import Published, Publisher

ROOT = Path(__file__).parents[2]
CHILD = """
import sys
from support.weights_chain import moving_weights
from tba.contracts.config import Delta, Engine
from tba.store import open_store
from tba.trainer.committer import Committer
from tba.trainer.publish import Publisher

store = open_store(sys.argv[1])
publisher = Publisher(
    store, Committer.take_over(store), assets={"config.json": b"{}"}, delta=lambda: Delta(max_ratio=1.0),
    give_up_seconds=60.0, on_published=lambda done: print("PUBLISHED", done.row.encoding, flush=True),
)
for version in range(5):
    publisher.publish(moving_weights(version), version=version, epoch=1, evaluation=None, stage_seconds=0.0)
    publisher.background.join()
"""


def latest(store: ObjectStore) -> Latest:
    return Latest.parse(store.get(LATEST).data)


@pytest.mark.parametrize("point", ["snapshot.after_data", "snapshot.before_manifest", "commit.before_cas"])
def test_a_trainer_killed_while_it_publishes_a_delta_leaves_the_snapshot_before_it_and_the_next_one_anchors(
    s3_store, s3_env, point
):
    env = {
        **os.environ, **s3_env, "PYTHONPATH": f"{ROOT / 'workloads'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1",
        # the take-over is the first commit
        "TBA_FAILPOINTS": f"{point}=kill:{5 if point == 'commit.before_cas' else 4}",
    }  # fmt: skip
    child = subprocess.run(
        [sys.executable, "-c", CHILD, s3_store.uri], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert re.findall("PUBLISHED (.*)", child.stdout) == ["full", "delta", "delta"]
    named = latest(s3_store)
    assert named.version == 2
    searcher = SnapshotFetcher()
    assert same(searcher(s3_store, str(named.manifest)).tensors, 2)

    committer, done = Committer.take_over(s3_store), list[Published]()
    publisher = Publisher(
        s3_store, committer, assets={"config.json": b"{}"}, delta=lambda: Delta(max_ratio=1.0), give_up_seconds=60.0,
        on_published=done.append,
    )  # fmt: skip
    for version in (2, 3, 4):
        publisher.publish(
            moving_weights(version), version=version, epoch=committer.epoch, evaluation=None, stage_seconds=0.0
        )
        assert publisher.background.join(60.0)
        assert same(searcher(s3_store, done[-1].key).tensors, version)
    assert [d.row.encoding for d in done] == ["full", "delta", "delta"]

    Sweeper(s3_store, committer).sweep(Retention(1, None, 0, 1, 0.0))
    left = {WeightsKey.parse(i.key) for i in s3_store.list_after("weights/")}
    assert {(k.epoch, k.version) for k in left} == {(1, 0), (2, 2), (2, 3), (2, 4)}, "version 0, and the living chain"
    assert same(fetch_snapshot(s3_store, str(latest(s3_store).manifest)).tensors, 4)


def test_damage_and_loss_in_the_bucket_are_noticed_and_the_next_anchor_heals(store):
    chain = Chain(store)
    keys = chain.up_to(3)
    follower, joiner = SnapshotFetcher(), SnapshotFetcher()
    assert same(follower(store, keys[1]).tensors, 1)
    (data,) = [i.key for i in store.list_after(WeightsKey.parse(keys[3]).prefix) if i.key != keys[3]]
    good = store.get(data).data
    store.delete([data])
    store.put_once(data, good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(CorruptObject, match="the bytes were changed"):
        follower(store, keys[3])
    assert same(joiner(store, keys[3]).tensors, 2), "who has nothing takes what can be read"
    assert same(follower(store, keys[2]).tensors, 2)
    store.delete([keys[2]])
    with pytest.raises(CorruptObject, match="missing"):
        SnapshotFetcher()(store, keys[3])
    anchor = chain.full(4)
    for reader in (follower, joiner):
        assert same(reader(store, anchor).tensors, 4)
    last = chain.delta(5)
    assert same(follower(store, last).tensors, 5)


def test_tensors_of_several_blocks_travel_as_deltas_of_few_bytes(s3_store):
    generator = torch.Generator().manual_seed(0)
    old = {f"w{i}": torch.randn(2_500_000, generator=generator).bfloat16() for i in range(3)}
    committer, done = Committer.take_over(s3_store), list[Published]()
    publisher = Publisher(s3_store, committer, assets={}, delta=Delta, give_up_seconds=60.0, on_published=done.append)
    new = {n: torch.where(torch.rand(t.shape, generator=generator) < 0.01, t * 1.01, t) for n, t in old.items()}
    fetcher = SnapshotFetcher()
    for version, tensors in enumerate((old, new)):
        publisher.publish(tensors, version=version, epoch=1, evaluation=None, stage_seconds=0.0)
        assert publisher.background.join(60.0)
        found = fetcher(s3_store, done[-1].key).tensors
        assert all(torch.equal(found[n], t) for n, t in tensors.items())
    assert [d.row.encoding for d in done] == ["full", "delta"]
    assert done[1].row.total_bytes < 0.05 * done[0].row.total_bytes


@pytest.mark.timeout(400)
def test_a_whole_run_on_deltas_survives_a_kill_between_a_deltas_data_and_its_manifest(tmp_path, s3_uri, s3_env):
    job = job_for(
        tmp_path, s3_uri, model={"dtype": "bfloat16"}, objective={"totalSteps": 24, "learningRate": 1e-4},
        sync={"intervalSteps": 2, "pollIntervalSeconds": 0.1, "delta": {"maxRatio": 1.0, "anchorEvery": 4}},
        storage={"checkpoints": {"everySteps": 6}}, buffer={"maxReplayRatio": 1.0},
    )  # fmt: skip
    engine = Engine(type="transformers")
    searcher = job.spec.searcher.model_copy(update={"engine": engine})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"searcher": searcher})})
    with cluster(tmp_path, job, env=s3_env) as run:
        cache = str(tmp_path / "cache")
        searchers = [run.searcher(f"searcher-{i}", TBA_WEIGHTS_CACHE=cache) for i in range(2)]
        # Version 0 is the first, 2, 4 and 6 are deltas on it.
        assert run.trainer("snapshot.before_manifest=kill:4").wait(120) == -signal.SIGKILL, run.tail()
        assert run.trainer().wait(200) == 0, run.tail()
        assert latest(run.store).state is RunState.COMPLETE
        assert all(searcher.poll() is None for searcher in searchers)
        publishes = read_history(run.store).publishes
        kinds = {epoch: [p.encoding for p in publishes if p.epoch == epoch] for epoch in (1, 2)}
        assert kinds[1] == ["full", "delta", "delta"][: len(kinds[1])]
        assert kinds[2][:6] == ["full", "delta", "delta", "delta", "full", "delta"]
        manifests = [i.key for i in run.store.list_after("weights/") if i.key.endswith("/manifest.json")]
        by_version = {WeightsKey.parse(key).version: fetch_snapshot(run.store, key) for key in manifests}
        assert all(snapshot.assets for snapshot in by_version.values())
        used = {
            (span.epoch, span.version)
            for info in run.store.list_after("shards/")
            for batch in [decode_shard(run.store.get(info.key).data, run_id=None)]
            for row in map(batch.row, range(len(batch)))
            for span in row.spans
        }
        deltas = {(p.epoch, p.version) for p in publishes if p.encoding == "delta"}
        assert used & deltas, "searchers sampled from weights that came as deltas"
        assert not any("snapshot_rejected" in run.log_of(searcher) for searcher in searchers)
        assert any((tmp_path / "cache").glob("*.weights"))
