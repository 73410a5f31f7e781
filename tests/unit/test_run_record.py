import json

import pytest
from support.synthetic_run import run_record

from tba.contracts import keys
from tba.contracts.errors import UserError
from tba.run_record import find_run_record, read_run_record
from tba.store import open_store


@pytest.fixture
def store(tmp_path):
    opened = open_store(f"file://{tmp_path}/store")
    yield opened
    opened.close()


def test_a_record_is_read_as_it_was_written(store):
    store.put_once(keys.RUN, run_record().to_json())
    assert read_run_record(store) == find_run_record(store) == run_record()


def test_no_record_is_none_to_who_can_wait_and_an_error_to_who_cannot(store):
    assert find_run_record(store) is None
    with pytest.raises(UserError, match="no run at .*Check the URI"):
        read_run_record(store)


@pytest.mark.parametrize(
    ("changes", "place"),
    [({"schemaVersion": 2}, "schemaVersion"), ({"ofTheFuture": 1}, "ofTheFuture"), ({"config": {}}, "config.model")],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_record_of_another_release_names_the_field_and_the_remedy(store, changes, place):
    store.put_once(keys.RUN, json.dumps(json.loads(run_record().to_json()) | changes).encode())
    with pytest.raises(UserError, match=f"not of this version: {place}: .*Use the release that began the run"):
        find_run_record(store)


def test_a_record_that_is_no_json_is_refused_as_a_whole(store):
    store.put_once(keys.RUN, b"{")
    with pytest.raises(UserError, match=r"not of this version: is no valid JSON .*, got b'\{'\. Use"):
        read_run_record(store)
