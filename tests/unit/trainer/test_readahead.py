"""Reading ahead: results in order, never many at once, and an error in its place."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.trainer.readahead import map_ahead


@given(st.lists(st.integers()), st.integers(1, 5))
def test_results_are_those_of_a_plain_loop(items, ahead):
    with ThreadPoolExecutor(2) as pool:
        assert list(map_ahead(pool, lambda x: x + 1, items, ahead=ahead)) == [x + 1 for x in items]


def test_no_more_is_begun_than_may_be_ahead_of_who_takes():
    begun = []
    with ThreadPoolExecutor(8) as pool:
        taking = map_ahead(pool, lambda x: x, (begun.append(i) or i for i in range(100)), ahead=4)
        for i in range(20):
            assert next(taking) == i
            assert len(begun) <= i + 1 + 4
        taking.close()


def test_an_error_comes_in_its_place_and_gives_up_what_is_behind_it():
    gate, done = threading.Event(), []

    def work(i: int) -> int:
        if i == 1:
            raise ZeroDivisionError
        if i > 1:
            assert gate.wait(10)
        done.append(i)
        return i

    with ThreadPoolExecutor(1) as pool:
        taking = map_ahead(pool, work, range(100), ahead=6)
        assert next(taking) == 0
        with pytest.raises(ZeroDivisionError):
            next(taking)
        gate.set()
    assert set(done) <= {0, 2}, "one may have begun; those that waited never do"
