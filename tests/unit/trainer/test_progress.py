"""From a step's result to the row that people and the report see: every number by hand."""

import time
from dataclasses import replace

import numpy as np
import pytest
from support.learning import feed, live_config, make_learner, make_shard
from support.scaling_run import START, autoscaling
from support.scaling_run import job as scaled_job

from tba import telemetry
from tba.contracts.records import Latest, RunState
from tba.report.history import assemble
from tba.report.split import trainer_time
from tba.trainer.colocated import NAME as COLOCATED
from tba.trainer.counters import SearcherTally
from tba.trainer.learner import StepResult
from tba.trainer.optim import Update
from tba.trainer.phases import Timing
from tba.trainer.progress import StepMetrics, Tracker, sample_row, step_row
from tba.trainer.sampling import BatchPlan
from tba_operator.scaling import decide
from tba_operator.world import ProgressSample, ScalingMemory

PHASES = {"wait_data": 0.5, "wait_storage": 0.25, "reference": 0.125, "forward_backward": 1.25, "optimizer": 0.25,
          "stage": 0.25, "other": 0.375}  # fmt: skip
TIMING = Timing(step_seconds=2.0, phase_seconds=PHASES)  # 3 s since the step before


def small_result(**changes) -> StepResult:
    """Two groups of three slots. Group 0: row 4 twice, row 5 once (ratio weight 1/2). Group 1: one row three times."""
    plan = BatchPlan(
        step=6,
        rows=np.array([[4, 4, 5], [7, 7, 7]]),
        weights=np.array([[2, 0, 1], [3, 0, 0]], dtype=np.float32),
        prompt_ids=np.array([0, 1]),
        replay=np.array([False, True]),
        with_replacement=np.array([False, True]),
        staleness=np.array([[1, 1, 0], [4, 4, 4]]),
        mop_recycles=9,
    )
    result = StepResult(
        plan=plan,
        loss=-0.75,
        beta=0.5,
        ell=np.array([[1.0, 99.0, 4.0], [2.0, 99.0, 99.0]], dtype=np.float32),
        rewards=np.array([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=np.float32),
        weights=np.array([[2.0, 0.0, 0.5], [3.0, 0.0, 0.0]], dtype=np.float32),
        log_z=np.array([0.25, 0.75], dtype=np.float32),
        update=Update(grad_norm=3.5, clipped=True, learning_rate=1e-4),
        trained_tokens=11,
        scored_tokens=7,
        row_tokens=13,
        phase_seconds={"reference": 0.125, "forward_backward": 1.25, "optimizer": 0.25},
        reference_changed=False,
    )
    return replace(result, **changes)


def row_of(result: StepResult, learner=None, **changes):
    learner = learner or make_learner()
    return step_row(learner, result, TIMING, epoch=3, published_version=5, **changes)


def test_statistics_of_the_batch_by_hand():
    row = row_of(small_result())
    # Multiplicities 2, 1 | 3, in all 6. Empty slots (ell 99) must not show anywhere.
    assert row.reward_mean == pytest.approx((2 * 1 + 1 * 0 + 3 * 1) / 6)
    assert row.kl == pytest.approx((2 * 1 + 1 * 4 + 3 * 2) / 6)
    assert row.log_z == pytest.approx(0.5)
    # Group 0: mean ell 2, variance (2 * 1 + 1 * 4) / 3 = 2; reward mean 2/3, variance 2/9. Group 1 does not vary.
    ell_std, reward_std = np.sqrt(2) / 2, np.sqrt(2 / 9) / 2
    assert row.ell_std == pytest.approx(ell_std)
    assert row.beta_ratio == pytest.approx(0.5 * ell_std / reward_std)
    assert row.signal_groups_fraction == 0.5
    # Weights of the six responses 1, 1, 1/2 | 1, 1, 1: (5.5)^2 / (6 * 5.25).
    assert row.ess == pytest.approx(5.5**2 / (6 * 5.25))


def test_counts_of_the_plan_by_hand():
    row = row_of(small_result())
    assert row.staleness == {0: 1, 1: 2, 4: 3}
    assert (row.replay_slots, row.slots, row.with_replacement, row.mop_recycles) == (1, 2, 1, 9)


def test_what_is_passed_through_stands_in_its_own_field():
    row = row_of(small_result())
    assert (row.epoch, row.published_version) == (3, 5)
    assert (row.step_seconds, row.wait_data_seconds, row.wait_storage_seconds) == (2.0, 0.5, 0.25)
    assert (row.score_seconds, row.train_seconds, row.scored_tokens) == (0.125, 1.5, 7)
    assert (row.phase_seconds, row.span_seconds) == (PHASES, 3.0)
    assert (row.loss, row.beta) == (-0.75, 0.5)
    assert (row.grad_norm, row.grad_clipped, row.learning_rate) == (3.5, True, 1e-4)


def test_equal_weights_have_the_whole_effective_sample_size():
    result = small_result()
    assert row_of(replace(result, weights=result.plan.weights)).ess == pytest.approx(1.0)


def test_rewards_that_do_not_vary_give_no_ratio_and_no_signal():
    row = row_of(small_result(rewards=np.full((2, 3), 0.5, dtype=np.float32)))
    assert (row.beta_ratio, row.signal_groups_fraction) == (0.0, 0.0)
    assert row.reward_mean == pytest.approx(0.5)


def test_learner_fills_the_cumulative_numbers():
    learner = make_learner()
    feed(learner, make_shard(0))
    result = learner.train_step(live_config(), epoch=1)
    learner.counters.quarantined_shards, learner.counters.wall_seconds = 2, 7.5
    row = row_of(result, learner)
    assert (row.step, row.ingested_rows, row.trained_rows, row.quarantined_shards) == (1, 24, 12, 2)
    assert row.trained_tokens == learner.buffer.num_tokens(result.plan.rows).sum()
    assert row.buffer_rows == len(learner.buffer) and row.buffer_bytes == learner.buffer.memory_bytes
    assert row.replay_ratio == pytest.approx(12 / 24)
    assert row.wall_seconds == 7.5
    assert 0 < row.ess <= 1.0 + 1e-6
    shard = make_shard(0)
    assert row.generated_reward_mean == pytest.approx(float(shard.rewards.mean()))
    later = row_of(result, learner)
    assert later.generated_reward_mean is None, "told once"
    state = Tracker(total_steps=9)
    assert state.progress().reward is None
    for each in (row, later):  # without new responses the last mean stays
        state.stepped(each)
        assert state.progress().reward == row.generated_reward_mean


def test_metrics_of_steps_by_hand():
    learner, metrics = make_learner(), StepMetrics(mop_recycles=7, trained_tokens=100)
    learner.counters.trained_tokens = 100
    before = telemetry.MOP_RECYCLES._value.get()
    tokens, flops = telemetry.TRAINED_TOKENS._value.get(), telemetry.MODEL_FLOPS._value.get()
    for clipped, recycles in ((True, 7), (False, 9), (False, 9), (True, 12)):
        result = small_result(update=Update(grad_norm=3.5, clipped=clipped, learning_rate=1e-4))
        result = replace(result, plan=replace(result.plan, mop_recycles=recycles))
        learner.counters.trained_tokens += 10
        metrics.record(row_of(result, learner, model_flops=2.5, peak_flops=1e12))
    assert telemetry.GRAD_CLIP_FRACTION._value.get() == 0.5
    assert telemetry.TRAINED_TOKENS._value.get() - tokens == 40, "the 100 were counted by the one before"
    assert telemetry.MODEL_FLOPS._value.get() - flops == 10.0
    assert telemetry.PEAK_FLOPS._value.get() == 1e12
    assert telemetry.MOP_RECYCLES._value.get() - before == 5, "of this process: the 7 were counted by the one before"


def test_sample_names_its_version_and_searcher():
    learner = make_learner()
    feed(learner, make_shard(0))
    result = learner.train_step(live_config(), epoch=1)
    row = sample_row(learner, result, epoch=1, prompt="p", response="r", slot=2)
    assert (row.prompt, row.response, row.searcher, row.version) == ("p", "r", "searcher-0", 0)
    assert row.reward == result.rewards[2, 0]


def tracker(**changes) -> Tracker:
    return Tracker(run_id="r", pod_uid=None, epoch=1, total_steps=20, **changes)


def test_progress_before_the_first_step_guesses_nothing():
    progress = tracker().progress()
    assert (progress.percentage, progress.reward, progress.staleness_mean) == (0.0, None, None)
    assert (progress.eta_seconds, progress.trainer_idle_percent) == (None, None)


def test_progress_of_a_resumed_run_by_hand():
    live = tracker(step=4, state="Training")
    learner = make_learner()
    learner.step = 5
    live.stepped(row_of(small_result(), learner))
    learner.step = 6
    live.stepped(row_of(small_result(), learner))
    progress = live.progress()
    assert (progress.step, progress.percentage) == (6, 30.0)
    assert progress.trainer_idle_percent == pytest.approx(100 * 1.5 / 6)
    # 2 steps of this process took 2 * 3 s; 14 are left.
    assert progress.eta_seconds == pytest.approx(3 * 14)
    assert progress.staleness_mean == pytest.approx((1 * 2 + 4 * 3) / 6)
    assert abs(progress.last_updated_time - time.time()) < 60


def test_the_wait_for_the_first_rows_of_a_run_is_in_neither_idle_share_nor_eta():
    live, learner, rows = tracker(), make_learner(), []
    for step, waited in ((1, 1000.0), (2, 0.5)):
        learner.step = step
        timing = Timing(step_seconds=2.0, phase_seconds={**PHASES, "wait_data": waited})
        rows.append(step_row(learner, small_result(), timing, epoch=3, published_version=0))
        live.stepped(rows[-1])
    progress = live.progress()
    assert progress.eta_seconds == pytest.approx(3 * 18)
    assert progress.trainer_idle_percent == pytest.approx(100 * 0.75 / 3)
    assert progress.trainer_idle_percent == pytest.approx(trainer_time(assemble(rows)).idle_percent)


def test_eta_follows_the_pace_of_the_last_steps():
    live, learner = Tracker(100), make_learner()
    for step in range(1, 41):
        learner.step = step
        timing = Timing(step_seconds=2.0, phase_seconds={"other": 50.0 if step <= 20 else 2.0})
        live.stepped(step_row(learner, small_result(), timing, epoch=1, published_version=0))
    assert live.progress().eta_seconds == pytest.approx(2 * 60)


def test_progress_carries_speed_checkpoint_and_alerts_and_a_complete_run_has_no_alerts():
    live = tracker(checkpoint_step=4, state="Training")
    live.alarms.first_pass_at_k = 0.0
    learner = make_learner()
    for step in (5, 6):
        learner.step = step
        live.stepped(row_of(small_result(), learner))
    progress = live.progress()
    assert (progress.checkpoint_step, progress.steps_per_busy_second) == (4, pytest.approx(1 / 2.25))
    assert progress.trajectories_per_searcher_second is None
    assert [alert.reason for alert in progress.alerts] == ["NoRewardSignal"]
    live.state = "Complete"
    assert live.progress().alerts == []


def scaled(elsewhere: dict[str, float], *, searcher_set: str | None = "run-searcher") -> ScalingMemory:
    """What the autoscaler has decided after ten minutes of 4 pods, 2 rows/s each, beside searchers of these rates."""
    live = tracker(state="Training", searcher_set=searcher_set)
    for _ in range(3):
        live.rates.stepped(8.0, now=0.0)  # 128 rows in 8 s: 16 rows/s
    heard = []
    for name, rate in ({f"run-searcher-{i}": 2.0 for i in range(4)} | elsewhere).items():
        for up_seconds in (10.0, 20.0):
            live.delivered(name, name, round(10 * rate), up_seconds=up_seconds, now=time.monotonic())
        heard.append(SearcherTally(name, first_seen=time.time(), last_seen=time.time()))
    memory = None
    for at in range(0, 600, 10):
        live.heard_of(heard, time.time())
        found = ProgressSample(live.progress(), START + at)
        memory = decide(autoscaling(), 4, memory, found, job=scaled_job(replicas=4), ready=4, now=START + at)
    assert memory is not None
    return memory


def test_searchers_that_run_elsewhere_neither_keep_the_rate_unknown_nor_change_the_number_of_pods():
    alone = scaled({})
    assert (alone.rate.value, alone.desired) == (pytest.approx(2.0), 8)
    elsewhere = {"extra-0": 90.0, "run-searcher-x": 0.1, "other-searcher-3": 5.0, COLOCATED: 0.1}
    assert scaled(elsewhere) == alone
    unaware = scaled(elsewhere, searcher_set=None)  # as by a pod of an older operator
    assert (unaware.rate.value, unaware.desired) == (None, 4)


@pytest.mark.parametrize("given", [{}, {"TBA_SEARCHER_SET": ""}])
def test_whom_nobody_tells_the_set_of_searchers_counts_all(given):
    assert Tracker.of(20, given).searcher_set is None
    told = Tracker.of(20, {"TBA_SEARCHER_SET": "run-searcher", "TBA_POD_UID": "u"})
    assert (told.searcher_set, told.progress().pod_uid) == ("run-searcher", "u")


def test_a_trainer_that_finds_the_run_ended_tells_how_far_it_came():
    live = Tracker(20)
    live.found_complete("r", Latest(commit=9, epoch=2, version=20, step=20, state=RunState.COMPLETE, nonce="n"))
    progress = live.progress()
    assert (progress.state, progress.run_id, progress.step, progress.percentage) == ("Complete", "r", 20, 100.0)


def test_what_only_the_user_can_help_is_a_failure():
    live = Tracker(20)
    live.failed("spec.x: must be 1, got 2: set 1")
    assert (live.progress().state, live.progress().detail) == ("Failed", "spec.x: must be 1, got 2: set 1")
