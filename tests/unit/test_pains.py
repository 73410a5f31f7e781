"""The table of what others reported: each line has tests, and each named test is there."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pains(monkeypatch):
    """hack/pains.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "hack"))
    spec = importlib.util.spec_from_file_location("hack_pains", ROOT / "hack/pains.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "hack_pains", module)  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def test_every_named_test_exists(pains):
    assert pains.missing((*pains.KUBERNETES, *pains.RL)) == []


def test_every_line_has_a_report_and_a_test_of_its_own(pains):
    lines = (*pains.KUBERNETES, *pains.RL)
    assert all(line.reports and line.tests for line in lines)
    assert len({line.behaviour for line in lines}) == len(lines)


def test_a_renamed_test_or_a_moved_file_is_missed(pains, tmp_path):
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit/test_a.py").write_text("def test_is_there_twice():\n    pass\n\n\nTestLife = object\n")
    named = ("unit/test_a.py::test_is_there", "unit/test_b.py::test_is_there_twice", "unit/test_a.py::TestOther")
    there = ("unit/test_a.py::test_is_there_twice", "unit/test_a.py::TestLife")
    line = pains.Pain("a behaviour", "somebody#1", (*named, *there))
    assert pains.missing([line], tmp_path) == list(named)
