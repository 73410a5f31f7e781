"""The history as flat rows: what a table of the user's own holds."""

import csv
import io
import math

import pytest
from support.synthetic_run import evaluation, event, searcher, step_row, whole_run

from tba.contracts.history import ROW
from tba.report.history import assemble
from tba.report.series import flat, resumed_at, rows_of, scalars, write_csv, write_jsonl


def table(rows):
    text = io.StringIO()
    write_csv(rows, text)
    return list(csv.DictReader(io.StringIO(text.getvalue())))


def test_a_histogram_becomes_its_mean_and_maximum_and_a_mapping_a_column_a_key():
    cells = flat(step_row(10, staleness={0: 3, 4: 1}))
    assert (cells["stalenessMean"], cells["stalenessMax"]) == (1.0, 4)
    assert cells["phaseSeconds.collate"] == 0.1 and "staleness" not in cells and "phaseSeconds" not in cells
    assert flat(step_row(1, staleness={}))["stalenessMean"] is None


def test_a_table_has_the_columns_of_all_rows_and_nothing_where_a_row_has_none():
    old, new = step_row(1, phase_seconds={}, generated_reward_mean=None), step_row(2)
    first, second = table([old, new])
    assert first["phaseSeconds.collate"] == "" and second["phaseSeconds.collate"] == "0.1"
    assert first["generatedRewardMean"] == "" and float(second["rewardMean"]) == new.reward_mean
    assert list(first)[:4] == ["kind", "epoch", "step", "time"]
    assert table([]) == []


def test_counters_of_a_searcher_are_columns_beside_its_name():
    (row,) = table([searcher("searcher-7", "1" * 32)])
    assert row["searcher"] == "searcher-7" and float(row["stats.generated_tokens"]) == 7000.0


def test_numbers_to_draw_leave_out_words_places_and_what_is_no_number():
    drawn = scalars(step_row(9, loss=math.nan, grad_norm=math.inf))
    assert {"loss", "gradNorm", "kind", "epoch", "step", "time"}.isdisjoint(drawn)
    assert drawn["gradClipped"] == 1.0 and drawn["rewardMean"] == step_row(9).reward_mean
    assert "sampling" not in scalars(evaluation(3))


@pytest.mark.parametrize("kind", ["step", "eval", "publish", "searcher", "sample", "quarantine", "event"])
def test_lines_of_json_are_rows_as_they_were_in_the_bucket(kind):
    history = assemble(whole_run(20))
    rows, text = rows_of(history, kind), io.StringIO()
    write_jsonl(rows, text)
    assert [ROW.validate_json(line) for line in text.getvalue().splitlines()] == list(rows) != []
    assert {row.kind for row in rows} == {kind}


def test_only_a_resume_tells_where_it_went_on():
    history = assemble([event("started"), step_row(1), event("resumed", epoch=2, step=7), event("stopped", epoch=3)])
    assert resumed_at(history) == {2: 7}
