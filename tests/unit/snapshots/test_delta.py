"""The delta codec: exact for every bit pattern, and no bytes from outside make it read or allocate too much."""

import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.contracts.errors import CorruptObject
from tba.hashing import xxh3_128
from tba.snapshots import delta

SIZES = st.sampled_from(delta.ITEM_SIZES)


def bf16(*patterns: int) -> bytes:
    return np.array(patterns, "<u2").tobytes()


def applied(old: bytes, blob: bytes, itemsize: int) -> bytes:
    target = bytearray(old)
    delta.apply(target, blob, itemsize)
    return bytes(target)


def test_a_blob_by_hand():
    """Element 2 of eight changes from 1.0 to the next bf16: one gap of 2, XOR 0x0001."""
    old, new = bf16(*[0x3F80] * 8), bf16(0x3F80, 0x3F80, 0x3F81, *[0x3F80] * 5)
    blob = bytes(delta.encode(old, new, 2))
    kind, changed, gaps, *lengths = struct.unpack_from("<BIIIIII", blob)
    assert (kind, changed, gaps) == (1, 1, 1)
    frames, at = [], struct.calcsize("<BIIIIII")
    for length in lengths:
        frames.append(zstandard.ZstdDecompressor().decompress(blob[at : at + length]))
        at += length
    assert frames == [b"\x02", b"\x00", b"\x01", b"\x00"] and at == len(blob)
    assert applied(old, blob, 2) == new


@given(st.data(), SIZES, st.integers(0, 300))
def test_what_was_encoded_comes_back_bit_for_bit(data, itemsize, count):
    size = count * itemsize
    old = data.draw(st.binary(min_size=size, max_size=size))
    new = data.draw(st.one_of(st.just(old), st.binary(min_size=size, max_size=size), edits(old)))
    blob = delta.encode(old, new, itemsize)
    assert applied(old, bytes(blob), itemsize) == new
    assert (blob == b"") == (old == new)


@st.composite
def edits(draw, old: bytes) -> bytes:
    """A few changed bytes."""
    new = bytearray(old)
    for at in draw(st.lists(st.integers(0, max(0, len(old) - 1)), max_size=5)):
        if old:
            new[at] = draw(st.integers(0, 255))
    return bytes(new)


@pytest.mark.parametrize("gap", [0, 65534, 65535, 65536, 131069, 131070, 131071])
@pytest.mark.parametrize("start", [0, 1])
def test_gaps_of_any_length_are_exact(gap, start):
    new = np.zeros(200_000, "<u2")
    new[[start, start + gap + 1, 199_999]] = [1, 0xFFFF, 7]
    old = np.zeros_like(new).tobytes()
    blob = bytes(delta.encode(old, new.tobytes(), 2))
    assert blob[0] == 1 and len(blob) < 200
    assert applied(old, blob, 2) == new.tobytes()


def test_the_first_change_may_be_far_in():
    for first in (65534, 65535, 65536, 131070):
        new = np.zeros(first + 1, "<u2")
        new[first] = 3
        blob = bytes(delta.encode(bytes(new.nbytes), new.tobytes(), 2))
        assert applied(bytes(new.nbytes), blob, 2) == new.tobytes()


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_tensors_longer_than_a_block_are_exact_across_its_border(extra):
    count = delta.BLOCK_ELEMENTS + extra
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, count, "<u2")
    new = old.copy()
    new[[0, count // 2, count - 2, count - 1]] ^= 1
    blob = bytes(delta.encode(old.tobytes(), new.tobytes(), 2))
    assert applied(old.tobytes(), blob, 2) == new.tobytes()


@pytest.mark.parametrize("changed", [0, delta.BLOCK_ELEMENTS])
def test_a_block_that_did_not_change_hides_no_other(changed):
    new = np.zeros(2 * delta.BLOCK_ELEMENTS, "<u2")
    old = new.tobytes()
    new[changed] = 1
    assert applied(old, bytes(delta.encode(old, new.tobytes(), 2)), 2) == new.tobytes()


def test_special_values_keep_their_bits():
    """Quiet and signalling NaN with payloads, -0.0, infinities, subnormals."""
    special = bf16(0x7FC1, 0x7F81, 0xFFFF, 0x8000, 0x0000, 0x7F80, 0xFF80, 0x0001)
    for old, new in ((special, special[::-1]), (bytes(16), special), (special, bytes(16))):
        assert applied(old, bytes(delta.encode(old, new, 2)), 2) == new


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.3, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_any_density_is_exact_and_never_much_larger_than_the_tensor(share, itemsize):
    rng = np.random.default_rng(1)
    old = rng.integers(0, 256, (30_000, itemsize), np.uint8)
    new = old.copy()
    chosen = rng.random(30_000) < share
    new[chosen] ^= rng.integers(0, 256, (int(chosen.sum()), itemsize), np.uint8)
    blob = bytes(delta.encode(old.tobytes(), new.tobytes(), itemsize))
    assert applied(old.tobytes(), blob, itemsize) == new.tobytes()
    assert len(blob) <= 1.01 * old.nbytes
    assert blob[0] == (2 if share > 0.9 else blob[0])


def test_where_both_ways_are_tried_the_shorter_is_taken():
    """Half of the elements, anywhere, to anything: 2 bytes for each of those and a bit for every one."""
    rng = np.random.default_rng(1)
    xor = np.where(rng.random(30_000) < 0.5, rng.integers(1, 2**16, 30_000), 0).astype("<u2")
    blob = delta.encode(bytes(xor.nbytes), xor.tobytes(), 2)
    assert len(blob) < 1.07 * (30_000 / 2 * 2 + 30_000 / 8)


def test_all_changed_by_the_same_bit_costs_next_to_nothing():
    old = np.random.default_rng(2).integers(0, 2**16, 100_000, "<u2")
    assert len(delta.encode(old.tobytes(), (old ^ 1).tobytes(), 2)) < 200


def test_an_empty_tensor_has_an_empty_blob():
    assert delta.encode(b"", b"", 2) == b""
    assert applied(b"", b"", 2) == b""
    with pytest.raises(CorruptObject, match="too many"):
        applied(b"", b"\0", 2)


def test_buffers_that_cannot_be_of_one_tensor_are_refused():
    with pytest.raises(ValueError, match="same number of elements"):
        delta.encode(b"ab", b"abcd", 2)
    with pytest.raises(ValueError, match="no whole number"):
        delta.encode(b"abc", b"abc", 2)
    with pytest.raises(ValueError, match="itemsize must be one of"):
        delta.encode(b"abc", b"abc", 3)


def sample() -> tuple[bytes, bytes, bytes]:
    """Old, new and blob of a tensor of which a twentieth changed."""
    rng = np.random.default_rng(3)
    old = rng.integers(0, 2**16, 2000, "<u2")
    new = old.copy()
    new[rng.random(2000) < 0.05] ^= 3
    return old.tobytes(), new.tobytes(), bytes(delta.encode(old.tobytes(), new.tobytes(), 2))


SAMPLE = sample()


@given(st.data())
@settings(max_examples=300)
def test_damaged_bytes_are_refused_or_give_other_weights_whose_hash_tells(data):
    old, new, blob = SAMPLE
    bad = bytearray(blob)
    for at in data.draw(st.lists(st.integers(0, len(blob) - 1), min_size=1, max_size=4)):
        bad[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        result = applied(old, bytes(bad), 2)
    except CorruptObject:
        return
    assert (xxh3_128(result) == xxh3_128(new)) == (result == new) and len(result) == len(old)


@given(st.binary(max_size=200), st.integers(0, 100), SIZES)
@settings(max_examples=300)
def test_arbitrary_bytes_raise_corrupt_object_or_nothing(blob, count, itemsize):
    with suppress(CorruptObject):
        applied(bytes(count * itemsize), blob, itemsize)


def test_every_truncation_and_every_addition_is_noticed():
    old, _, blob = SAMPLE
    for cut in range(1, len(blob)):
        with pytest.raises(CorruptObject):
            applied(old, blob[:cut], 2)
    with pytest.raises(CorruptObject, match="1 bytes too many"):
        applied(old, blob + b"\0", 2)


def sparse(changed: int, gaps: list[int], planes: list[bytes], announced: int | None = None) -> bytes:
    tokens = np.array(gaps, "<u2")
    rows = tokens.view(np.uint8).reshape(-1, 2)
    frames = [zstandard.ZstdCompressor().compress(p) for p in (rows[:, 0].tobytes(), rows[:, 1].tobytes(), *planes)]
    head = struct.pack("<BII", 1, changed, len(gaps) if announced is None else announced)
    return head + struct.pack(f"<{len(frames)}I", *map(len, frames)) + b"".join(frames)


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"\x03", "unknown kind 3"),
        (sparse(1, [100], [b"\1", b"\0"]), "changes element 100 of a block of 100"),
        (sparse(2, [98, 1], [b"\1\1", b"\0\0"]), "changes element 100"),
        (sparse(0, [], [b"", b""]), "0 changes"),
        (sparse(101, [0] * 101, [b"\1" * 101] * 2), "101 changes"),
        (sparse(1, [65535], [b"\1", b"\0"]), "changes element 65535"),
        (sparse(1, [65535, 65535], [b"\1", b"\0"]), "1 changes in 2 gaps"),
        (sparse(2, [1], [b"\1\1", b"\0\0"]), "2 changes in 1 gaps"),
        (sparse(1, [1], [b"\1\1", b"\0"]), "does not announce the 1 bytes"),
        (sparse(1, [1], [b"", b"\0"]), "does not announce the 1 bytes"),
    ],
)
def test_a_blob_that_contradicts_itself_is_refused(blob, message):
    with pytest.raises(CorruptObject, match=message):
        applied(bytes(200), blob, 2)


def test_a_gap_that_goes_on_behind_the_last_change_is_refused():
    with pytest.raises(CorruptObject, match="do not lead to 1"):
        applied(bytes(400_000), sparse(1, [3, 65535], [b"\1", b"\0"]), 2)
    with pytest.raises(CorruptObject, match="do not lead to 1"):
        applied(bytes(400_000), sparse(1, [3, 4], [b"\1", b"\0"]), 2)


def test_a_small_blob_cannot_claim_much_memory():
    """A frame of 50 bytes that would decompress to 256 MB, announced or not."""
    bomb = zstandard.ZstdCompressor().compress(bytes(2**28))
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2**28))
    old = bytes(2000)
    tracemalloc.start()
    for frame in (bomb, hidden):
        for kind in (struct.pack("<BII", 1, 1000, 1000) + struct.pack("<4I", *[len(frame)] * 4), b"\x02"):
            head = kind if kind[0] == 1 else kind + struct.pack("<2I", len(frame), len(frame))
            with pytest.raises(CorruptObject, match="announce"):
                applied(old, head + frame * 4, 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22
