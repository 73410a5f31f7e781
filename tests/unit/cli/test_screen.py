import io
from dataclasses import replace

from rich.console import Console

from tba.cli.screen import Screen
from tba.report.history import History
from tba.report.summary import summarise


def test_a_number_that_counts_up_in_the_detail_is_no_news_for_a_pipe():
    output = io.StringIO()
    screen, history = Screen(Console(file=output)), History()
    summary = summarise(history, 0.0)
    for detail in ("no shard for 1 s", "no shard for 2 s", "no shard for 13 s", "storage denied", "no shard for 14 s"):
        screen.show(replace(summary, detail=detail), history)
    said = [line.split(" · ")[2] for line in output.getvalue().splitlines()]
    assert said == ["no shard for 1 s", "storage denied", "no shard for 14 s"]
