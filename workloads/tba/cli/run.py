"""`tba run`: a whole run on this machine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer


def command(
    job: Annotated[Path, typer.Argument(help="Job file (YAML).")],
    searchers: Annotated[
        int | None, typer.Option(min=0, max=64, help="Searcher processes; default spec.searcher.replicas.")
    ] = None,
    storage: Annotated[
        str,
        typer.Option(
            help="Where the run's bytes go: local (a directory in the run directory), job (the job file's own URI), "
            "embedded (an S3 server started for this run), or a URI."
        ),
    ] = "local",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a field: objective.totalSteps=5"),
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Directory of the run; default runs/NAME.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="First delete what an earlier run left in the run directory.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Directory for a timeline of each process, for https://ui.perfetto.dev or chrome://tracing."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check job, model and prompts, and show what would start.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Result as JSON on standard output.")] = False,
) -> int:
    """Run JOB here: trainer and searchers as processes, live progress. Ctrl-C stops cleanly, rerun resumes."""
    from tba.cli.exit import raise_on_sigterm
    from tba.cli.local_plan import check_files, plan
    from tba.cli.local_run import LocalRun

    planned = plan(job, overrides=overrides or [], searchers=searchers, storage=storage, run_dir=run_dir, fresh=fresh)
    if trace is not None:
        planned = replace(planned, trace=trace.resolve())
    planned.check_reward()
    if dry_run:
        from tba.interpreter import loading

        with loading("torch"):  # and transformers: a run has them in its processes only
            from tba.cli.preflight import check_inputs

        check_files(planned.job)  # as if the run had yet to begin
        found = check_inputs(planned)
        document = planned.to_dict() | found.to_dict()
        typer.echo(json.dumps(document, indent=2) if as_json else f"{planned.describe()}\n{found.describe()}")
        return 0
    raise_on_sigterm()  # before and after the time in which LocalRun answers it: an embedded server must end too
    return LocalRun(planned, as_json=as_json).run()
