"""Rows laid out end to end: every token in its place, each prompt once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scoring import grouped_rows

from tba.scoring.layout import (
    BUCKET_PADDING,
    PADDING_TOKENS,
    pack_rows,
    split_by_length,
    split_documents,
)

LAYOUTS = ("varlen", "buckets", "padded")
PROMPT = np.array([1, 2, 3])


def fed(rows) -> list[int]:
    return torch.cat([block.input_ids.flatten() for block in rows.blocks]).tolist()


def test_shared_prompt_is_fed_once_and_the_last_token_of_a_response_never():
    rows = pack_rows([PROMPT, PROMPT, PROMPT], [np.array([7, 8]), np.array([9]), np.array([4, 5, 6])], "cpu", "varlen")
    assert fed(rows) == [1, 2, 3, 7, 4, 5]
    assert rows.blocks[0].position_ids.tolist() == [[0, 1, 2, 3, 3, 4]]
    assert rows.num_tokens == 6
    # The last prompt token predicts each response's first; the one-token response is no document.
    assert rows.source.tolist() == [2, 3, 2, 2, 4, 5]
    assert rows.target.tolist() == [7, 8, 9, 4, 5, 6]
    packing = rows.blocks[0].packing
    assert packing.cu_queries.tolist() == [0, 3, 4, 6] and packing.cu_keys.tolist() == [0, 3, 7, 12]
    assert packing.keys.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 4, 5]


def test_rows_of_different_prompts_are_documents_of_their_own():
    rows = pack_rows([PROMPT, np.array([4])], [np.array([7, 8]), np.array([9, 1])], "cpu", "varlen")
    packing = rows.blocks[0].packing
    assert fed(rows) == [1, 2, 3, 7, 4, 9]
    assert not packing.shared and packing.cu_queries.tolist() == packing.cu_keys.tolist() == [0, 4, 6]


@pytest.mark.parametrize("layout", LAYOUTS)
@given(seed=st.integers(0, 1000))
@settings(max_examples=30)
def test_each_response_token_is_predicted_by_the_token_before_it(layout, seed):
    prompts, responses = grouped_rows(seed)
    rows = pack_rows(prompts, responses, "cpu", layout)
    tokens = fed(rows)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        mine = rows.row == i
        assert rows.target[mine].tolist() == response.tolist()
        assert rows.within[mine].tolist() == list(range(len(response)))
        assert [tokens[s] for s in rows.source[mine]] == [prompt[-1], *response[:-1]]


@given(seed=st.integers(0, 1000))
@settings(max_examples=30)
def test_every_token_has_one_query_place_and_the_rest_is_padding(seed):
    rows = pack_rows(*grouped_rows(seed), "cpu", "buckets")
    packing = rows.blocks[0].packing
    places, padding = packing.places.tolist(), packing.padding.tolist()
    assert sorted(places + padding) == list(range(sum(b.num * b.queries for b in packing.buckets)))
    assert packing.queries[packing.places].tolist() == list(range(rows.num_tokens))
    assert len(packing.keys) == sum(b.num * b.keys for b in packing.buckets)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=60))
def test_buckets_partition_the_documents_and_bound_the_padding(lengths):
    lengths = [(queries, queries + before) for queries, before in lengths]
    buckets = list(split_documents(lengths))
    assert sorted(d for bucket in buckets for d in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        real = sum(q + k for q, k in (lengths[d] for d in bucket))
        places = len(bucket) * (max(lengths[d][0] for d in bucket) + max(lengths[d][1] for d in bucket))
        assert places - real <= BUCKET_PADDING + real / 8


@given(st.lists(st.integers(2, 3000), min_size=1, max_size=80))
def test_blocks_partition_the_rows_and_bound_the_padding(lengths):
    blocks = list(split_by_length(lengths))
    assert sorted(row for block in blocks for row in block) == list(range(len(lengths)))
    for block in blocks:
        tokens = sum(lengths[row] for row in block)
        assert lengths[block[0]] * len(block) - tokens <= PADDING_TOKENS + tokens / 16


def test_rows_of_very_different_length_are_not_padded_to_one():
    assert list(split_by_length([300, 10, 290, 10])) == [[0, 2], [1, 3]]
    assert list(split_by_length([20, 10, 30])) == [[2, 0, 1]], "little padding is cheaper than another pass"


@pytest.mark.parametrize("pair", [([1], []), ([], [1])])
def test_empty_prompt_or_response_is_refused(pair):
    prompt, response = (np.array(x, dtype=np.int64) for x in pair)
    with pytest.raises(ValueError, match="at least one token"):
        pack_rows([prompt], [response], "cpu")
