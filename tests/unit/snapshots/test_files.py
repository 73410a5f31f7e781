"""Data objects below a manifest: size and hash are those of the bytes, and are checked on the way back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory_store import MemoryStore

from tba.contracts.errors import CorruptObject
from tba.hashing import xxh3_128
from tba.snapshots.files import get_file, put_files
from tba.store.protocol import NotFound

PREFIX = "checkpoints/0000000001/000001-x/"


def test_the_hash_is_the_published_xxh3_128_of_the_empty_input():
    assert xxh3_128(b"") == "99aa06d3014798d86001c324468d497f"


@given(st.dictionaries(st.from_regex(r"[a-z]{1,5}(/[a-z]{1,5})?", fullmatch=True), st.binary(max_size=50)))
def test_files_come_back_as_they_were_written(files):
    store = MemoryStore()
    entries = put_files(store, PREFIX, files)
    assert [e.name for e in entries] == list(files)
    assert {e.name: bytes(get_file(store, PREFIX, e)) for e in entries} == files


def test_a_buffer_of_any_kind_is_written():
    store = MemoryStore()
    entries = put_files(store, PREFIX, {"a": b"xy", "b": bytearray(b"xy"), "c": memoryview(b"wxyz")[1:3]})
    assert len({e.hash for e in entries}) == 1 and all(e.size == 2 for e in entries)


def test_a_changed_torn_or_missing_file_is_refused():
    store = MemoryStore()
    (entry,) = put_files(store, PREFIX, {"facts.json": b"abcdef"})
    stored = store.objects[PREFIX + "facts.json"]
    for bad, message in ((b"abcdeg", "bytes were changed"), (b"abc", "torn"), (b"abcdefg", "torn")):
        stored.data = bad
        with pytest.raises(CorruptObject, match=message):
            get_file(store, PREFIX, entry)
    del store.objects[PREFIX + "facts.json"]
    with pytest.raises(NotFound):
        get_file(store, PREFIX, entry)
