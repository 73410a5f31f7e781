import threading

import pytest
from support.memory_store import MemoryStore
from support.synthetic_run import latest, log_object, run_record, whole_run

from tba.cli import feed
from tba.contracts import keys


class Faulty(MemoryStore):
    """Each `latest` read raises the next of `errors`, if any is left."""

    def __init__(self):
        super().__init__()
        self.errors = []
        self.reads = threading.Semaphore(0)

    def get_if_changed(self, key, etag):
        self.reads.release()
        if self.errors:
            raise self.errors.pop(0)
        return super().get_if_changed(key, etag)


@pytest.fixture
def store():
    made = Faulty()
    made.put_once(keys.RUN, run_record().to_json())
    made.put_once(*log_object(1, 0, whole_run(5)))
    made.cas(keys.LATEST, latest(step=5).to_json(), None)
    return made


def test_whatever_a_look_raises_is_shown_and_the_next_look_follows(store, monkeypatch):
    monkeypatch.setattr(feed, "_INTERVAL_SECONDS", 0.001)
    store.errors = [ZeroDivisionError("a bug"), KeyError("a bug"), PermissionError("denied")]
    with feed.Feed(store, progress_port=1) as followed:
        for _ in range(5):
            assert store.reads.acquire(timeout=20)
        assert followed._thread.is_alive()
        assert followed.history.latest.step == 5
        assert followed.problem == ""


def test_a_failed_look_keeps_what_was_read_last(store):
    followed = feed.Feed(store, progress_port=1)
    assert followed.refresh_now().latest.step == 5
    store.errors = [ZeroDivisionError("a bug")]
    assert followed.refresh_now().latest.step == 5
    assert followed.problem == "ZeroDivisionError: a bug"
