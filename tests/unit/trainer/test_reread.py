"""Reading a buffer's rows again: what is gone or rotten costs its rows, is explained, and nothing is read far ahead."""

import pytest
from support.learning import INCARNATION, RUN, feed, live_config, make_learner, make_shard
from support.memory_store import MemoryStore

from tba.contracts.errors import StoreUnavailable
from tba.contracts.keys import ShardKey
from tba.contracts.records import Lineage, ShardId
from tba.shards import encode_shard
from tba.trainer import ingest
from tba.trainer.ingest import Binding
from tba.trainer.reread import ShardReader

BINDING = Binding(run_id=RUN, num_prompts=4, vocabulary=40)


def path(seq: int) -> str:
    return ShardKey(1, "searcher-0", INCARNATION, seq).path


def shard(seq: int) -> ShardId:
    return ShardId(INCARNATION, seq)


def stored(*seqs: int) -> MemoryStore:
    store = MemoryStore()
    for seq in seqs:
        batch = make_shard(seq)
        store.put_once(path(seq), encode_shard(batch.header, [batch.row(i) for i in range(len(batch))]))
    return store


def reader(store, *seqs: int) -> ShardReader:
    return ShardReader(store, BINDING, {INCARNATION: [[seq, path(seq)] for seq in seqs]}, Lineage())


@pytest.mark.parametrize(("harm", "reason"), [("delete", "gone"), ("flip", ":"), ("unlisted", "does not say where")])
def test_a_resumed_learner_goes_on_without_the_rows_of_a_shard_that_cannot_be_read(harm, reason):
    learner = make_learner()
    feed(learner, make_shard(0), make_shard(1, prompts=(0, 1, 2)), make_shard(2))
    learner.train_step(live_config(), epoch=1)
    store, listed = stored(0, 1, 2), [0, 1, 2]
    if harm == "delete":
        del store.objects[path(1)]
    elif harm == "flip":
        data = bytearray(store.objects[path(1)].data)
        data[len(data) // 2] ^= 1
        store.objects[path(1)].data = bytes(data)
    else:
        listed.remove(1)
    held = [
        t.seq for rows in map(learner.buffer.prompts.members, range(4)) for t in learner.buffer.trajectory_ids(rows)
    ]
    twins = []
    for _ in range(2):
        twin, reading = make_learner(learner.config, seed=99), reader(store, *listed)
        missing = twin.restore(learner.state(), learner.step, reading)
        (lost,) = reading.lost(missing)
        assert lost.num_rows == held.count(1) > 0 and reason in lost.reason
        assert lost.key == (path(1) if harm != "unlisted" else f"{INCARNATION}/1")
        assert len(twin.buffer) == len(learner.buffer) - lost.num_rows
        assert twin.buffer.shards() == {shard(0), shard(2)}
        twins.append(twin)
    losses = [[t.train_step(live_config(), epoch=2).loss for _ in range(5)] for t in twins]
    assert losses[0] == losses[1], "what goes is the same every time"
    assert set(twins[0].state().facts["shard_paths"][INCARNATION][i][0] for i in range(2)) == {0, 2}


def test_storage_that_does_not_answer_costs_no_rows_but_the_attempt():
    class Down(MemoryStore):
        def get(self, key):
            raise StoreUnavailable("no answer")

    with pytest.raises(StoreUnavailable):
        list(reader(Down(), 0)([shard(0)]))


def test_shards_are_read_at_most_so_far_ahead_of_the_buffer(monkeypatch):
    monkeypatch.setattr("tba.trainer.reread.READ_AHEAD", 4)
    seqs = range(12)
    store = stored(*seqs)
    reading = reader(store, *seqs)([shard(seq) for seq in seqs])
    for taken, rows in enumerate(reading, start=1):
        assert rows.shard == shard(taken - 1)
        assert store.count("get") <= taken + 4
    assert store.count("get") == 12 and ingest.READ_AHEAD < 100
