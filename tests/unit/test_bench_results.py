"""Result rows: `met` follows the target, a baseline makes the target a ratio."""

import json

import pytest
from bench.results import record, table, write


def test_a_target_without_baseline_compares_the_value():
    assert record("perf", "shards", "encode", 2.0, "s", target="<= 2").met is True
    assert record("perf", "shards", "encode", 2.1, "s", target="<= 2").met is False
    assert record("perf", "shards", "encode", 2.1, "s").met is None


def test_a_target_with_baseline_compares_the_ratio():
    row = record("perf", "step", "tokens/s", 130.0, "tokens/s", baseline=("plain loop", 100.0), target=">= 1.25")
    assert row.ratio == 1.3
    assert row.met is True


def test_rows_written_are_read_back_with_every_field(tmp_path):
    row = record("faults", "store", "lost", 0, "rows", target="== 0", runs=[0, 0], seeds=[1, 2], note="ok")
    write([row, row], tmp_path / "deep" / "x.json")
    rows = json.loads((tmp_path / "deep" / "x.json").read_text())
    assert len(rows) == 2
    assert rows[0]["met"] is True and rows[0]["runs"] == [0.0, 0.0] and rows[0]["seeds"] == [1, 2]
    assert set(rows[0]) >= {"family", "bench", "metric", "value", "unit", "baseline", "ratio", "target", "machine"}


def test_the_table_shows_a_missed_target():
    text = table([record("perf", "a", "b", 1.0, "s", target="<= 0.5", runs=[0.9, 1.1])])
    assert "NO" in text and "0.9 – 1.1" in text
    assert len({len(line) for line in text.splitlines()}) == 1


@pytest.mark.parametrize(("family", "target"), [("speed", None), ("perf", "about 2"), ("perf", "2.0")])
def test_an_unknown_family_or_target_is_refused(family, target):
    with pytest.raises(ValueError, match="must be"):
        record(family, "a", "b", 1.0, "s", target=target)
