"""Rows sent to another rank are those of the buffer."""

import numpy as np
from support.learning import feed, live_config, make_learner, make_shard

from tba.trainer.batchrows import BatchRows, pack_batch


def test_rows_as_arrays_say_what_the_buffer_says_of_each_slot():
    learner = make_learner()
    feed(learner, make_shard(0), make_shard(1))
    plan = learner.train_step(live_config(), epoch=1).plan  # some log-probabilities are cached now
    buffer, sent = learner.buffer, BatchRows()
    groups = sent.take(pack_batch(buffer, plan))
    assert np.array_equal(groups.weights, plan.weights) and np.array_equal(groups.prompt_ids, plan.prompt_ids)
    for name in ("prompt_ids", "num_tokens", "rewards", "ref_logprobs", "mu_logprobs"):
        mine, theirs = getattr(sent, name)(groups.rows), getattr(buffer, name)(plan.rows)
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(groups.rows.ravel(), plan.rows.ravel(), strict=True):
        assert np.array_equal(sent.tokens(int(mine)), buffer.tokens(int(theirs)))
    for prompt in plan.prompt_ids:
        assert np.array_equal(sent.prompt_tokens(int(prompt)), buffer.prompt_tokens(int(prompt)))


def test_rows_of_one_batch_say_nothing_of_the_batch_before():
    learner, sent = make_learner(), BatchRows()
    feed(learner, make_shard(0, prompts=(0, 1, 2), samples=4), make_shard(1, prompts=(4, 5, 6), samples=7))
    for _ in range(3):
        plan = learner.train_step(live_config(), epoch=1).plan
        groups = sent.take(pack_batch(learner.buffer, plan))
        np.testing.assert_array_equal(sent.num_tokens(groups.rows), learner.buffer.num_tokens(plan.rows))
        assert [len(sent.prompt_tokens(int(p))) for p in groups.prompt_ids] == [3] * len(plan.prompt_ids)


def test_rows_keep_their_order_so_that_all_ranks_deal_alike():
    learner = make_learner()
    feed(learner, make_shard(0), make_shard(1))
    plan = learner.train_step(live_config(), epoch=1).plan
    sent = BatchRows().take(pack_batch(learner.buffer, plan)).rows
    assert np.array_equal(np.argsort(sent.ravel(), kind="stable"), np.argsort(plan.rows.ravel(), kind="stable"))
