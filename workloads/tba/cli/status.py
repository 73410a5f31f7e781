"""`tba status`: one look at a run, from its bucket alone."""

import json
import time
from typing import Annotated

import typer

from tba.cli.target import Endpoint, Region, Target, open_target


def command(
    run: Target,
    endpoint: Endpoint = None,
    region: Region = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show step, reward, staleness, where time goes, searchers and the newest version of a run."""
    from tba.cli.view import plain
    from tba.report.history import read_history
    from tba.report.split import SEARCHER_PHASES, TRAINER_PHASES, in_words, searcher_time, trainer_time
    from tba.report.summary import summarise

    history = read_history(open_target(run, endpoint=endpoint, region=region))
    now = time.time()
    summary = summarise(history, now)
    if as_json:
        typer.echo(json.dumps(summary.to_dict()))
        return
    typer.echo(f"{summary.owner or run}: {plain(summary)}")
    typer.echo(f"trajectories {summary.trajectories} · replay slots {summary.replay_slots} of {summary.slots}")
    if summary.failed_trajectories:
        typer.echo(
            f"{summary.failed_trajectories} of the trajectories have no reward and are not trained on: "
            "see reward_failed in the searchers' logs"
        )
    for name, told in (
        ("trainer", in_words(trainer_time(history), TRAINER_PHASES)),
        ("searchers", in_words(searcher_time(history), SEARCHER_PHASES)),
    ):
        if told:
            typer.echo(f"time of the {name}: {told}")
    for row in history.searchers:
        failed = f" ({row.failed} without a reward)" if row.failed else ""
        typer.echo(
            f"  {row.searcher} {row.incarnation[:8]}: {row.rows} rows{failed}, {row.versions} versions (newest "
            f"{row.newest_version}), last heard of {max(now - row.last_seen, 0):.0f} s ago"
        )
    for quarantine in history.quarantines[-5:]:
        typer.echo(f"  quarantined {quarantine.key}: {quarantine.reason}")
