"""`tba tensorboard`: event files of a run, from its bucket alone, once or for as long as it goes on."""

import time
from pathlib import Path
from typing import Annotated

import typer

from tba.cli.output import writing_to
from tba.cli.target import Endpoint, Region, Target, open_target


def command(
    run: Target,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Directory for the event files; one a run, side by side, to compare.")
    ] = Path("tensorboard"),
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run ends; Ctrl-C leaves it alone.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between looks at the bucket.")] = 10.0,
    endpoint: Endpoint = None,
    region: Region = None,
) -> int:
    """Write curves, staleness histograms and samples for TensorBoard; files of an earlier call there are replaced.

    With --follow the exit code is that of `tba watch`: 0 if the run is Complete, 1 if it Failed.
    """
    from tba.contracts.errors import UserError
    from tba.contracts.records import RunState
    from tba.report.history import HistoryReader
    from tba.run_record import read_run_record

    try:
        from tba.report.event_files import EventFiles
    except ModuleNotFoundError as error:
        if error.name != "tensorboardX":
            raise
        raise UserError(
            "tba tensorboard needs the package tensorboardX, which is not installed: pip install 'tensorboardX>=2.6'"
        ) from error
    store = open_target(run, endpoint=endpoint, region=region)
    if not follow:  # which may begin before the run
        read_run_record(store)
    reader = HistoryReader(store)
    with writing_to(output):
        files = EventFiles(output)
    followed: str | None = None
    try:
        while True:
            history = reader.refresh()
            if history.run is not None and history.run.run_id != followed:
                if followed is not None:  # made anew, from step 0
                    files.close()
                    files = EventFiles(output)
                followed = history.run.run_id
            rows = files.write(history)
            if rows or not follow:
                step = history.steps[-1].step if history.steps else 0
                typer.echo(f"wrote {output}: {rows} rows, to step {step}")
            state = history.latest.state if history.latest else RunState.RUNNING
            if not follow or state is RunState.COMPLETE:
                return 0
            if state is RunState.FAILED:
                return 1
            time.sleep(interval)
    finally:
        files.close()
