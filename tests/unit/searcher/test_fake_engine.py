from types import SimpleNamespace

import pytest

from tba.contracts.errors import UserError
from tba.contracts.records import FinishReason, PolicyId, Span
from tba.searcher.engines.engine import Request
from tba.searcher.engines.fake import FakeEngine, fake_settings


def weights(version: int):
    return SimpleNamespace(manifest=SimpleNamespace(policy=PolicyId(1, version)))


def request(i: int, *, seed: int | None = None, max_tokens: int = 1000, greedy: bool = False, prompt=(1, 2)) -> Request:
    return Request(i, prompt, max_tokens, 1.0, greedy, i if seed is None else seed)


def engine(version: int = 0, **settings) -> FakeEngine:
    made = FakeEngine(fake_settings(settings))
    made.load(weights(version))
    return made


def drain(made: FakeEngine) -> list:
    done = []
    while made.in_flight:
        done += made.step()
    return done


def test_long_responses_finish_later():
    made = engine(tokensPerStep=4, lengths={"distribution": "uniform", "low": 1, "high": 64})
    for i in range(50):
        made.submit(request(i))
    lengths = [len(r.tokens) for r in drain(made)]
    assert [-(-n // 4) for n in lengths] == sorted(-(-n // 4) for n in lengths)
    assert len(set(lengths)) > 10


def test_a_fixed_length_ends_with_the_end_token_and_a_cut_one_does_not():
    made = engine(lengths={"distribution": "fixed", "median": 5}, eosToken=3, vocabulary=10)
    made.submit(request(0))
    made.submit(request(1, max_tokens=4))
    cut, whole = sorted(drain(made), key=lambda r: len(r.tokens))
    assert (len(whole.tokens), whole.tokens[-1], whole.finish_reason) == (5, 3, FinishReason.STOP)
    assert (len(cut.tokens), cut.finish_reason) == (4, FinishReason.LENGTH)
    assert 3 not in whole.tokens[:-1] + cut.tokens and max(whole.tokens) < 10


def test_a_swap_in_flight_splits_the_span():
    made = engine(tokensPerStep=4, lengths={"distribution": "fixed", "median": 10})
    made.submit(request(0))
    made.step()
    made.load(weights(7))
    (response,) = drain(made)
    assert response.spans == [Span(4, 1, 0), Span(6, 1, 7)]


def test_distinct_bounds_the_different_responses_of_a_prompt():
    made = engine(distinct=3)
    for i in range(40):
        made.submit(request(i, seed=i * 977))
    responses = {tuple(r.tokens): r.reward for r in drain(made)}
    assert len(responses) == 3


def test_rewards_are_zero_or_one_with_the_mean_and_rise_with_the_version():
    def mean(version: int) -> float:
        made = engine(version, rewardMean=0.2, versionGain=0.05)
        for i in range(2000):
            made.submit(request(i))
        rewards = [r.reward for r in drain(made)]
        assert set(rewards) == {0.0, 1.0}
        return sum(rewards) / len(rewards)

    assert abs(mean(0) - 0.2) < 0.04
    assert abs(mean(10) - 0.7) < 0.05


def test_the_rate_limit_is_kept_by_sleeping():
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    made = FakeEngine(
        fake_settings({"tokensPerSecond": 100, "lengths": {"distribution": "fixed", "median": 50}}),
        clock=lambda: now[0],
        sleep=sleep,
    )
    made.load(weights(0))
    for i in range(4):
        made.submit(request(i))
    drain(made)
    assert now[0] == pytest.approx(2.0)


def test_the_same_request_gives_the_same_response():
    first, second = engine(), engine()
    for made in (first, second):
        made.submit(request(5))
    assert drain(first)[0].tokens == drain(second)[0].tokens


def test_unknown_settings_are_refused_with_their_name():
    with pytest.raises(UserError, match=r"extraArgs\.lenghts"):
        fake_settings({"lenghts": {}})
    with pytest.raises(UserError, match=r"lengths\.sigma"):
        fake_settings({"lengths": {"sigma": -1}})


def test_nothing_can_be_submitted_before_weights():
    made = FakeEngine(fake_settings({}))
    assert made.capacity == 0
    with pytest.raises(RuntimeError):
        made.submit(request(0))
