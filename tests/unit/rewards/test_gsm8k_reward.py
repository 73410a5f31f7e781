import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.rewards.gsm8k import check_parameters, last_number, marked_number, reward

GOLD = "Each costs 3 * 2 = <<3*2=6>>6.\nSo 12 cost 12 * 6 = 72.\n#### 72"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it is 1,234", 1234.0),
        ("-3.50", -3.5),
        ("1e3", 1000.0),
        ("1.5E-2 km", 0.015),
        ("The answer is 42.", 42.0),
        ("a .5 share", 0.5),
        ("+7", 7.0),
        ("1,234,567.89 dollars", 1234567.89),
        ("first 5, then 6", 6.0),
        ("10-5", -5.0),  # as in the paper's expression: the sign belongs to the number
        ("2e", 2.0),
        ("12.5.3", 0.3),
        ("no number", None),
        ("", None),
        ("- . e5x", 5.0),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 1,234", 1234.0),
        ("####-3.50 and 7", -3.5),
        ("#### $18", 18.0),
        ("#### 1\n#### 2", 2.0),
        ("#### about 5", None),
        ("5", None),
        ("####", None),
    ],
)
def test_the_number_after_the_last_mark(text, number):
    assert marked_number(text) == number


@pytest.mark.parametrize(
    ("response", "mode", "expected"),
    [
        ("so 72", "last_number", 1.0),
        ("so 72.0.", "last_number", 1.0),
        ("so 72 of 100", "last_number", 0.0),
        ("", "last_number", 0.0),
        ("#### 72 apples of 100", "strict", 1.0),
        ("so 72", "strict", 0.0),
    ],
)
def test_a_response_is_scored_by_its_number(response, mode, expected):
    assert reward("q", response, GOLD, mode=mode) == expected


def test_the_marked_gold_number_counts_even_if_another_follows():
    assert reward("q", "72", "#### 72 (see page 9)") == 1.0


@pytest.mark.parametrize("answer", [None, "", "none", "1e999"])
def test_a_gold_answer_without_a_finite_number_is_an_error_and_not_zero(answer):
    with pytest.raises(ValueError, match="answer"):
        reward("q", "72", answer)


def test_a_number_too_large_for_a_float_is_merely_wrong():
    assert reward("q", "9" * 10_000, GOLD) == 0.0


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="last_number, strict"):
        check_parameters(mode="first")


@given(st.integers(-(10**12), 10**12), st.text(alphabet="ab ,.\n", max_size=20))
def test_thousands_separators_and_surrounding_words_never_matter(number, words):
    for text in (f"{words} {number:,}", f"{words} {number}", f"{words} {float(number)!r}"):
        assert reward("q", text, f"#### {number}") == 1.0
        assert reward("q", text, f"#### {number + 1}") == 0.0
