import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory_store import MemoryStore

from tba.contracts.keys import ShardKey
from tba.protocol.windows import LINGER_SECONDS, Windows, carry_out, linger_for


def shard(window, seq):
    return ShardKey(window, "searcher-0", "a" * 32, seq).path


def poll(windows, store, *, starved=False, sweep_keys=1000):
    plan = windows.plan(starved=starved, sweep_keys=sweep_keys)
    listing = carry_out(plan, store.list_after)
    return windows.listed(plan, listing), list(listing.keys)


def test_a_window_leaves_the_tail_two_commits_and_a_linger_time_after_it_was_newest():
    store = MemoryStore()
    for window in (5, 6, 7):
        store.put_once(shard(window, window), b"x")
    windows = Windows(lowest_unswept=5).observed(6, 0.0, linger_seconds=20)
    windows, keys = poll(windows, store, starved=True)
    assert keys == [shard(5, 5), shard(6, 6), shard(7, 7)], "a window newer than the commit we know is listed too"
    windows = windows.observed(7, 10.0, linger_seconds=20).observed(7, 29.0, linger_seconds=20)
    assert windows.closed_below == 5, "window 5 closed 19 s ago"
    windows = windows.observed(8, 30.0, linger_seconds=20)
    assert windows.closed_below == 6
    windows, keys = poll(windows, store)
    assert shard(5, 5) in keys and windows.lowest_unswept == 6, "swept once listed after it closed"
    plan = windows.plan(starved=False)
    assert (plan.tail_after, plan.sweep_after, plan.sweep_keys) == ("shards/0000000006/!", None, 1000)
    assert windows.listed(plan, carry_out(plan, store.list_after)).lowest_unswept == 6


def test_a_shard_that_lands_late_in_a_swept_window_is_found_by_the_slow_sweep():
    store = MemoryStore()
    for seq in range(10):
        store.put_once(shard(1, seq), b"x")
    windows = Windows(lowest_unswept=50).observed(50, 0.0)
    store.put_once(shard(1, 99), b"late")
    found = []
    for _ in range(4):
        windows, keys = poll(windows, store, sweep_keys=3)
        assert len(keys) <= 3
        found += keys
    assert found == [shard(1, seq) for seq in (*range(10), 99)]
    windows, keys = poll(windows, store, sweep_keys=3)
    assert keys == [shard(1, 0), shard(1, 1), shard(1, 2)], "it begins again"


def test_a_starved_trainer_lists_everything_once_and_then_slowly_until_it_has_been_fed():
    store = MemoryStore()
    for seq in range(10):
        store.put_once(shard(1, seq), b"x")
    windows = Windows(lowest_unswept=50).observed(50, 0.0)
    windows, keys = poll(windows, store, sweep_keys=2)
    windows, keys = poll(windows, store, sweep_keys=2, starved=True)
    assert len(keys) == 10
    for _ in range(2):
        windows, keys = poll(windows, store, sweep_keys=2, starved=True)
        assert len(keys) == 2
    windows, _ = poll(windows, store, sweep_keys=2)
    windows, keys = poll(windows, store, sweep_keys=2, starved=True)
    assert len(keys) == 10


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.booleans(), st.booleans()), min_size=1, max_size=40),
    st.integers(1, 5),
)
def test_every_shard_wherever_and_whenever_it_lands_is_found_within_one_cycle(moves, sweep_keys):
    store, windows, found, commit, seq = MemoryStore(), Windows(), set(), 1, 0
    for time, (commits, lag, upload, starved) in enumerate(moves):
        commit += commits
        windows = windows.observed(commit, float(time), linger_seconds=2)
        if upload:
            store.put_once(shard(max(0, commit - lag), seq), b"x")
            seq += 1
        before = windows
        windows, keys = poll(windows, store, starved=starved, sweep_keys=sweep_keys)
        found.update(keys)
        assert before.lowest_unswept <= windows.lowest_unswept <= max(0, commit - 1)
        assert windows.lowest_unswept <= before.closed_below or windows.lowest_unswept == before.lowest_unswept
    for _ in range(2 * (len(store.objects) + 2)):
        windows, keys = poll(windows, store, sweep_keys=sweep_keys)
        found.update(keys)
    assert found == set(store.objects)


def test_pages_of_a_poll_do_not_depend_on_searchers():
    store = MemoryStore()
    for searcher in range(50):
        store.put_once(ShardKey(60, f"searcher-{searcher}", f"{searcher:032x}", 0).path, b"x")
    windows = Windows(lowest_unswept=50).observed(50, 0.0)
    poll(windows, store)
    assert store.count("list") == 2


def test_windows_of_shards_that_wait_to_be_ingested_are_not_durably_swept():
    windows = Windows(lowest_unswept=9)
    assert (windows.durable([]), windows.durable([12]), windows.durable([12, 3])) == (9, 9, 3)


def test_a_commit_that_falls_is_refused():
    with pytest.raises(ValueError, match="commit never falls"):
        Windows().observed(5, 0.0).observed(4, 1.0)


def test_a_window_lingers_for_two_looks_of_a_searcher_at_latest():
    assert linger_for(1.0) == LINGER_SECONDS
    assert linger_for(60.0) == 120.0
