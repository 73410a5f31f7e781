"""How arms without a searcher call a reward: alike, whether it computes or waits."""

import os
import threading

import pytest
from bench.gpu.grading import BUILT_IN, Graders, calls_at_once, judge, slow_settings
from bench.gpu.places import JOB

from tba.cli.jobfile import load_job
from tba.contracts.config import Reward
from tba.searcher.rewarding import num_workers


def slow(seconds: float) -> Reward:
    """As the job of count-slow has it."""
    return load_job(JOB, slow_settings(seconds)).spec.task.reward


def test_as_many_calls_at_a_time_as_one_searcher_has_processes():
    assert calls_at_once(len(os.sched_getaffinity(0))) == num_workers(None)
    assert [calls_at_once(cores) for cores in (1, 2, 8, 16, 64)] == [1, 1, 4, 8, 8]


def test_the_processes_of_an_arm_share_them(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    assert [Graders(slow(0.0), processes=n).calls for n in (1, 2, 8, 64)] == [8, 4, 1, 1]
    told = load_job(JOB, [*slow_settings(0.0), "task.reward.workers=80"]).spec.task.reward
    assert [Graders(told, processes=n).calls for n in (1, 2)] == [80, 40], "as the job says, if it does"


def test_a_reward_that_waits_says_what_the_one_that_computes_says():
    calls = [("q", "it is 3", "3"), ("q", "it is 4", "3"), ("p", "it is 4", "4")]
    for reward in (slow(0.0), Reward(name=BUILT_IN)):
        assert Graders(reward).score(calls) == [1.0, 0.0, 1.0]
        assert judge(reward)("q", "it is 3", "3") == 1.0


def test_equal_answers_to_a_prompt_are_asked_about_once_a_batch(monkeypatch):
    graders = Graders(slow(0.0))
    asked = []
    monkeypatch.setattr(graders, "_function", lambda *call: asked.append(call) or 1.0)
    for _ in range(2):
        graders.score([("q", "a", "1"), ("q", "a", "1"), ("p", "a", "1")])
    assert sorted(asked) == sorted([("q", "a", "1"), ("p", "a", "1")] * 2)


def test_calls_wait_beside_each_other_and_held_out_responses_for_nothing(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    graders, together = Graders(slow(0.0)), threading.Barrier(8)
    reward = graders._function

    def after_all_are_asked(*call):
        together.wait(60)
        return reward(*call)

    monkeypatch.setattr(graders, "_function", after_all_are_asked)
    assert graders.score([("q", f"{i}", "1") for i in range(8)]) == [0.0, 1.0, *[0.0] * 6]
    judge(slow(3600.0))("q", "1", "1")


def test_an_error_of_the_reward_is_not_a_reward():
    for reward in (slow(0.0), Reward(name=BUILT_IN)):
        with pytest.raises(ValueError, match="answer"):
            Graders(reward).score([("q", "1", None)])
