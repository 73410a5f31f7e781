import threading

import pytest
from support.memory_store import MemoryStore

from tba import failpoints
from tba.contracts.errors import CorruptObject, Fenced, StoreUnavailable, UserError
from tba.contracts.keys import LATEST, WeightsKey
from tba.contracts.records import Latest, RunState
from tba.protocol.latest import RunEnded, finished, published, window_advanced
from tba.store.protocol import Conflict
from tba.trainer.committer import MAX_TRIES, Committer


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    failpoints.configure("")


def stored(store):
    return Latest.model_validate_json(store.objects[LATEST].data)


def test_taking_over_creates_latest_and_then_raises_its_epoch():
    store = MemoryStore()
    a = Committer.take_over(store)
    assert (a.epoch, a.latest.commit) == (1, 1)
    b = Committer.take_over(store)
    assert (b.epoch, b.latest.commit, stored(store)) == (2, 2, b.latest)


def test_a_commit_costs_one_request_and_returns_the_body_that_stands():
    store = MemoryStore()
    committer = Committer.take_over(store)
    store.calls.clear()
    assert committer.commit(window_advanced) == stored(store) == committer.latest
    assert store.calls == [("cas", LATEST)]


def test_a_superseded_trainer_is_fenced_at_its_next_commit_and_for_ever_and_changes_nothing():
    store = MemoryStore()
    old, new = Committer.take_over(store), Committer.take_over(store)
    before = stored(store)
    for _ in range(2):
        with pytest.raises(Fenced, match=r"epoch 1.*took over as epoch 2"):
            old.commit(window_advanced)
    assert stored(store) == before and old.fenced and not new.fenced
    swaps = store.count("cas")
    with pytest.raises(Fenced):
        old.check()
    with pytest.raises(Fenced):
        old.commit(window_advanced)
    assert store.count("cas") == swaps, "once fenced it does not even try"
    assert new.commit(window_advanced).commit == 3 and new.check() == stored(store)


def test_a_lost_reply_counts_as_the_commit_it_was():
    store = MemoryStore()
    store.lose_replies = 1
    committer = Committer.take_over(store)
    assert committer.epoch == 1
    store.lose_replies = 1
    assert committer.commit(window_advanced).commit == 2 == stored(store).commit
    assert committer.commit(window_advanced).commit == 3, "it goes on from the etag it read"


def test_competing_take_overs_get_different_epochs():
    store = MemoryStore()
    rivals = []

    def rival():
        store.before_cas = lambda: None
        rivals.append(Committer.take_over(store))

    store.before_cas = rival
    loser = Committer.take_over(store)
    assert (rivals[0].epoch, loser.epoch) == (1, 2)
    with pytest.raises(Fenced):
        rivals[0].commit(window_advanced)


def test_commits_of_many_threads_are_serialised_and_none_is_lost():
    store = MemoryStore()
    committer = Committer.take_over(store)
    threads = [
        threading.Thread(target=lambda: [committer.commit(window_advanced) for _ in range(25)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stored(store).commit == 101 and store.count("cas") == 101, "no thread ever conflicts with another"


def test_an_outage_in_the_middle_of_a_commit_leaves_the_next_one_possible():
    store = MemoryStore()
    committer = Committer.take_over(store)

    def outage():
        store.before_cas = lambda: None
        raise StoreUnavailable("latest: no answer")

    store.before_cas = outage
    with pytest.raises(StoreUnavailable):
        committer.commit(window_advanced)
    assert committer.commit(window_advanced).commit == 2


def test_a_commit_that_landed_unseen_before_an_outage_is_built_upon():
    store = MemoryStore()
    committer = Committer.take_over(store)
    store.lose_replies = 1
    real_get, store.get = store.get, _unavailable
    with pytest.raises(StoreUnavailable):
        committer.commit(window_advanced)
    store.get = real_get
    assert stored(store).commit == 2
    assert committer.commit(window_advanced).commit == 3


def _unavailable(key):
    raise StoreUnavailable(f"{key}: no answer")


def test_a_store_that_always_conflicts_is_given_up_with_a_remedy():
    store = MemoryStore()
    committer = Committer.take_over(store)

    def conflict():
        raise Conflict(LATEST)

    store.before_cas = conflict
    with pytest.raises(StoreUnavailable, match="tba storage check"):
        committer.commit(window_advanced)
    assert store.count("cas") == 1 + MAX_TRIES


def test_a_refused_transition_changes_nothing():
    store = MemoryStore()
    committer = Committer.take_over(store)
    foreign = WeightsKey(1, 7, "a" * 32).path
    with pytest.raises(ValueError, match="snapshot of epoch 1 is needed"):
        committer.commit(lambda current, nonce: published(current, manifest=foreign, version=1, nonce=nonce))
    assert stored(store).commit == 1


def test_an_ended_run_cannot_be_taken_over():
    store = MemoryStore()
    Committer.take_over(store).commit(lambda current, nonce: finished(current, RunState.COMPLETE, nonce))
    with pytest.raises(RunEnded):
        Committer.take_over(store)
    assert stored(store).epoch == 1


def test_a_latest_that_cannot_be_parsed_or_is_gone_is_named():
    store = MemoryStore()
    committer = Committer.take_over(store)
    store.cas(LATEST, b"{", store.get(LATEST).etag)
    with pytest.raises(CorruptObject, match="latest cannot be parsed"):
        Committer.take_over(store)
    store.delete([LATEST])
    with pytest.raises(ValueError, match="latest is gone"):
        committer.commit(window_advanced)
    with pytest.raises(ValueError, match="deleted or overwritten"):
        committer.check()


def test_a_trainer_whose_run_was_deleted_ends_for_good_in_place_of_a_new_start_at_step_0():
    store = MemoryStore()
    committer = Committer.take_over(store)
    store.delete([LATEST])
    for ask in (lambda: committer.commit(window_advanced), committer.check):
        with pytest.raises(UserError, match=r"epoch 1 had committed: the run was deleted .* new run from step 0$"):
            ask()


@pytest.mark.parametrize(("name", "commit"), [("commit.before_cas", 1), ("commit.after_cas", 2)])
def test_a_failpoint_stops_a_commit_before_or_after_it_takes_effect(name, commit):
    store = MemoryStore()
    committer = Committer.take_over(store)
    failpoints.configure(f"{name}=raise")
    with pytest.raises(failpoints.Failpoint):
        committer.commit(window_advanced)
    assert stored(store).commit == commit
