"""Two ranks over a real S3 server: killed amid a publish they leave no snapshot that a reader cannot read."""

import os
import signal
import subprocess
import time

import pytest
import torch
from support.audit import audit
from support.fault_proxy import FaultProxy
from support.pids import children_of, wait_until_gone
from support.processes import TIMEOUT_SECONDS, Cluster, cluster, job_for

from tba.contracts.keys import WEIGHTS, WeightsKey
from tba.snapshots import SnapshotFetcher, fetch_manifest

RANKS = {"rank00000", "rank00001"}
SYNC = {"pollIntervalSeconds": 0.3, "delta": {"maxRatio": 1.0, "anchorEvery": 4}}


class Reader:
    """Follows `latest` as a searcher does, and reads each snapshot once more as one that joins."""

    def __init__(self, run: Cluster) -> None:
        self._run, self._follower = run, SnapshotFetcher()
        self.encodings: list[str] = []
        """Of what it read."""

    def read(self) -> int:
        """The newest snapshot; returns its version."""
        key = str(self._run.latest().manifest)
        followed, joined = self._follower(self._run.store, key).tensors, SnapshotFetcher()(self._run.store, key).tensors
        assert followed.keys() == joined.keys() and all(torch.equal(followed[n], joined[n]) for n in joined)
        manifest = fetch_manifest(self._run.store, key)
        assert {file.name.split("-")[1] for file in manifest.files} == RANKS
        self.encodings.append(manifest.encoding)
        return manifest.version

    def read_on(self, *, beyond: int) -> None:
        """One snapshot after another, until one of a version above `beyond`."""
        while (version := self.read()) <= beyond:
            self._run.wait_for(lambda latest: latest.version > version)


def unfinished(run: Cluster) -> set[str]:
    """Prefixes of weights without a manifest."""
    keys = [info.key for info in run.store.list_after(WEIGHTS)]
    whole = {WeightsKey.parse(key).prefix for key in keys if key.endswith("manifest.json")}
    return {WeightsKey.parse(key).prefix for key in keys} - whole


@pytest.fixture
def door(s3_server):
    """Through which all requests go, and may be held up."""
    with FaultProxy(s3_server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def run(tmp_path, s3_uri, s3_env, door):
    job = job_for(tmp_path, s3_uri, objective={"totalSteps": 1000}, sync=SYNC)
    with cluster(tmp_path, job, env={**s3_env, "AWS_ENDPOINT_URL_S3": door.endpoint}) as running:
        running.searcher()
        yield running


def awaited_part(run: Cluster, door: FaultProxy, trainer: subprocess.Popen[bytes]) -> int:
    """Hold up what rank 1 uploads next, until rank 0 waits for it; returns the process number of rank 1."""
    before = door.injected["stall"]
    door.add("stall", method="PUT", path="rank00001")
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while door.injected["stall"] == before:
        assert time.monotonic() < deadline, run.tail()
        time.sleep(0.05)
    (rank,) = children_of(trainer.pid)
    return rank


@pytest.mark.timeout(600)
def test_deltas_by_parts_are_read_on_through_the_loss_of_rank_0_and_of_another_amid_a_publish(run, door):
    first = run.trainer("snapshot.before_manifest=kill:12", TBA_TRAINER_RANKS="2")
    run.wait_for(lambda latest: latest.version >= 2)
    (rank,) = children_of(first.pid)
    reader = Reader(run)
    reader.read_on(beyond=8)
    assert first.wait(60) == -signal.SIGKILL, run.tail()
    wait_until_gone(rank)
    assert len(unfinished(run)) == 1, "all parts are there, and nothing names them"
    reader.read()

    second = run.trainer(TBA_TRAINER_RANKS="2")
    run.wait_for(lambda latest: latest.epoch == 2)
    reader.read_on(beyond=reader.read() + 2)
    os.kill(awaited_part(run, door, second), signal.SIGKILL)
    assert second.wait(15) == 1, run.tail()
    assert '"event": "rank_ended"' in run.log_of(second) and "SIGKILL" in run.log_of(second)
    door.clear()
    standing = reader.read()

    third = run.trainer(TBA_TRAINER_RANKS="2")
    run.wait_for(lambda latest: latest.epoch == 3)
    reader.read_on(beyond=standing + 6)
    assert run.stop(third) == [143], run.tail()
    assert set(reader.encodings) == {"full", "delta"}
    assert audit(run.store).doubled == set()


@pytest.mark.timeout(600)
def test_sigterm_while_rank_0_waits_for_a_part_that_cannot_be_uploaded_ends_all_ranks(run, door):
    trainer = run.trainer(TBA_TRAINER_RANKS="2")
    run.wait_for(lambda latest: latest.version >= 4)
    rank = awaited_part(run, door, trainer)
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(300) == 143, run.tail()
    wait_until_gone(rank)
    Reader(run).read()


@pytest.mark.timeout(600)
def test_sigterm_between_two_steps_while_a_part_is_uploaded_ends_all_ranks_and_leaves_a_checkpoint(
    tmp_path, s3_uri, s3_env, door
):
    job = job_for(tmp_path, s3_uri, objective={"totalSteps": 1000}, sync={**SYNC, "intervalSteps": 20})
    with cluster(tmp_path, job, env={**s3_env, "AWS_ENDPOINT_URL_S3": door.endpoint}) as run:
        run.searcher()
        trainer = run.trainer(TBA_TRAINER_RANKS="2")
        run.wait_for(lambda latest: latest.version >= 20)
        rank = awaited_part(run, door, trainer)
        assert run.stop(trainer, within_seconds=30) == [143], run.tail()
        wait_until_gone(rank)
        latest = run.latest()
        assert latest.step >= 40 > latest.version, "the checkpoint is newer than the weights"
