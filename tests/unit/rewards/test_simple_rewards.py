import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.rewards import arithmetic, fake, regex


@pytest.mark.parametrize(
    ("response", "expected"),
    [("12", 1.0), (" 12\n", 1.0), ("012", 0.0), ("+12", 0.0), ("12.", 0.0), ("12 34", 0.0), ("", 0.0), ("١٢", 0.0)],
)
def test_only_the_exact_integer_is_right(response, expected):
    assert arithmetic.reward("5+7=", response, "12") == expected


@pytest.mark.parametrize("answer", [None, "", "twelve", "1.0", "1 2"])
def test_arithmetic_without_an_integer_answer_is_an_error_and_not_zero(answer):
    with pytest.raises(ValueError, match="answer"):
        arithmetic.reward("5+7=", "12", answer)


@given(st.integers(), st.integers())
def test_arithmetic_scores_one_exactly_for_equal_integers(a, b):
    assert arithmetic.reward("q", str(a), str(b)) == float(a == b)


@pytest.mark.parametrize(
    ("response", "parameters", "expected"),
    [
        ("so Answer: yes", {"pattern": r"Answer: (\w+)", "group": 1}, 1.0),
        ("so Answer: no", {"pattern": r"Answer: (\w+)", "group": 1}, 0.0),
        ("so Answer: yes", {"pattern": r"Answer: (?P<a>\w+)", "group": "a"}, 1.0),
        ("yes", {"pattern": r"\w+", "mode": "fullmatch"}, 1.0),
        ("yes!", {"pattern": r"\w+", "mode": "fullmatch"}, 0.0),
        ("no yes", {"pattern": r"\w+"}, 0.0),  # the first match counts
        ("b", {"pattern": "(yes)|b", "group": 1}, 0.0),  # the group took no part
        ("<a> yes </a>", {"pattern": "<a>(.*?)</a>", "group": 1}, 1.0),
    ],
)
def test_the_matched_group_is_compared_with_the_answer(response, parameters, expected):
    regex.check_parameters(**parameters)
    assert regex.reward("q", response, "yes", **parameters) == expected


def test_regex_without_an_answer_is_an_error_and_not_zero():
    with pytest.raises(ValueError, match="answer"):
        regex.reward("q", "yes", None, pattern="yes")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"pattern": "("}, "no regular expression"),
        ({"pattern": "a", "group": 1}, "no group 1"),
        ({"pattern": "(a)", "group": "b"}, "no group 'b'"),
        ({"pattern": "a", "mode": "match"}, "search, fullmatch"),
        ({"pattern": 3}, "text"),
    ],
)
def test_bad_regex_parameters_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        regex.check_parameters(**parameters)


def test_the_fake_reward_depends_on_the_text_and_seed_alone():
    values = [fake.reward("q", str(i), None) for i in range(50)]
    assert values == [fake.reward("q", str(i), "ignored") for i in range(50)]
    assert values != [fake.reward("q", str(i), None, seed=1) for i in range(50)]
    assert values != [fake.reward("p", str(i), None) for i in range(50)]


@pytest.mark.parametrize("mean", [0.0, 0.1, 0.5, 1.0])
def test_the_fake_reward_has_the_asked_mean(mean):
    values = [fake.reward("q", str(i), None, mean=mean) for i in range(10_000)]
    assert set(values) <= {0.0, 1.0}
    assert abs(sum(values) / len(values) - mean) < 0.02  # 4 standard deviations at 0.5


@pytest.mark.parametrize("parameters", [{"mean": 1.5}, {"mean": -0.1}, {"seed": "x"}, {"seed": True}])
def test_bad_fake_parameters_are_refused(parameters):
    with pytest.raises(ValueError, match="must be"):
        fake.check_parameters(**parameters)
