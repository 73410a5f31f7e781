"""Rows on their way to the model: none lost, none twice, in order, ahead of their use."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.learning import feed, make_learner, make_shard

from tba.trainer.batchrows import BatchGroups
from tba.trainer.collate import REFERENCE_BUDGET, Collator


def collator() -> Collator:
    learner = make_learner()
    feed(learner, make_shard(0), make_shard(1))
    return Collator(learner.buffer, learner.policy)


@pytest.mark.parametrize("budget", [1, 6, 20, 10_000])
def test_chunks_for_the_reference_hold_each_row_once_and_keep_within_the_budget(budget):
    made = collator()
    ids = np.array([5, 3, 17, 30, 8, 9, 40, 22])
    (chunks,) = made.reference_chunks(ids, budget)
    assert sorted(np.concatenate(chunks).tolist()) == sorted(ids.tolist())
    for chunk in chunks:
        assert made.rows(chunk).num_tokens <= REFERENCE_BUDGET * budget or len(chunk) == 1
    assert made.reference_chunks(ids[:0], budget) == [[]]


@pytest.mark.parametrize("num_ranks", [2, 3, 9])
def test_ranks_share_rows_by_prompt_and_groups_whole(num_ranks):
    made = collator()
    ids = np.arange(40)
    shares = made.reference_chunks(ids, 20, num_ranks)
    prompts = [{int(p) for chunk in share for p in made._buffer.prompt_ids(chunk)} for share in shares]
    assert sorted(r for share in shares for chunk in share for r in chunk.tolist()) == ids.tolist()
    assert sum(map(len, prompts)) == len(set().union(*prompts))
    plan = BatchGroups(ids.reshape(10, 4), np.ones((10, 4), np.float32), np.arange(10) % 4)
    batches = made.micro_batches(plan, 20, num_ranks)
    assert len(batches) == num_ranks
    assert sorted(g for share in batches for m in share for g in m.groups) == list(range(10))


def test_rows_keep_the_order_they_were_asked_in():
    made = collator()
    rows = made.rows(np.array([20, 3, 11]))
    for i, row in enumerate((20, 3, 11)):
        assert rows.target[rows.row == i].tolist() == made._buffer.tokens(row).tolist()


@pytest.mark.parametrize("threaded", [False, True])
def test_jobs_done_ahead_give_their_results_in_order(threaded):
    made = collator()
    with ThreadPoolExecutor(1) as pool:
        made._thread = pool if threaded else None
        assert list(made.ahead([lambda i=i: i for i in range(7)])) == list(range(7))
        assert list(made.ahead([])) == []


def test_in_a_thread_the_next_job_begins_before_the_last_result_is_used():
    made = collator()
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        made._thread = pool
        results = made.ahead([lambda: 0, begun.set])
        assert next(results) == 0
        assert begun.wait(10), "the second job waited for the first result to be used"


def test_failure_of_a_job_reaches_the_one_that_waits_for_it():
    made = collator()
    with ThreadPoolExecutor(1) as pool:
        made._thread = pool
        results = made.ahead([lambda: 0, lambda: 1 // 0])
        assert next(results) == 0
        with pytest.raises(ZeroDivisionError):
            next(results)
