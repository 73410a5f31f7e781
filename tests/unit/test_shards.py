"""Shards: what goes in comes out; nothing wrong comes out, whatever the bytes."""

import dataclasses
import io
import random

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.arrow import write_single_batch
from tba.contracts.errors import CorruptObject
from tba.contracts.records import FinishReason, Outcome, PolicyId, ShardHeader, Span, Trajectory
from tba.shards import ShardBatch, decode_shard, encode_shard
from tba.shards.codec import SCHEMA

RUN = "a" * 32
HEADER = ShardHeader(
    run=RUN, searcher="searcher-0", incarnation="b" * 32, seq=7, reward_version="gsm8k-1", stats={"tokens": 12.0}
)
ROW = Trajectory(
    prompt_id=3,
    visit=5,
    visit_size=2,
    prompt_tokens=[1, 2, 3],
    response_tokens=[10, 11, 12, 2],
    outcome=Outcome.SCORED,
    reward=0.5,
    finish_reason=FinishReason.STOP,
    spans=[Span(3, 1, 8), Span(1, 1, 10)],
    temperature=1.0,
    created_at=1.75e9,
    sampler_logprobs=[-0.5, -0.25, -1.0, -2.0],
    ref_logprob=-3.5,
    ref_policy=PolicyId(1, 0),
)
BARE = dataclasses.replace(
    ROW,
    outcome=Outcome.TIMED_OUT,
    reward=None,
    finish_reason=FinishReason.LENGTH,
    sampler_logprobs=None,
    ref_logprob=None,
    ref_policy=None,
)
EMPTY = dataclasses.replace(BARE, outcome=Outcome.FAILED, response_tokens=[], spans=[Span(0, 1, 8)])
f32 = st.floats(-1e6, 1e6, width=32)


@st.composite
def trajectories(draw) -> Trajectory:
    outcome = draw(st.sampled_from(list(Outcome)))
    scored = outcome is Outcome.SCORED
    lengths = draw(st.lists(st.integers(1, 5), min_size=int(scored), max_size=4))
    policies = st.tuples(st.integers(0, 10**6 - 1), st.integers(0, 10**10 - 1))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=sum(lengths), max_size=sum(lengths)))
    with_logprobs = bool(tokens) and draw(st.booleans())
    ref = draw(st.none() | policies)
    return Trajectory(
        prompt_id=draw(st.integers(0, 2**63 - 1)),
        visit=draw(st.integers(0, 2**63 - 1)),
        visit_size=draw(st.integers(1, 2**31 - 1)),
        prompt_tokens=draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)),
        response_tokens=tokens,
        outcome=outcome,
        reward=draw(f32) if scored else None,
        finish_reason=draw(st.sampled_from(list(FinishReason))),
        spans=[Span(n, *draw(policies)) for n in lengths or [0]],
        temperature=draw(st.floats(0, 10, width=32)),
        created_at=draw(st.floats(0, 1e12)),
        sampler_logprobs=[draw(f32) for _ in tokens] if with_logprobs else None,
        ref_logprob=None if ref is None else draw(f32),
        ref_policy=None if ref is None else PolicyId(*ref),
    )


@given(st.lists(trajectories(), max_size=6))
@settings(max_examples=60, deadline=None)
def test_every_row_survives_the_round_trip(rows):
    data = encode_shard(HEADER, rows)
    batch = decode_shard(data, run_id=RUN)
    assert batch.header == HEADER
    assert [batch.row(i) for i in range(len(batch))] == rows
    epochs, versions = batch.policies()
    assert [PolicyId(int(e), int(v)) for e, v in zip(epochs, versions, strict=True)] == [r.policy for r in rows]


def test_columns_of_a_shard_written_by_hand():
    batch = decode_shard(encode_shard(HEADER, [ROW, BARE, EMPTY]), run_id=RUN, num_prompts=4, vocabulary=13)
    assert len(batch) == 3
    assert batch.outcomes.tolist() == [0, 2, 1] and batch.scored.tolist() == [True, False, False]
    assert batch.rewards[0] == 0.5 and np.isnan(batch.rewards[1:]).all()
    assert batch.finish_stop.tolist() == [True, False, False]
    assert batch.response_offsets.tolist() == [0, 4, 8, 8] and batch.response_tokens.tolist() == [10, 11, 12, 2] * 2
    assert batch.span_num_tokens.tolist() == [3, 1, 3, 1, 0] and batch.span_offsets.tolist() == [0, 2, 4, 5]
    assert batch.sampler_offsets.tolist() == [0, 4, 4, 4]
    assert batch.ref_epochs.tolist() == [1, -1, -1]
    assert {name: values.dtype.name for name, values in batch.columns()} == {
        "prompt_ids": "int64",
        "visits": "int64",
        "visit_sizes": "int32",
        "outcomes": "uint8",
        "rewards": "float32",
        "finish_stop": "bool",
        "temperatures": "float32",
        "created_at": "float64",
        "prompt_tokens": "int32",
        "prompt_offsets": "int64",
        "response_tokens": "int32",
        "response_offsets": "int64",
        "span_num_tokens": "int64",
        "span_epochs": "int64",
        "span_versions": "int64",
        "span_offsets": "int64",
        "sampler_logprobs": "float32",
        "sampler_offsets": "int64",
        "ref_logprobs": "float32",
        "ref_epochs": "int64",
        "ref_versions": "int64",
    }


def test_equal_rows_give_equal_bytes():
    assert encode_shard(HEADER, [ROW, BARE]) == encode_shard(HEADER, [ROW, BARE])


def test_other_tools_open_the_file():
    data = encode_shard(HEADER, [ROW, BARE])
    frame = pd.read_feather(io.BytesIO(data))
    assert frame["outcome"].tolist() == ["scored", "timed_out"] and frame["prompt_id"].tolist() == [3, 3]
    table = pa.ipc.open_file(data).read_all()
    assert table["spans"].to_pylist()[0] == [
        {"num_tokens": 3, "epoch": 1, "version": 8},
        {"num_tokens": 1, "epoch": 1, "version": 10},
    ]
    assert table["reward"].to_pylist() == [0.5, None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_id": -1}, "prompt_id must be >= 0"),
        ({"visit": -1}, "visit must be >= 0"),
        ({"visit_size": 0}, "visit_size must be >= 1"),
        ({"prompt_tokens": []}, "a prompt needs at least one token"),
        ({"prompt_tokens": [-1]}, "prompt token must be >= 0"),
        ({"response_tokens": [1, -2, 3, 4]}, "response token must be >= 0"),
        ({"response_tokens": [1, 2, 2**31, 4]}, "does not fit"),
        ({"response_tokens": [], "spans": [Span(0, 1, 1)]}, "a scored response needs"),
        ({"reward": None}, "a scored row needs a finite reward"),
        ({"reward": float("nan")}, "a scored row needs a finite reward"),
        ({"reward": float("inf")}, "a scored row needs a finite reward"),
        ({"outcome": Outcome.FAILED}, "only a scored row may have a reward"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"created_at": float("nan")}, "created_at"),
        ({"spans": []}, "at least one span"),
        ({"spans": [Span(3, 1, 8)]}, "spans must cover"),
        ({"spans": [Span(5, 1, 8)]}, "spans must cover"),
        ({"spans": [Span(4, 1, 8), Span(0, 1, 9)]}, "num_tokens must be >= 1"),
        ({"spans": [Span(5, 1, 8), Span(-1, 1, 9)]}, "num_tokens must be >= 1"),
        ({"spans": [Span(2**62, 1, 8)] * 4 + [Span(4, 1, 8)]}, "num_tokens"),
        ({"spans": [Span(4, -1, 8)]}, "epoch out of range"),
        ({"spans": [Span(4, 1, 10**10)]}, "version out of range"),
        ({"sampler_logprobs": [-1.0]}, "one a token"),
        ({"sampler_logprobs": [-1.0, -1.0, float("nan"), -1.0]}, "not finite"),
        ({"ref_logprob": None}, "go together"),
        ({"ref_logprob": float("inf")}, "ref_logprob must be finite"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_refused_by_writer_and_reader(change, message, monkeypatch):
    bad = dataclasses.replace(ROW, **change)
    with pytest.raises(ValueError, match=message):
        encode_shard(HEADER, [ROW, bad])
    if "does not fit" in message:
        return
    # A hostile writer checks nothing and hashes honestly.
    monkeypatch.setattr("tba.shards.codec.fault", lambda batch: None)
    data = encode_shard(HEADER, [ROW, bad])
    monkeypatch.undo()
    with pytest.raises(CorruptObject, match=f"{message}|content hash"):  # a masked value changes the content
        decode_shard(data, run_id=RUN)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"run_id": "c" * 32}, "foreign"),
        ({"run_id": RUN, "num_prompts": 3}, "prompt_id 3 is beyond"),
        ({"run_id": RUN, "vocabulary": 12}, "response_tokens holds id 12"),
    ],
)
def test_a_shard_of_another_run_is_refused(limits, message):
    with pytest.raises(CorruptObject, match=message):
        decode_shard(encode_shard(HEADER, [ROW]), **limits)


def test_a_header_that_json_would_change_is_refused():
    with pytest.raises(ValueError, match="stats must be finite"):
        encode_shard(HEADER.model_copy(update={"stats": {"x": float("nan")}}), [ROW])


def test_a_changed_header_is_noticed():
    data = encode_shard(HEADER, [ROW])
    assert data.count(b"gsm8k-1") == 2  # schema message and footer
    with pytest.raises(CorruptObject, match="content hash"):
        decode_shard(data.replace(b"gsm8k-1", b"gsm8k-2"), run_id=RUN)


def test_a_file_of_another_schema_is_refused():
    foreign = pa.schema([pa.field("prompt_id", pa.int64())])
    with pytest.raises(CorruptObject, match="another schema"):
        decode_shard(write_single_batch(foreign, [pa.array([1])]), run_id=RUN)
    wider = SCHEMA.set(2, pa.field("visit_size", pa.int64(), nullable=False))
    table = pa.ipc.open_file(encode_shard(HEADER, [ROW])).read_all().combine_chunks().cast(wider)
    with pytest.raises(CorruptObject, match="visit_size"):
        decode_shard(write_single_batch(wider, [c.chunk(0) for c in table.columns]), run_id=RUN)


@pytest.mark.parametrize("data", [b"", b"ARROW1", b"not a shard", b"ARROW1\0\0ARROW1", b"\x80\x04\x95pickle"])
def test_bytes_that_are_no_shard_are_refused(data):
    with pytest.raises(CorruptObject, match="shard"):
        decode_shard(data, run_id=None)


def _mutations(data: bytes, seed: int, count: int):
    rng = random.Random(seed)
    extremes = [b"\xff" * 8, b"\0" * 8, (2**62).to_bytes(8, "little"), (2**31).to_bytes(8, "little"), b"\x80" * 8]
    for i in range(count):
        changed = bytearray(data)
        at = rng.randrange(len(data) - 8)
        match i % 5:
            case 0 | 1:
                changed[at] ^= 1 << rng.randrange(8)
            case 2:
                del changed[at:]
            case 3:
                changed[at : at + 8] = rng.choice(extremes)
            case 4:
                other = rng.randrange(len(data) - 64)
                changed[at : at + 64] = data[other : other + 64]
        yield bytes(changed)


def _content(batch: ShardBatch):
    return batch.header, [(name, values.tobytes()) for name, values in batch.columns()]


def test_no_change_of_bytes_ever_yields_a_wrong_batch():
    data = encode_shard(HEADER, [ROW, BARE, EMPTY, *[dataclasses.replace(ROW, visit=i) for i in range(5)]])
    good = _content(decode_shard(data, run_id=RUN))
    refused = 0
    for changed in _mutations(data, seed=1, count=1500):
        try:
            assert _content(decode_shard(changed, run_id=RUN)) == good  # padding or footer
        except CorruptObject:
            refused += 1
    assert refused > 900


def test_a_shard_that_claims_terabytes_is_refused_before_it_is_decompressed():
    rows = [dataclasses.replace(ROW, response_tokens=[1] * 4000, spans=[Span(4000, 1, 1)], sampler_logprobs=None)]
    data = encode_shard(HEADER, rows)
    honest = (16000).to_bytes(8, "little")  # decompressed size of the response tokens
    assert data.count(honest) == 1
    with pytest.raises(CorruptObject, match="would decode to"):
        decode_shard(data.replace(honest, (2**42).to_bytes(8, "little")), run_id=RUN)
    with pytest.raises(CorruptObject, match="zstd frame"):
        decode_shard(data.replace(honest, (15999).to_bytes(8, "little")), run_id=RUN)


def test_row_refuses_an_index_outside_the_shard():
    batch = decode_shard(encode_shard(HEADER, [ROW]), run_id=RUN)
    with pytest.raises(IndexError, match="row must be in"):
        batch.row(1)
