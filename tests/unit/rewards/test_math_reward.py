import pytest

math_reward = pytest.importorskip("tba.rewards.math")


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (r"so $\boxed{\frac{1}{2}}$", r"\frac{1}{2}", 1.0),
        (r"so \boxed{0.5}", r"$\frac{1}{2}$", 1.0),
        ("The answer is 1,234", "1234", 1.0),
        (r"$x = 3$", "3", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        (r"\boxed{7}", "8", 0.0),
        ("I do not know", "8", 0.0),
        (r"\boxed{\frac{}{}}}}{{$$ \sqrt{", "8", 0.0),
        ("", "8", 0.0),
    ],
)
def test_mathematical_equality_is_scored(response, answer, expected):
    assert math_reward.reward("q", response, answer) == expected


@pytest.mark.parametrize("answer", [None, "", "  "])
def test_a_missing_gold_expression_is_an_error_and_not_zero(answer):
    with pytest.raises(ValueError, match="answer"):
        math_reward.reward("q", r"\boxed{8}", answer)
