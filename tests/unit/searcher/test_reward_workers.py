"""How many processes a searcher scores with, and how that follows the job."""

import pytest
from pydantic import ValidationError

from tba.contracts.config import MAX_REWARD_WORKERS, LiveConfig, Reward
from tba.searcher.rewarding import Rewarding, num_workers


class Pool:
    """Notes what it is asked to be."""

    def __init__(self) -> None:
        self.asked = []

    def set_limits(self, timeout_seconds, memory_bytes):
        self.asked.append((timeout_seconds, memory_bytes))

    def resize(self, wanted):
        self.asked.append(wanted)


def live(**changes) -> LiveConfig:
    return LiveConfig.model_validate({"storage": {"uri": "s3://b/p"}, **changes})


@pytest.mark.parametrize(("cpus", "processes"), [(1, 1), (2, 1), (5, 2), (16, 8), (64, 8)])
def test_half_of_the_cpus_score_but_at_most_eight(monkeypatch, cpus, processes):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cpus)))
    assert num_workers(None) == processes


def test_a_job_may_ask_for_more_than_there_are_cpus():
    assert num_workers(MAX_REWARD_WORKERS) == MAX_REWARD_WORKERS


def test_the_pool_is_told_what_has_changed_and_nothing_else():
    pool = Pool()
    rewarding = Rewarding(pool)  # type: ignore[arg-type]
    rewarding.follow(live())  # as it was started
    rewarding.follow(live())
    assert pool.asked == []
    rewarding.follow(live(rewardWorkers=64))
    assert pool.asked == [64]
    rewarding.follow(live(rewardWorkers=64, rewardTimeoutSeconds=3))
    assert pool.asked[1:] == [(3.0, 2 * 1024**3)]
    rewarding.follow(live(rewardTimeoutSeconds=3))
    assert pool.asked[2:] == [num_workers(None)]


@pytest.mark.parametrize("workers", [0, MAX_REWARD_WORKERS + 1])
def test_a_number_of_processes_that_cannot_be_is_refused(workers):
    with pytest.raises(ValidationError, match="workers"):
        Reward(name="gsm8k", workers=workers)
