"""A damaged object of the bucket is told in one line: key, field, reason, remedy."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.synthetic_run import latest

from tba.contracts.errors import CorruptObject
from tba.contracts.parse import parse_object
from tba.contracts.records import CheckpointManifest, IngestEntry, Latest, RunRecord, ShardHeader, SnapshotManifest

KINDS = [CheckpointManifest, IngestEntry, Latest, RunRecord, ShardHeader, SnapshotManifest]
REMEDY = "; restore it from a copy, or use the release that wrote it"


def fault(kind, data):
    with pytest.raises(CorruptObject) as caught:
        parse_object(kind, "a/key", data)
    told = str(caught.value)
    assert told.startswith("a/key cannot be parsed: ") and told.endswith(REMEDY)
    return told.removeprefix("a/key cannot be parsed: ").removesuffix(REMEDY)


def test_an_object_is_parsed_as_it_was_written():
    assert parse_object(Latest, "latest", latest().to_json()) == latest()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"epoch": 0}, "epoch: must be >= 1, got 0"),
        ({"state": "Lost"}, "state: must be Running, Complete or Failed, got 'Lost'"),
        ({"ofTheFuture": 1}, "ofTheFuture: unknown field, got 1"),
        ({"nonce": None, "epoch": "x"}, "epoch: must be a whole number, got 'x' (and 1 more)"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_the_first_wrong_field_is_named_with_the_reason_and_what_it_holds(change, told):
    assert fault(Latest, json.dumps(json.loads(latest().to_json()) | change)) == told


@pytest.mark.parametrize("data", [b"", b"not json", latest().to_json()[:-9], b"\xff\xfe", b"[" * 500])
def test_what_is_no_json_is_said_of_the_whole_object(data):
    assert fault(Latest, data).startswith("is no valid JSON (")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_empty_record_lacks_a_field_that_is_named(kind):
    assert ": is required, got nothing" in fault(kind, b"{}")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(st.one_of(st.binary(max_size=200), st.dictionaries(st.text(), st.text(), min_size=1).map(json.dumps)))
def test_whatever_the_bytes_are_the_fault_is_one_printable_line_of_bounded_length(kind, data):
    line = fault(kind, data)
    assert line.isprintable() and len(line) < 350


def test_a_name_of_a_thousand_lines_is_one_line():
    assert fault(IngestEntry, json.dumps({"a\x1b[2J\n" * 1000: 1})).isprintable()
