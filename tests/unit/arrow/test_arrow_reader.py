"""The strict Arrow reader agrees with pyarrow on what our writer makes and refuses every other form."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.arrow import read_single_batch, write_single_batch
from tba.arrow.flatbuffer import FlatTable, Malformed
from tba.contracts.errors import CorruptObject

ITEM = pa.field("item", pa.int32(), nullable=False)
SCHEMA = pa.schema(
    [
        pa.field("n", pa.int64(), nullable=True),
        pa.field("text", pa.string(), nullable=True),
        pa.field("list", pa.list_(ITEM), nullable=True),
    ],
    metadata={b"a": b"1", b"b": bytes(range(32, 127))},
)


def write(schema, columns, *, batches=1, compression: str | None = "zstd") -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for _ in range(batches):
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    return sink.getvalue().to_pybytes()


def columns(rows) -> list[pa.Array]:
    return [pa.array([r[i] for r in rows], field.type) for i, field in enumerate(SCHEMA)]


rows_of_any_kind = st.lists(
    st.tuples(
        st.none() | st.integers(-(2**62), 2**62),
        st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        st.none() | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
    ),
    max_size=20,
)


@given(rows_of_any_kind)
@settings(max_examples=80, deadline=None)
def test_every_value_and_null_is_read_as_it_was_written(rows):
    file = read_single_batch(write_single_batch(SCHEMA, columns(rows)), SCHEMA, "x")
    assert file.num_rows == len(rows) and file.metadata == SCHEMA.metadata
    assert file.columns["n"].numpy(null=-7).tolist() == [-7 if n is None else n for n, _, _ in rows]
    assert file.columns["text"].strings() == [t for _, t, _ in rows]
    values, offsets = file.columns["list"].lists()
    found = [values.numpy()[a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)]
    assert found == [x or [] for _, _, x in rows]


def test_codes_name_the_first_match_and_mark_strangers():
    schema = pa.schema([pa.field("s", pa.string(), nullable=False)])
    data = write_single_batch(schema, [pa.array(["stop", "length", "pots", "", "length"])])
    assert read_single_batch(data, schema, "x").columns["s"].codes(["length", "stop"]).tolist() == [1, 0, -1, -1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": 2}, "more than one record batch"),
        ({"batches": 0}, "no message|message type|does not fit"),
        ({"compression": None}, "not compressed with zstd"),
        ({"compression": "lz4"}, "not compressed with zstd"),
    ],
)
def test_a_file_of_another_form_is_refused(options, message):
    with pytest.raises(CorruptObject, match=message):
        read_single_batch(write(SCHEMA, columns([(1, "a", [1])]), **options), SCHEMA, "x")


def test_offsets_that_fall_or_leave_the_values_are_refused():
    schema = pa.schema([pa.field("list", pa.list_(ITEM), nullable=False)])
    for offsets in ([0, 2, 1, 3], [0, -1, 2, 3], [0, 3, -5, 3]):
        raw = pa.array(offsets, pa.int32()).buffers()[1]
        forged = pa.Array.from_buffers(pa.list_(ITEM), 3, [None, raw], children=[pa.array([7, 8, 9], pa.int32())])
        with pytest.raises(CorruptObject, match="do not rise"):
            read_single_batch(write(schema, [forged]), schema, "x")


def test_the_limit_holds_for_the_decoded_size():
    data = write_single_batch(SCHEMA, columns([(i, "x" * 50, [i] * 10) for i in range(100)]))
    with pytest.raises(CorruptObject, match="limit 1000"):
        read_single_batch(data, SCHEMA, "x", max_bytes=1000)


def test_metadata_without_end_is_refused():
    schema = SCHEMA.with_metadata({str(i): "x" for i in range(100)})
    with pytest.raises(CorruptObject, match="100 entries of metadata"):
        read_single_batch(write(schema, columns([])), SCHEMA, "x")


@pytest.mark.parametrize("data", [b"", b"\0\0\0", b"\xff" * 16, b"\x04\0\0\0\xff\xff\xff\x7f", b"\x04\0\0\0\0\0\0\x80"])
def test_a_table_that_points_outside_its_message_is_malformed(data):
    with pytest.raises(Malformed, match="lies outside"):
        FlatTable(memoryview(data))
