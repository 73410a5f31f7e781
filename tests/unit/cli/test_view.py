import io

import pytest
from rich.console import Console
from support.progress import a_progress
from support.synthetic_run import START, latest, run_record, sample, searcher, step_row, whole_run

from tba.cli.screen import Screen
from tba.cli.view import bars, closing, duration, merge, panel, plain, sparkline
from tba.contracts.history import Alert, Progress
from tba.report.history import History, assemble
from tba.report.summary import summarise


def history(steps=40, **changes):
    return assemble(whole_run(steps), run=run_record(), latest=latest(**changes))


def test_a_sparkline_rises_with_its_values_and_fits_its_width():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3, 3, 3]) == "▁▁▁"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(1000)), 40)) == 40


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65, "1:05"), (3723, "1:02:03")])
def test_durations_are_read_by_people(seconds, text):
    assert duration(seconds) == text


def test_a_plain_line_says_what_matters():
    line = plain(summarise(history(), START + 130))
    for part in ("step 40/120", "reward", "staleness", "idle", "tokens/s", "version 120", "searchers 2", "ETA"):
        assert part in line


def test_responses_without_a_reward_are_shown_where_there_are_any():
    failing = assemble([searcher("a", "1" * 32, rows=328, failed=328)], run=run_record(), latest=latest(step=0))
    assert "without reward 328" in plain(summarise(failing, START))
    assert "without reward" not in plain(summarise(history(30), START + 130))
    shown = io.StringIO()
    Console(file=shown, width=140).print(panel(summarise(failing, START), failing, processes={}))
    assert "328 (328 without a reward)" in shown.getvalue()


def test_an_unstarted_run_has_a_plain_line_and_a_panel():
    summary = summarise(History(), START)
    assert plain(summary) == "step 0/? · Absent · no run here yet: nothing has written `latest` · searchers 0"
    Console(file=io.StringIO()).print(panel(summary, History(), processes={}))


def test_the_panel_shows_names_with_brackets_as_they_are():
    console = Console(file=io.StringIO(), width=140)
    console.print(panel(summarise(history(), START + 130), history(), processes={"trainer": 0, "searcher-0": 2}))
    text = console.file.getvalue()
    assert "searcher-0 (2 restarts)" in text
    assert "40/120" in text


def test_what_the_trainer_says_of_itself_replaces_what_the_bucket_knows():
    summary = summarise(history(), START + 130)
    progress = Progress(
        run_id="r", state="WaitingForData", detail="replay ratio 2.1 > 2", epoch=1, step=44, total_steps=120,
        percentage=36.0, policy_version=44, reward=None, eval_score=None, staleness_mean=None,
        trainer_idle_percent=None, trajectories=5000, replay_ratio=2.1, eta_seconds=None, searchers=0,
        last_updated_time=START,
    )  # fmt: skip
    merged = merge(summary, progress)
    assert (merged.state, merged.detail, merged.step) == ("WaitingForData", "replay ratio 2.1 > 2", 44)
    assert merged.reward == summary.reward
    live = merge(summary, progress.model_copy(update={"trainer_idle_percent": 55.5}))
    assert live.trainer_idle_percent == summary.trainer_idle_percent, "of the whole run, as at its end"
    assert merge(summary, None) == summary
    starting = merge(summary, progress.model_copy(update={"state": "Starting", "step": 0, "detail": ""}))
    assert (starting.state, starting.step) == ("Starting", summary.step), "it does not know yet, the bucket does"


@pytest.mark.parametrize(
    ("detail", "shown"),
    [("", "storage is down: start it"), ("0 of 24 rows", "0 of 24 rows; storage is down: start it"), (
        "storage is down", "storage is down: start it")],
)  # fmt: skip
def test_alerts_of_the_trainer_are_shown_once_beside_what_it_waits_for(detail, shown):
    alert = Alert(reason="StorageUnreachable", message="storage is down: start it")
    for state in ("Starting", "WaitingForData"):
        merged = merge(summarise(history(), START + 130), a_progress(state=state, detail=detail, alerts=[alert]))
        assert (merged.state, merged.detail) == (state, shown)


def test_a_histogram_in_text_adds_up_and_is_cut():
    lines = bars({lag: 1 for lag in range(50)}, limit=20)
    assert len(lines) == 21
    assert lines[-1].strip().startswith(">19:  60.0%")


def test_the_closing_summary_tells_evaluation_staleness_versions_and_replay():
    text = closing(summarise(history(state="Complete"), START + 130), history())
    for part in (
        "Complete: step 40 of 120",
        "pass@1",
        "staleness of trained rows",
        "21 versions",
        "replay branch: 20 of",
    ):
        assert part in text


def test_a_pipe_gets_a_line_when_the_state_changes_and_no_control_characters():
    stream = io.StringIO()
    with Screen(Console(file=stream, force_terminal=False)) as screen:
        for state in ("Running", "Running", "Complete"):
            screen.show(summarise(history(state=state), START + 130), history())
        screen.tell("[bold]searcher-0[/bold] started")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert "[bold]" in lines[-1]
    assert "\x1b" not in stream.getvalue()


def test_hostile_names_stay_text_on_the_terminal():
    rows = [step_row(1), searcher("[red]x[/red]", "1" * 32), sample(1, 1.0)]
    shown = assemble(rows, run=run_record(), latest=latest())
    assert "[red]x[/red]" in closing(summarise(shown, START), shown)
