from hypothesis import given
from hypothesis import strategies as st

from tba.rewards.frames import FrameReader, frame


def test_a_frame_is_its_length_and_its_bytes():
    assert frame(b"abc") == b"\0\0\0\3abc"


@given(st.lists(st.binary(max_size=30), max_size=8), st.lists(st.integers(1, 9), min_size=1))
def test_payloads_survive_any_cutting_of_the_stream(payloads, sizes):
    stream = b"".join(map(frame, payloads))
    reader = FrameReader()
    read = []
    position = turn = 0
    while position < len(stream):
        size = sizes[turn % len(sizes)]
        read += reader.feed(stream[position : position + size])
        position, turn = position + size, turn + 1
    assert read == payloads
