from collections import Counter

import pytest
from support.synthetic_run import START, event, latest, run_record, searcher, step_row, whole_run

from tba.report.history import History, assemble
from tba.report.summary import summarise, weighted_mean


def history(rows, **changes):
    return assemble(rows, run=run_record(), latest=latest(**changes))


def test_nothing_yet_is_absent_and_all_numbers_are_unknown():
    summary = summarise(History(), START)
    assert (summary.state, summary.step, summary.reward, summary.eta_seconds) == ("Absent", 0, None, None)


def test_numbers_by_hand():
    rows = [
        step_row(s, wall_seconds=10.0 * s, reward_mean=float(s), generated_reward_mean=None if s % 2 else 2.0 * s,
                 phase_seconds={"wait_data": 2.0, "wait_storage": 0.5, "forward_backward": 6.0, "other": 1.5},
                 model_flops=2e13, peak_flops=1e13,
                 staleness={0: 3, 4: 1}, generated_tokens=500 * s, trained_tokens=1000 * s, replay_slots=1, slots=7)
        for s in range(1, 5)
    ]  # fmt: skip
    summary = summarise(history(rows), START + 20)
    assert (summary.reward, summary.trained_reward) == (6.0, 2.5)
    assert summary.staleness_mean == 1.0
    assert summary.staleness_max == 4
    assert summary.trainer_idle_percent == pytest.approx(25.0)
    assert summary.trainer_mfu == pytest.approx(0.2)
    assert summary.trainer_seconds["forward_backward"] == 18.0, "of the three steps after the first"
    assert summary.generated_tokens_per_second == 50.0
    assert summary.trained_tokens_per_second == 100.0
    assert (summary.replay_slots, summary.slots) == (4, 28)
    assert summary.eta_seconds == pytest.approx(10.0 * (120 - 4))


def test_means_are_of_the_last_twenty_steps():
    rows = [step_row(s, generated_reward_mean=None, reward_mean=0.0 if s <= 30 else 1.0) for s in range(1, 51)]
    assert summarise(history(rows), START).reward == 1.0


def test_a_searcher_not_heard_of_for_a_minute_is_not_alive():
    rows = [searcher("a", "1" * 32, step=0), searcher("b", "2" * 32, step=30)]  # last seen at START and START + 90
    assert summarise(history(rows), START + 100).searchers_alive == 1
    assert summarise(history(rows), START + 100).searchers == 2


def test_a_trainer_that_waits_says_what_for_until_it_steps_again():
    waiting = [step_row(5), event("waiting", step=5, time=START + 16, detail="replay ratio 2.1 > 2")]
    summary = summarise(history(waiting), START + 20)
    assert (summary.state, summary.detail) == ("WaitingForData", "replay ratio 2.1 > 2")
    assert summarise(history([*waiting, step_row(6)]), START + 20).state == "Training"


def test_before_the_first_step_searchers_and_responses_without_a_reward_are_seen():
    rows = [
        event("started"),
        event("waiting", time=START + 1, detail="initial trajectories: 0 of 500; 328 responses have no reward"),
        searcher("a", "1" * 32, step=0, rows=328, failed=328),
    ]
    summary = summarise(history(rows, step=0), START + 20)
    assert (summary.state, summary.detail) == ("WaitingForData", rows[1].detail)
    assert (summary.searchers_alive, summary.trajectories, summary.failed_trajectories) == (1, 328, 328)


def test_responses_that_lose_their_rewards_after_the_last_step_are_counted():
    rows = [step_row(1, ingested_rows=600, failed_rows=0), searcher("a", "1" * 32, step=1, rows=900, failed=300)]
    summary = summarise(history(rows), START + 20)
    assert (summary.trajectories, summary.failed_trajectories) == (900, 300)


def test_a_run_whose_searchers_deliver_is_not_silent():
    rows = [event("started"), event("waiting", detail="more rows"), searcher("a", "1" * 32, step=50)]  # START + 150
    assert summarise(history(rows, step=0), START + 200).state == "WaitingForData"
    assert summarise(history(rows[:2], step=0), START + 200).state == "Silent"


def test_a_wait_for_storage_shows_until_it_is_over():
    rows = [step_row(5), event("waiting_storage", step=5, time=START + 16, detail="storage has had no space left")]
    summary = summarise(history(rows), START + 20)
    assert (summary.state, summary.detail) == ("WaitingForStorage", "storage has had no space left")
    over = event("continued", step=5, time=START + 18)
    assert summarise(history([*rows, over]), START + 20).state == "Training"


def test_a_run_without_news_is_silent_not_training():
    assert summarise(history([step_row(5)]), START + 10_000).state == "Silent"


def test_a_trainer_that_said_it_stops_is_stopped_until_one_resumes():
    rows = [event("started"), step_row(5), event("checkpoint", step=5), event("stopped", step=5, detail="SIGTERM")]
    for now in (START + 16, START + 10_000):
        summary = summarise(history(rows), now)
        assert (summary.state, summary.detail, summary.eta_seconds) == ("Stopped", "SIGTERM", None)
    resumed = [*rows, event("resumed", epoch=2, step=5, time=START + 500)]
    assert summarise(history(resumed), START + 501).state == "Training"


@pytest.mark.parametrize("state", ["Complete", "Failed"])
def test_a_terminal_state_stays_and_has_no_time_left(state):
    summary = summarise(history(whole_run(40), state=state), START + 10_000)
    assert summary.state == state
    assert summary.eta_seconds is None


def test_a_run_whose_trainer_loads_the_model_is_starting():
    summary = summarise(history([event("started", detail="loads the model")], step=0), START + 1)
    assert (summary.state, summary.detail) == ("Starting", "loads the model")


def test_json_names_are_camel_case():
    names = summarise(History(), START).to_dict()
    assert "trainerIdlePercent" in names
    assert not [n for n in names if "_" in n]


def test_a_mean_of_nothing_is_unknown():
    assert weighted_mean(Counter()) is None
