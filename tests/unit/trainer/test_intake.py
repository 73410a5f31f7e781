from types import SimpleNamespace

import numpy as np
from support.learning import live_config, make_learner, make_shard

from tba import telemetry
from tba.contracts.keys import ShardKey
from tba.contracts.records import ShardId
from tba.protocol.bookkeeping import Bookkeeping
from tba.trainer.checkpoint import LoopFacts
from tba.trainer.ingest import Arrival
from tba.trainer.intake import Intake

FAILED = 1
OUTCOMES = ("ingested", "duplicate", "failed", "quarantined")


def counted() -> dict[str, float]:
    return {name: telemetry.TRAJECTORIES.labels(name)._value.get() for name in OUTCOMES}


def arrival(seq: int, batch=None) -> Arrival:
    key = ShardKey(1, "searcher-0", "a" * 32, seq)
    return Arrival(key.path, ShardId(key.incarnation, seq), batch, "" if batch is not None else "damaged", 1)


def test_rows_are_counted_by_what_became_of_them():
    learner = make_learner()
    again, broken = make_shard(1, seed=1), make_shard(2)
    again.response_tokens[:] = 4  # equal but for their lengths, of which there are eight
    broken.outcomes[:3] = FAILED
    broken.rewards[:3] = float("nan")
    arrivals = [arrival(1, again), arrival(2, broken), arrival(3)]
    source = SimpleNamespace(take=lambda _: arrivals, ingested=lambda _: None)
    report = SimpleNamespace(delivered=lambda _: None, quarantined=lambda *_: None)
    journal = SimpleNamespace(append=lambda _: None)
    intake = Intake(
        learner, source, journal, report, facts=LoopFacts(version0=None), begun_with=live_config(), live=live_config
    )
    before = counted()
    intake.take(Bookkeeping.begun(1), waiting=False)
    change = {name: value - before[name] for name, value in counted().items()}
    equal = sum(24 // 4 - len(set(lengths)) for lengths in np.diff(again.response_offsets).reshape(4, 6).tolist())
    assert equal > 0 and change == {"ingested": 48, "duplicate": equal, "failed": 3, "quarantined": 1}


def test_rows_that_come_after_a_resume_in_a_wait_join_the_pool_of_that_wait():
    learner, journal = make_learner(), SimpleNamespace(append=lambda _: None)
    report = SimpleNamespace(delivered=lambda _: None)
    live = live_config()
    live = live.model_copy(update={"sync": live.sync.model_copy(update={"ingest": "AtSync"})})
    book, carried = Bookkeeping.begun(1), []
    for seq in (1, 2, 3):  # each time the trainer has been stopped in the same wait
        source = SimpleNamespace(take=lambda _, seq=seq: [arrival(seq, make_shard(seq))], ingested=lambda _: None)
        facts = LoopFacts(version0=None, carried=carried)
        intake = Intake(learner, source, journal, report, facts=facts, begun_with=live, live=lambda: live)
        book = intake.take(book, waiting=True)
        carried = intake.open_entries
    assert learner.sampler.state()["sync"] == (0, learner.buffer.complete_visits)
    assert [entry.extended for entry in carried if entry.synced] == [False, True, True]
