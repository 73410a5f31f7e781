import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.contracts.keys import CheckpointKey
from tba.contracts.records import CheckpointManifest, IngestState, PolicyId, ShardId
from tba.protocol.bookkeeping import EVAL_SCORES, Bookkeeping

A = "a" * 32
KEY = CheckpointKey(1, 1, "c" * 32).path


def saved(book):
    """The manifest as another process reads it from the bucket."""
    return CheckpointManifest.model_validate_json(book.manifest("c" * 32, []).to_json())


def test_a_crash_rolls_step_and_ingested_shards_back_together():
    book = (
        Bookkeeping.begun(1)
        .ingest(ShardId(A, 0))
        .stepped(2.0)
        .evaluated(1, 0.5)
        .logged(ingest_log_seq=1, metrics_log_seq=2)
    )
    record = saved(book.swept(4))
    lost = book.ingest(ShardId(A, 1)).stepped().stepped()
    assert (lost.step, lost.contains(ShardId(A, 1))) == (3, True)
    again = Bookkeeping.restored(record, KEY, epoch=3)
    assert (again.epoch, again.step, again.checkpoint, again.wall_seconds, again.eval_score) == (3, 1, KEY, 2.0, 0.5)
    assert again.contains(ShardId(A, 0)) and not again.contains(ShardId(A, 1))
    assert again.ingest_state.lowest_unswept_window == 4
    assert (again.ingest_log_seq, again.metrics_log_seq) == (0, 0), "a new epoch writes logs of its own"
    assert again.lineage.resume_steps == {1: 0, 3: 1}
    assert again.staleness(PolicyId(1, 3)) == 0 and again.effective_version(PolicyId(1, 3)) == 1
    assert again.manifest("d" * 32, []).parent == KEY


def test_scores_stay_with_their_steps_whatever_the_order_in_which_evaluations_end():
    book = Bookkeeping.begun(1).evaluated(20, 0.2).evaluated(10, 0.9)
    assert book.eval_score == 0.2, "of the newest step, not of the evaluation that ended last"
    again = Bookkeeping.restored(saved(book), KEY, epoch=2)
    assert dict(again.scores) == {10: 0.9, 20: 0.2} and again.eval_score == 0.2
    for step in range(30, 30 + 2 * EVAL_SCORES):
        again = again.evaluated(step, 0.5)
    assert len(again.scores) == EVAL_SCORES and again.scores[-1][0] == 29 + 2 * EVAL_SCORES
    assert Bookkeeping.begun(1).eval_score is None


@given(st.lists(st.sampled_from(["ingest", "step", "save", "crash"]), max_size=30))
def test_every_policy_ever_published_is_known_and_never_newer_than_the_step(moves):
    epoch, seq = 1, 0
    book, record, published = Bookkeeping.begun(1), None, [PolicyId(1, 0)]
    for move in moves:
        if move == "ingest":
            book, seq = book.ingest(ShardId(A, seq)), seq + 1
        elif move == "step":
            book = book.stepped()
            published.append(PolicyId(book.epoch, book.step))
        elif move == "save":
            record = (saved(book), CheckpointKey(book.step, book.epoch, "c" * 32).path)
        else:
            epoch += 1
            book = Bookkeeping.restored(*record, epoch) if record else Bookkeeping.begun(epoch)
            seq = sum(e - s for s, e in book.ingest_state.intervals.get(A, []))
        assert all(book.knows(policy) and book.staleness(policy) >= 0 for policy in published)


def test_policies_that_cannot_exist_are_not_known():
    book = Bookkeeping.begun(2).stepped()
    impossible = [PolicyId(3, 0), PolicyId(2, 2), PolicyId(0, 0), PolicyId(2, -1)]
    assert not any(book.knows(policy) for policy in impossible)
    assert book.knows(PolicyId(2, 1)) and book.knows(PolicyId(1, 50))


def test_restoring_under_the_checkpoints_own_epoch_is_refused():
    with pytest.raises(ValueError, match="epoch must be > 1"):
        Bookkeeping.restored(saved(Bookkeeping.begun(1)), KEY, epoch=1)


def test_restoring_malformed_intervals_is_refused():
    record = saved(Bookkeeping.begun(1)).model_copy(update={"ingest": IngestState(intervals={A: [(0, 2), (1, 3)]})})
    with pytest.raises(ValueError, match="intervals must be sorted"):
        Bookkeeping.restored(record, KEY, epoch=2)


def test_counts_that_fall_and_shards_that_come_twice_are_refused():
    book = Bookkeeping.begun(1).logged(ingest_log_seq=2, metrics_log_seq=2).ingest(ShardId(A, 0))
    assert book.logged(ingest_log_seq=2, metrics_log_seq=2) == book, "nothing was written since"
    for ingest, metrics in ((1, 2), (2, 1)):
        with pytest.raises(ValueError, match="log counts never fall"):
            book.logged(ingest_log_seq=ingest, metrics_log_seq=metrics)
    with pytest.raises(ValueError, match="ingested once"):
        book.ingest(ShardId(A, 0))
    with pytest.raises(ValueError, match="lowest_unswept_window must be >= 0"):
        book.swept(-1)
    assert book.swept(0).ingest_state.lowest_unswept_window == 0, "nothing is swept yet"
