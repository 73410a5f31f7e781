"""safetensors in one buffer: agrees with the safetensors library, refuses anything inexact."""

import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from tba.contracts.errors import CorruptObject
from tba.snapshots.layout import DTYPES, parse, read_header, serialise

TENSORS = {
    "model.embed.weight": torch.randn(7, 4).bfloat16(),
    "model.norm.weight": torch.randn(5),
    "model.mask": torch.tensor([True, False, True]),
    "step": torch.tensor(3, dtype=torch.int64),
    "nothing": torch.empty(0, 4),
    "transposed": torch.randn(3, 5).T,
}


def _file(header: object, data: bytes = b"") -> bytearray:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return bytearray(len(text).to_bytes(8, "little") + text + data)


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def test_a_file_written_by_hand():
    data = serialise({"b": torch.tensor([1.0]), "a": torch.tensor([[1, 2]], dtype=torch.uint8)})
    header = (
        '{"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[1,2],"data_offsets":[4,6]}}'
    )
    assert bytes(data[8:]).startswith(header.encode()) and int.from_bytes(data[:8], "little") % 8 == 0
    assert data[-6:] == b"\x00\x00\x80\x3f\x01\x02"


def test_the_library_reads_what_we_write_and_we_read_what_it_writes():
    assert _same(load(bytes(serialise(TENSORS))), TENSORS)
    contiguous = {name: t.contiguous() for name, t in TENSORS.items()}
    assert _same(parse(bytearray(save(contiguous, metadata={"format": "pt"}))), TENSORS)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda n: n != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3)),
        max_size=5,
    )
)
@settings(max_examples=80, deadline=None)
def test_tensors_of_every_dtype_and_shape_survive(layout):
    tensors = {n: torch.randint(0, 2, shape).to(DTYPES[dtype]) for n, (dtype, shape) in layout.items()}
    data = serialise(tensors)
    found = parse(data)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
    assert serialise(found) == data


def test_tensors_are_views_of_the_buffer_and_aligned():
    data = serialise(TENSORS)
    tensors = parse(data)
    span = next(s for s in read_header(data) if s.name == "model.norm.weight")
    data[span.begin : span.end] = bytes(span.end - span.begin)
    assert tensors["model.norm.weight"].eq(0).all()
    assert all(t.data_ptr() % t.itemsize == 0 for t in tensors.values())


def test_a_misaligned_tensor_of_another_writer_is_read():
    data = _file({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
                  "y": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}}, b"\x07\x00\x00\x80\x3f")  # fmt: skip
    assert parse(data)["y"].item() == 1.0 and parse(data)["x"].item() == 7


def test_gradients_do_not_follow_into_the_buffer():
    weight = torch.nn.Parameter(torch.ones(2))
    assert not parse(serialise({"w": weight}))["w"].requires_grad


def test_a_dtype_without_a_name_is_refused():
    with pytest.raises(ValueError, match="complex64 has no safetensors name"):
        serialise({"x": torch.zeros(1, dtype=torch.complex64)})


def _entry(**change):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | change


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bytearray(), "does not fit"),
        (bytearray(b"\x02\0\0\0"), "does not fit"),
        (bytearray(b"\xff" * 8 + b"{}"), "does not fit"),
        (_file("[]"), "not an object"),
        (_file("{not json"), "safetensors"),
        (_file("[" * 100_000), "safetensors"),
        (_file('{"a":1,"a":2}'), "occurs twice"),
        (_file({"x": 3}), "expected dtype"),
        (_file({"x": _entry(extra=1)}, bytes(8)), "expected dtype"),
        (_file({"x": _entry(dtype="F33")}, bytes(8)), "unknown dtype"),
        (_file({"x": _entry(dtype=["F32"])}, bytes(8)), "unknown dtype"),
        (_file({"x": _entry(shape=[3])}, bytes(8)), "takes 12 bytes"),
        (_file({"x": _entry(shape=[-2])}, bytes(8)), "shape"),
        (_file({"x": _entry(shape=[True, 2])}, bytes(8)), "shape"),
        (_file({"x": _entry(shape=[2.0])}, bytes(8)), "shape"),
        (_file({"x": _entry(shape=[0, 2**60], data_offsets=[0, 0])}), "shape"),
        (_file({"x": _entry(data_offsets=[-8, 0])}, bytes(8)), "data_offsets"),
        (_file({"x": _entry(data_offsets=[8, 0])}, bytes(8)), "takes 8 bytes"),
        (_file({"x": _entry(data_offsets=[8, 16])}, bytes(16)), "starts at byte"),  # a hole
        (_file({"x": _entry(), "y": _entry()}, bytes(8)), "starts at byte"),  # overlap
        (_file({"x": _entry()}, bytes(7)), "end at byte"),
        (_file({"x": _entry()}, bytes(9)), "end at byte"),
    ],
)
def test_a_header_that_does_not_add_up_is_refused(data, message):
    with pytest.raises(CorruptObject, match=message):
        parse(data)


def test_no_change_of_the_header_crashes_the_reader():
    data = serialise(TENSORS)
    size = 8 + int.from_bytes(data[:8], "little")
    rng = random.Random(0)
    for _ in range(600):
        changed = bytearray(data)
        changed[rng.randrange(size)] ^= 1 << rng.randrange(8)
        try:
            found = parse(changed)
        except CorruptObject:
            continue
        assert sum(t.nbytes for t in found.values()) == len(data) - size  # a renamed tensor, at worst
