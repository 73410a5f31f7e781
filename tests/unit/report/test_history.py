import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.synthetic_run import evaluation, event, latest, log_object, run_record, searcher, step_row, whole_run

from tba.contracts import keys
from tba.report.history import HistoryReader, assemble, kept_steps, read_history
from tba.store import open_store


@pytest.fixture
def store(tmp_path):
    opened = open_store(f"file://{tmp_path}/store")
    yield opened
    opened.close()


def epoch_rows(epoch, resumed_at, last, seed=0):
    name = "started" if epoch == 1 else "resumed"
    rows = [event(name, epoch=epoch, step=resumed_at)]
    return rows + [step_row(s, epoch=epoch, seed=seed) for s in range(resumed_at + 1, last + 1)]


def places(history):
    return [(r.epoch, r.step) for r in history.steps]


def test_rows_beyond_the_next_epochs_resume_step_are_dropped():
    history = assemble(epoch_rows(1, 0, 12) + epoch_rows(2, 10, 13))
    assert places(history) == [(1, s) for s in range(1, 11)] + [(2, s) for s in range(11, 14)]
    assert history.discarded_rows == 2


def test_a_later_resume_may_discard_more_than_the_next_one():
    history = assemble(epoch_rows(1, 0, 12) + epoch_rows(2, 10, 13) + epoch_rows(3, 5, 7))
    assert places(history) == [(1, s) for s in range(1, 6)] + [(3, 6), (3, 7)]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6))
def test_kept_steps_rise_and_none_is_kept_twice(spans):
    rows = []
    for i, (resumed_at, length) in enumerate(spans):
        rows += epoch_rows(i + 1, resumed_at if i else 0, (resumed_at if i else 0) + length)
    history = assemble(rows)
    steps = [r.step for r in history.steps]
    assert steps == sorted(set(steps))
    assert history.discarded_rows + len(history.steps) + len(history.events) == len(rows)


def test_an_epoch_that_has_not_said_where_it_resumed_discards_nothing():
    assert kept_steps([step_row(9), step_row(3, epoch=2)]) == {1: float("inf"), 2: float("inf")}


def test_an_evaluation_of_a_discarded_policy_never_counts():
    rows = epoch_rows(1, 0, 12) + [evaluation(10, score=0.1), evaluation(12, score=0.9)]
    late = evaluation(12, score=0.9).model_copy(update={"epoch": 2})  # completed by the next epoch
    history = assemble(rows + epoch_rows(2, 10, 13) + [late])
    assert [(r.step, r.pass_at_1) for r in history.evaluations] == [(10, 0.1)]


def test_an_evaluation_told_twice_counts_once_and_the_last_word_holds():
    history = assemble([*epoch_rows(1, 0, 5), evaluation(4, score=0.1), evaluation(4, score=0.2)])
    assert [r.pass_at_1 for r in history.evaluations] == [0.2]


def test_events_of_a_discarded_future_did_happen():
    rows = [*epoch_rows(1, 0, 12), event("crashed", step=12), *epoch_rows(2, 10, 11)]
    assert [e.event for e in assemble(rows).events] == ["started", "crashed", "resumed"]


def test_the_newest_row_of_each_incarnation_is_kept():
    rows = [searcher("s", "1" * 32, step=1, rows=5), searcher("s", "2" * 32, step=1), searcher("s", "1" * 32, step=2)]
    assert sorted((r.incarnation[0], r.rows) for r in assemble(rows).searchers) == [("1", 800), ("2", 800)]


def test_an_empty_bucket_has_an_empty_history(store):
    history = read_history(store)
    assert (history.latest, history.run, history.steps, history.newest_time) == (None, None, [], None)


def test_only_what_is_new_is_read_again(store):
    reads = []
    original = store.get

    class Counting:
        uri, list_after, get_if_changed = store.uri, store.list_after, store.get_if_changed

        def get(self, key):
            reads.append(key)
            return original(key)

    store.put_once(keys.RUN, run_record().to_json())
    store.cas(keys.LATEST, latest().to_json(), None)
    store.put_once(*log_object(1, 0, epoch_rows(1, 0, 5)))
    reader = HistoryReader(Counting())
    assert len(reader.refresh().steps) == 5
    reads.clear()
    assert len(reader.refresh().steps) == 5
    assert reads == []
    store.put_once(*log_object(1, 1, [step_row(6)]))
    assert len(reader.refresh().steps) == 6
    assert reads == [keys.LogKey("metrics", 1, 1).path]


def test_a_run_that_was_made_anew_under_the_same_address_has_nothing_of_the_one_before(store):
    def make(run_id, steps):
        store.put_once(keys.RUN, run_record().model_copy(update={"run_id": run_id}).to_json())
        store.put_once(*log_object(1, 0, epoch_rows(1, 0, steps)))
        store.cas(keys.LATEST, latest(nonce=run_id).to_json(), None)

    make("a" * 32, 5)
    reader = HistoryReader(store)
    assert len(reader.refresh().steps) == 5
    store.delete([info.key for info in list(store.list_after(""))])
    gone = reader.refresh()
    assert (gone.latest, gone.run, gone.steps) == (None, None, [])
    make("b" * 32, 2)
    assert places(reader.refresh()) == [(1, 1), (1, 2)]
    store.delete([info.key for info in list(store.list_after(""))])
    make("c" * 32, 3)  # before anybody looks
    assert places(reader.refresh()) == [(1, 1), (1, 2), (1, 3)]


def test_what_a_fenced_trainer_wrote_after_its_successor_began_is_seen_and_dropped(store):
    store.put_once(*log_object(1, 0, epoch_rows(1, 0, 5)))
    store.put_once(*log_object(2, 0, epoch_rows(2, 4, 6)))
    reader = HistoryReader(store)
    assert places(reader.refresh()) == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 5), (2, 6)]
    store.put_once(*log_object(1, 1, [step_row(6)]))
    history = reader.refresh()
    assert places(history) == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 5), (2, 6)]
    assert history.discarded_rows == 2


def test_a_line_that_cannot_be_read_costs_itself_only(store):
    key, body = log_object(1, 0, epoch_rows(1, 0, 3))
    store.put_once(key, body + b'{"kind": "of the future"}\n{"kind": "step"\n\n')
    store.put_once("metrics/readme.txt", b"not ours")
    history = read_history(store)
    assert (len(history.steps), history.unreadable_lines) == (3, 2)


def test_every_kind_of_row_finds_its_place():
    history = assemble(whole_run(40))
    assert all(
        (history.steps, history.evaluations, history.publishes, history.searchers, history.quarantines, history.samples,
         history.events, history.lengths)
    )  # fmt: skip
