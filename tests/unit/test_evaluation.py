import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.contracts.errors import CorruptObject
from tba.contracts.records import Outcome
from tba.evaluation import EvalBlock, EvalResponse, decode_block, encode_block

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)


def response(prompt_id=0, sample=0, reward: float | None = 1.0, ids=(1, 2)) -> EvalResponse:
    outcome = Outcome.SCORED if reward is not None else Outcome.FAILED
    return EvalResponse(prompt_id, sample, outcome, reward, len(ids), tuple(ids))


rows = st.builds(
    response, st.integers(0, 2**40), st.integers(0, 100), st.none() | st.floats(allow_nan=False, allow_infinity=False),
    tokens,
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(rows, max_size=6))
def test_a_block_survives_its_bytes(items):
    block = EvalBlock(tuple(items))
    assert decode_block(encode_block(block)) == block


def test_equal_blocks_have_equal_bytes():
    assert encode_block(EvalBlock((response(),))) == encode_block(EvalBlock((response(),)))


def test_truncated_and_foreign_bytes_are_refused():
    data = encode_block(EvalBlock((response(),)))
    for bad in (data[:-1], data[: len(data) // 2], b"", b"{}"):
        with pytest.raises(CorruptObject):
            decode_block(bad)


def test_a_flipped_bit_in_the_body_is_noticed_or_harmless():
    block = EvalBlock((response(7, 1, 0.5, (3, 4, 5)), response(8, 0, None, ())))
    data = encode_block(block)
    for at in range(8, len(data) - 8):
        with contextlib.suppress(CorruptObject):
            assert decode_block(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) == block


def test_a_failed_row_with_a_reward_is_refused():
    with pytest.raises(ValueError, match="no other, has a reward"):
        encode_block(EvalBlock((EvalResponse(0, 0, Outcome.FAILED, 0.0, 0, ()),)))
