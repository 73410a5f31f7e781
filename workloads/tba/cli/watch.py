"""`tba watch`: follow a run, from its bucket alone. Ends when the run does."""

import time
from typing import Annotated

import typer

from tba.cli.target import Endpoint, Region, Target, open_target


def command(
    run: Target,
    endpoint: Endpoint = None,
    region: Region = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between looks at the bucket.")] = 2.0,
) -> int:
    """Follow a run until it ends; Ctrl-C leaves the run alone."""
    from tba.cli.screen import Screen
    from tba.report.history import HistoryReader
    from tba.report.summary import summarise

    reader = HistoryReader(open_target(run, endpoint=endpoint, region=region))
    with Screen() as screen:
        while True:
            history = reader.refresh()
            summary = summarise(history, time.time())
            screen.show(summary, history)
            if summary.state in ("Complete", "Failed"):
                return 0 if summary.state == "Complete" else 1
            time.sleep(interval)
