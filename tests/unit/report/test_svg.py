import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.report.svg import draw, smooth, thin

floats = st.floats(-1e6, 1e6)


@given(st.lists(floats, min_size=1, max_size=300), st.integers(1, 50))
def test_thinning_keeps_within_its_limit_and_within_the_range(ys, limit):
    xs, kept = thin(list(range(len(ys))), ys, limit)
    assert len(xs) == len(kept) <= limit
    assert min(ys) - 1e-6 <= min(kept) <= max(kept) <= max(ys) + 1e-6
    assert xs == sorted(xs)


def test_few_points_are_not_thinned():
    assert thin([1, 2, 3], [4.0, 5.0, 6.0], 3) == ([1, 2, 3], [4, 5, 6])


def test_smoothing_by_hand():
    assert smooth([1.0, 3.0, 5.0, 7.0], 2) == [1, 2, 4, 6]


def test_a_value_that_is_no_number_does_not_spread():
    assert smooth([1.0, math.nan, 3.0], 3)[-1] == 2.0
    assert math.isnan(smooth([math.nan], 3)[0])


def test_nothing_to_draw_gives_no_picture():
    assert draw("x", "X", "words", lambda axes: False).svg is None


@pytest.mark.parametrize("name", ["a", "b"])
def test_ids_carry_the_figures_name(name):
    svg = draw(name, "X", "words", lambda axes: bool(axes.plot([1, 2], [1, 2]))).svg
    assert svg.startswith("<svg")
    assert f'id="{name}-figure_1"' in svg
    assert 'id="figure_1"' not in svg
