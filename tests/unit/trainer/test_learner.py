"""The learning core on a real tiny model."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from support.learning import feed, live_config, make_learner, make_shard, run_config

from tba.contracts.config import TrainerSettings
from tba.contracts.errors import CorruptObject, UserError
from tba.contracts.records import Lineage
from tba.protocol.bookkeeping import Bookkeeping
from tba.shards.batch import from_rows
from tba.trainer.learner import new_rows, response_logprobs
from tba.trainer.model import Policy


def weights(learner):
    return {n: p.detach().clone() for n, p in learner.policy.model.named_parameters()}


def difference(a, b) -> float:
    return max((a[n] - b[n]).abs().max().item() for n in a)


@pytest.mark.parametrize("budget", [1, 40, 100, 300])
def test_gradients_do_not_depend_on_the_micro_batch_split(budget):
    grads = []
    for tokens in (100_000, budget):
        learner = make_learner(run_config(optimizer={"maxGradNorm": None}))
        feed(learner, make_shard(0))
        learner.train_step(live_config(micro_batch_tokens=tokens), epoch=1)
        grads.append({n: p.grad.clone() for n, p in learner.policy.model.named_parameters()})
    scale = max(g.abs().max().item() for g in grads[0].values())
    assert scale > 0
    assert difference(*grads) <= 1e-6 * max(1.0, scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_policy_equal_to_its_reference_has_no_log_ratio_at_all_in_the_same_micro_batch(dtype):
    config = run_config()
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    learner = make_learner(config)
    feed(learner, make_shard(0))
    assert not learner.train_step(live_config(), epoch=1).ell.any()
    learner = make_learner(config)
    feed(learner, make_shard(0))
    noise = 1e-5 if dtype == "float32" else 0.1
    assert np.abs(learner.train_step(live_config(micro_batch_tokens=20), epoch=1).ell).max() < noise


def test_gradient_in_bfloat16_is_that_of_float32_but_for_rounding():
    grads = []
    for dtype in ("float32", "bfloat16"):
        config = run_config(optimizer={"maxGradNorm": None})
        learner = make_learner(config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})}))
        feed(learner, make_shard(0))
        learner.train_step(live_config(micro_batch_tokens=40), epoch=1)
        grads.append({n: p.grad for n, p in learner.policy.model.named_parameters()})
    for name, exact in grads[0].items():
        assert grads[1][name].dtype == torch.float32
        assert (grads[1][name] - exact).norm() < 0.03 * exact.norm(), name


def test_weights_that_compute_in_bfloat16_are_those_published():
    config = run_config()
    learner = make_learner(config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})}))
    feed(learner, make_shard(0))
    for _ in range(2):
        learner.train_step(live_config(), epoch=1)
    computing = dict(learner.policy.working.model.named_parameters())
    staged = learner.policy.stage()
    assert staged.keys() == computing.keys()
    assert all(torch.equal(staged[n], computing[n]) for n in staged)


def test_tokens_of_a_step_are_counted_as_computed():
    learner = make_learner(run_config(promptsPerBatch=1, responsesPerPrompt=4))
    shard = make_shard(0, prompts=(0,), samples=4)
    feed(learner, shard)
    first = learner.train_step(live_config(), epoch=1)
    rows = first.plan.rows[first.plan.weights > 0]
    responses = learner.buffer.num_tokens(rows)
    # The prompt of 3 tokens once; the last token of a response is not fed.
    assert first.trained_tokens == first.scored_tokens == 3 + (responses - 1).sum()
    assert first.row_tokens == (3 + responses).sum()
    assert learner.train_step(live_config(), epoch=1).scored_tokens == 0
    assert set(first.phase_seconds) == {"collate", "reference", "forward_backward", "optimizer"}
    assert all(first.phase_seconds[phase] > 0 for phase in first.phase_seconds)


@pytest.mark.parametrize("reference", [{}, {"type": "EMA", "decay": 0.5}, {"type": "Reset", "everySteps": 2}])
def test_offloaded_reference_scores_as_one_that_stays(reference):
    values = []
    for offloaded in (False, True):
        learner = make_learner(run_config(reference=reference))
        feed(learner, make_shard(0))
        live = live_config()
        live = live.model_copy(update={"trainer": TrainerSettings(offload_reference=offloaded)})
        values.append([learner.train_step(live, epoch=1).ell for _ in range(4)])
    assert np.array_equal(*values)


def test_a_step_raises_the_objective_it_was_taken_on():
    learner = make_learner(run_config(learningRate=1e-2))
    feed(learner, make_shard(0))
    result = learner.train_step(live_config(), epoch=1)
    rows = result.plan.rows[result.plan.weights > 0]
    advantage = (result.rewards - result.rewards.mean(1, keepdims=True))[result.plan.weights > 0]
    before = learner.buffer.ref_logprobs(rows)
    after = learner.policy.policy_logprobs(learner.packed(rows), grad=False).numpy()
    assert (advantage * (after - before)).sum() > 0


class CountingPolicy(Policy):
    """Counts the rows scored under the reference."""

    scored = 0

    def reference_logprobs(self, rows):
        self.scored += rows.num_rows
        return super().reference_logprobs(rows)


def test_reference_is_scored_once_a_row_while_it_stays():
    learner = make_learner(policy=CountingPolicy)
    learner.policy.scored = 0  # it began with a trial
    feed(learner, make_shard(0))
    for _ in range(12):
        learner.train_step(live_config(), epoch=1)
    assert 0 < learner.policy.scored <= len(learner.buffer)


def test_reset_moves_the_reference_and_voids_what_was_cached():
    learner = make_learner(run_config(reference={"type": "Reset", "everySteps": 2}))
    feed(learner, make_shard(0))
    first = learner.train_step(live_config(), epoch=1)
    assert not first.reference_changed
    assert learner.train_step(live_config(), epoch=1).reference_changed
    assert np.abs(learner.train_step(live_config(), epoch=1).ell).max() < 1e-5


def test_ema_reference_is_never_cached_and_follows_slowly():
    learner = make_learner(run_config(reference={"type": "EMA", "decay": 0.5}))
    feed(learner, make_shard(0))
    start = weights(learner)
    learner.train_step(live_config(), epoch=1)
    name = next(iter(start))
    expected = 0.5 * start[name] + 0.5 * weights(learner)[name]
    torch.testing.assert_close(dict(learner.policy.reference_model.named_parameters())[name], expected)


def test_ratio_weight_of_a_first_use_is_one_and_later_ones_are_clipped():
    learner = make_learner(run_config(parameters={"ratioAlpha": 1.0, "ratioClip": 1.0}, learningRate=1e-2))
    feed(learner, make_shard(0, prompts=(0, 1, 2), samples=4))
    first = learner.train_step(live_config(), epoch=1)
    np.testing.assert_array_equal(first.weights, first.plan.weights)
    later = learner.train_step(live_config(), epoch=1)
    assert (later.weights <= later.plan.weights + 1e-6).all()
    assert (later.weights < later.plan.weights - 1e-6).any()


def telling(batch, logprob_of_row):
    """The shard, its rows with their sampler's log-probabilities, the same for each token; None: not told."""
    told = []
    for i, row in enumerate(map(batch.row, range(len(batch)))):
        value, size = logprob_of_row(i), len(row.response_tokens)
        told.append(replace(row, sampler_logprobs=None if value is None else [value / size] * size))
    return from_rows(batch.header, told)


def test_a_row_knows_the_log_probability_that_its_sampler_told():
    batch = telling(make_shard(0, samples=4), lambda i: None if i == 1 else -1.5 - i)
    assert np.isnan(response_logprobs(batch)[1])
    np.testing.assert_allclose(response_logprobs(batch)[[0, 2, 3]], [-1.5, -3.5, -4.5], rtol=1e-6)
    learner = make_learner()
    feed(learner, batch)
    rows = np.arange(len(batch))
    ids = learner.buffer.trajectory_ids(rows)
    told = {made.row: value for made, value in zip(ids, learner.buffer.mu_logprobs(rows), strict=True)}
    np.testing.assert_array_equal([told[i] for i in rows], response_logprobs(batch))


def test_weights_at_first_use_are_the_ratio_to_the_sampler_where_it_told():
    config = run_config(parameters={"ratioAlpha": 0.5, "ratioClip": 2.0})
    batch = make_shard(0, samples=4)
    learner = make_learner(config)
    feed(learner, batch)
    own = learner.policy.reference_logprobs(learner.packed(np.arange(len(batch)))).tolist()
    for drift, expected in ((math.log(0.25), 0.5), (math.log(2.25), 1.5), (math.log(100.0), 2.0), (None, 1.0)):
        learner = make_learner(config)
        feed(learner, telling(batch, lambda i, d=drift: None if d is None else own[i] - d))
        result = learner.train_step(live_config(), epoch=1)
        np.testing.assert_allclose(result.weights, expected * result.plan.weights, rtol=1e-4)


def test_a_lowered_baseline_reaches_the_gradient():
    moved = {}
    for shift in (0.0, 0.5):
        learner = make_learner(run_config(parameters={"baselineShift": shift}))
        feed(learner, make_shard(0, prompts=(0, 1, 2), samples=4))
        result = learner.train_step(live_config(), epoch=1)
        moved[shift] = (result.loss, result.update.grad_norm)
    assert moved[0.5][0] > moved[0.0][0]  # by -0.5 x the mean log-probability
    assert moved[0.5][1] != pytest.approx(moved[0.0][1], rel=1e-3)


def restored_from(learner, batches):
    twin = make_learner(learner.config, seed=99)
    twin.policy.reference_model.load_state_dict(learner.policy.reference_model.state_dict())
    shards = {s.header.id: s for s in batches}
    state = learner.state()
    twin.restore(state, learner.step, lambda ids: [new_rows(shards[i], Lineage()) for i in ids])
    return twin


@pytest.mark.parametrize(
    ("parameters", "told"), [({}, False), ({"ratioAlpha": 0.5}, False), ({"ratioAlpha": 0.5}, True)]
)
def test_a_restored_learner_goes_on_bit_for_bit(parameters, told):
    learner = make_learner(run_config(parameters=parameters))
    batches = [make_shard(0), make_shard(1)]
    batches = [telling(b, lambda i: -20.0 - i if i % 3 else None) for b in batches] if told else batches
    feed(learner, *batches)
    for _ in range(3):
        learner.train_step(live_config(), epoch=1)
    twin = restored_from(learner, batches)
    for _ in range(4):
        a, b = learner.train_step(live_config(), epoch=1), twin.train_step(live_config(), epoch=1)
        assert a.loss == b.loss
    mine, theirs = weights(learner), weights(twin)
    assert all(torch.equal(mine[n], theirs[n]) for n in mine)
    assert learner.counters.state() == twin.counters.state()


def test_waiting_draws_no_random_number():
    learner, patient = make_learner(), make_learner()
    for _ in range(3):
        assert patient.waiting_for(live_config()) is not None
    for each in (learner, patient):
        feed(each, make_shard(0))
    for _ in range(3):
        assert patient.waiting_for(live_config()) is None
    assert learner.train_step(live_config(), epoch=1).loss == patient.train_step(live_config(), epoch=1).loss


def follows_no_single_token(learner):
    """A policy that cannot do what some settings ask, as a model without layers that can be recomputed."""
    follow = learner.policy.configure

    def configure(settings):
        if settings.micro_batch_tokens == 1:
            raise UserError("cannot")
        follow(settings)

    learner.policy.configure = configure
    return learner


def test_later_settings_that_the_policy_cannot_follow_are_refused_once_and_the_old_ones_stay():
    learner, twin = follows_no_single_token(make_learner()), make_learner()
    for each in (learner, twin):
        feed(each, make_shard(0))
    old, wrong = live_config(), live_config(micro_batch_tokens=1)
    with capture_logs() as logged:
        for settings in (old, wrong, wrong, old):
            assert learner.train_step(settings, epoch=1).loss == twin.train_step(old, epoch=1).loss
    assert [(e["event"], e["error"]) for e in logged if "error" in e] == [("config_refused", "cannot")]


def test_first_settings_that_the_policy_cannot_follow_end_the_run():
    learner = follows_no_single_token(make_learner())
    feed(learner, make_shard(0))
    with pytest.raises(UserError, match="cannot"):
        learner.train_step(live_config(micro_batch_tokens=1), epoch=1)


def test_a_shard_that_claims_a_future_policy_is_refused_before_anything_changes():
    learner = make_learner()
    with pytest.raises(CorruptObject, match="this run is at epoch 1, step 0"):
        feed(learner, make_shard(0, version=7))
    assert len(learner.buffer) == 0 and learner.counters.ingested_rows == 0


def test_versions_of_a_discarded_future_count_as_the_resume_step():
    book = replace(Bookkeeping.begun(1), step=4, epoch=2, lineage=Lineage(resume_steps={1: 0, 2: 4}))
    learner = make_learner()
    feed(learner, make_shard(0, version=9), book=book)
    rows = np.arange(len(learner.buffer))
    assert set(learner.buffer.versions(rows).tolist()) == {4}
