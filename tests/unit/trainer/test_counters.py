"""What the trainer counts over the life of a run, and that a checkpoint gives it back."""

import json
from dataclasses import replace

import numpy as np
from support.learning import INCARNATION, make_shard

from tba.contracts.records import FinishReason, Outcome, ShardHeader, Span, Trajectory
from tba.shards.batch import ShardBatch, from_rows
from tba.trainer.colocated import NAME as COLOCATED
from tba.trainer.counters import FORGET_SECONDS, RECENT_POLICIES, Counters
from tba.trainer.progress import Tracker


def shard(seq: int, lengths: list[int], rewards: list[float | None], *, version: int = 0, searcher="s-0") -> ShardBatch:
    """One row a length; a reward of None is a failed row."""
    rows = [
        Trajectory(
            prompt_id=0,
            visit=seq,
            visit_size=len(lengths),
            prompt_tokens=[1],
            response_tokens=[5] * length,
            outcome=Outcome.FAILED if reward is None else Outcome.SCORED,
            reward=reward,
            finish_reason=FinishReason.STOP,
            spans=[Span(length, 1, version)],
            temperature=1.0,
            created_at=0.0,
        )
        for length, reward in zip(lengths, rewards, strict=True)
    ]
    incarnation = f"{int(searcher[-1]):032x}"
    stats = {"generated": 10.0 * (seq + 1)}
    header = ShardHeader(
        run="f" * 32, searcher=searcher, incarnation=incarnation, seq=seq, reward_version="v", stats=stats
    )
    return from_rows(header, rows)


def busy() -> Counters:
    counters = Counters()
    counters.ingested(shard(0, [2, 3], [1.0, 0.0]), now=100.0)
    counters.ingested(shard(1, [2, 4, 5], [0.5, None, 1.0], version=3), now=130.0)
    counters.ingested(shard(0, [7], [0.0], searcher="s-1"), now=150.0)
    counters.trained_rows, counters.trained_tokens = 8, 21
    counters.duplicate_rows, counters.failed_rows, counters.quarantined_shards = 1, 1, 2
    counters.wall_seconds = 12.5
    counters.trained_lengths.update([2, 2, 7])
    return counters


def test_ingested_rows_are_counted_by_hand():
    counters = busy()
    assert (counters.ingested_rows, counters.generated_tokens) == (6, 2 + 3 + 2 + 4 + 5 + 7)
    assert counters.generated_lengths == {2: 2, 3: 1, 5: 1, 7: 1}, "a failed row has no length"
    rows = {row.searcher: row for row in counters.take_searcher_rows(epoch=2, step=9, now=200.0)}
    first, second = rows["s-0"], rows["s-1"]
    assert (first.shards, first.rows, first.tokens, first.versions, first.newest_version) == (2, 5, 16, 2, 3)
    assert (first.failed, second.failed) == (1, 0)
    assert (first.first_seen, first.last_seen, first.stats) == (100.0, 130.0, {"generated": 20.0})
    assert (second.shards, second.rows, second.newest_version, second.epoch, second.step) == (1, 1, 0, 2, 9)


def test_an_older_shard_that_comes_late_takes_no_counter_of_its_searcher_back():
    counters = Counters()
    for seq, up_seconds in ((0, 10.0), (2, 30.0), (1, 20.0)):
        made = shard(seq, [1], [1.0])
        header = made.header.model_copy(update={"stats": {"up_seconds": up_seconds, "visits": seq + 1.0}})
        counters.ingested(replace(made, header=header), now=100.0)
    (row,) = counters.take_searcher_rows(epoch=1, step=1, now=100.0)
    assert (row.shards, row.stats) == (3, {"up_seconds": 30.0, "visits": 3.0})


def test_reward_mean_covers_the_rows_since_it_was_last_taken():
    counters = busy()
    assert counters.take_reward_mean() == np.mean([1.0, 0.0, 0.5, 1.0, 0.0])
    assert counters.take_reward_mean() is None
    counters.ingested(shard(2, [1], [0.25]), now=160.0)
    assert counters.take_reward_mean() == 0.25


def test_of_all_searchers_those_heard_of_lately_are_counted_without_the_trainers_own_and_those_of_no_pod():
    counters = busy()
    for number, name in enumerate((COLOCATED, "extra-0", "s-0-x"), 7):
        made = shard(0, [1], [1.0], searcher=f"other-{number}")
        counters.ingested(replace(made, header=made.header.model_copy(update={"searcher": name})), now=150.0)
    found = []
    for searcher_set in ("s", None):
        tracker = Tracker(20, searcher_set=searcher_set)
        for now in (150.0, 190.0, 191.0, 210.0, 211.0):
            tracker.heard_of(counters.searchers.values(), now)
            found.append(tracker.progress().searchers)
    assert len(counters.searchers) == 5
    assert found == [2, 2, 1, 1, 0, 4, 4, 3, 3, 0]


def test_length_row_holds_both_histograms():
    row = busy().take_length_row(epoch=1, step=2, now=3.0)
    assert row is not None and (row.generated, row.trained) == ({2: 2, 3: 1, 5: 1, 7: 1}, {2: 2, 7: 1})


def test_a_row_is_told_again_only_when_it_has_changed_or_by_the_next_trainer():
    counters = busy()
    now = {"epoch": 1, "step": 2, "now": 160.0}
    assert [r.searcher for r in counters.take_searcher_rows(**now)] == ["s-0", "s-1"]
    assert counters.take_length_row(**now) is not None
    assert (counters.take_searcher_rows(**now), counters.take_length_row(**now)) == ([], None)
    counters.ingested(shard(1, [1], [1.0], searcher="s-1"), now=170.0)
    assert [(r.searcher, r.shards) for r in counters.take_searcher_rows(**now)] == [("s-1", 2)]
    assert counters.take_length_row(**now) is not None
    twin = Counters.restored(counters.state())
    assert len(twin.take_searcher_rows(**now)) == 2 and twin.take_length_row(**now) is not None


def test_a_searcher_silent_for_a_day_leaves_the_table_and_the_totals_stay():
    counters = busy()  # s-0 was last heard of at 130, s-1 at 150
    told = counters.take_searcher_rows(epoch=1, step=2, now=140.0 + FORGET_SECONDS)
    assert [r.searcher for r in told] == ["s-0", "s-1"], "the history gets its last row first"
    assert [t.searcher for t in counters.searchers.values()] == ["s-1"]
    assert (counters.ingested_rows, counters.generated_tokens) == (6, 23)


def test_distinct_policies_are_counted_exactly_in_bounded_memory():
    counters = Counters()
    for version in range(3 * RECENT_POLICIES):
        counters.ingested(shard(2 * version, [1], [1.0], version=version), now=1.0)
        counters.ingested(shard(2 * version + 1, [1], [1.0], version=max(0, version - 50)), now=1.0)  # a slow response
    (tally,) = counters.searchers.values()
    assert (tally.num_policies, tally.newest_version) == (3 * RECENT_POLICIES, 3 * RECENT_POLICIES - 1)
    assert len(tally.recent) == RECENT_POLICIES
    state = json.loads(json.dumps(counters.state()))
    assert Counters.restored(state) == counters and len(json.dumps(state["searchers"])) < 20 * RECENT_POLICIES


def test_restored_counters_equal_and_go_on_as_the_saved_ones():
    counters = busy()
    twin = Counters.restored(json.loads(json.dumps(counters.state())))
    assert twin == counters
    assert twin.fresh_rewards.maxlen == counters.fresh_rewards.maxlen
    for each in (counters, twin):
        each.ingested(make_shard(3), now=300.0)
        each.ingested(shard(2, [2], [1.0], version=4), now=301.0)
    assert twin == counters
    assert twin.state() == counters.state()
    assert twin.searchers[INCARNATION].shards == 1


def test_saved_state_does_not_change_with_the_live_counters():
    counters = busy()
    state = counters.state()
    before = json.dumps(state)
    counters.ingested(shard(2, [9], [1.0], version=8), now=400.0)
    counters.trained_lengths.update([9])
    assert json.dumps(state) == before
