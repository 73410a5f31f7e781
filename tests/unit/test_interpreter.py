"""What is loaded at the start of a process is not searched for garbage."""

import gc

import pytest

from tba.interpreter import loading


@pytest.fixture(autouse=True)
def nothing_stays_frozen():
    yield
    gc.enable()
    gc.unfreeze()


def test_nothing_is_searched_while_a_package_loads_nor_what_it_brought_later():
    with loading("a_package_that_is_not_loaded"):
        assert not gc.isenabled()
        brought = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(brought)


def test_an_import_that_fails_leaves_the_collector_at_work():
    with pytest.raises(ImportError), loading("a_package_that_is_not_loaded"):
        raise ImportError("broken")
    assert gc.isenabled()


def test_a_process_that_has_the_package_keeps_what_it_made_searchable():
    with loading("gc"):
        assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_process_that_searches_for_nothing_is_left_so():
    gc.disable()
    with loading("a_package_that_is_not_loaded"):
        pass
    assert not gc.isenabled()
    assert gc.get_freeze_count() == 0
