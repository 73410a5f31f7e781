"""`tba storage`: check that a store keeps its promises, serve one for development, sweep or delete a run."""

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from tba.cli.target import Endpoint, Region, StorageTarget, open_address
from tba.contracts.errors import UserError
from tba.contracts.keys import LATEST, RUN, names_run_object
from tba.store import NotFound, ObjectStore

app = typer.Typer(no_args_is_help=True, help="Check or serve the storage of runs, sweep or delete a run.")
_UriArgument = Annotated[str, typer.Argument(metavar="URI", help="s3://bucket/prefix or file://directory")]


@app.command()
def check(
    uri: _UriArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Try every promise a run relies on, such as conditional writes, under a prefix that is removed again."""
    from tba.cli.table import show
    from tba.store.probe import probe, require

    store = open_address(StorageTarget(uri=uri, endpoint=endpoint, region=region))
    try:
        results = probe(store)
    finally:
        store.close()
    if as_json:
        typer.echo(json.dumps({"uri": store.uri, "checks": [asdict(result) for result in results]}))
    else:
        rows = [{"check": r.name, "result": "ok" if r.ok else r.severity, "detail": r.detail} for r in results]
        show(rows, as_json=False, title=store.uri)
    require(results)


@app.command()
def serve(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where objects, credentials and logs are kept.")],
    port: Annotated[int, typer.Option(help="Port of the S3 endpoint on this machine; 0 takes a free one.")] = 0,
    bucket: Annotated[str, typer.Option(help="Bucket to create.")] = "tba",
) -> None:
    """Run an S3 server (SeaweedFS) on this machine until Ctrl-C: for development, never for production."""
    from tba.stop import stop_signals
    from tba.store.serve import EmbeddedServer

    with stop_signals() as ended, EmbeddedServer(directory, port, bucket=bucket) as server:
        # The secret stays in its file: terminals and logs are copied around.
        typer.echo(f"serving s3://{bucket} at {server.endpoint} (pid {server.pid}); to use it:")
        typer.echo(f"  export AWS_ENDPOINT_URL_S3={server.endpoint} AWS_REGION=us-east-1")
        typer.echo(f"  export AWS_SHARED_CREDENTIALS_FILE={server.credentials_file}")
        while not ended.wait(1.0):
            server.check_alive()
    typer.echo(f"stopped; {directory} keeps the objects")


@app.command()
def gc(
    uri: _UriArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    keep_last: Annotated[int | None, typer.Option(min=1, help="Newest checkpoints to keep.")] = None,
    grace_seconds: Annotated[
        float | None, typer.Option(min=0, help="How long something must have been superseded.")
    ] = None,
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Sweep snapshots and checkpoints that a run needs no more, by the rules of its trainer, beside it or after it.

    Rules that are not given are those that the job began with. Trajectories, pinned checkpoints and version 0 stay.
    """
    from tba.protocol.garbage import Retention
    from tba.run_record import read_run_record
    from tba.trainer.garbage import Onlooker, Sweeper

    store = open_address(StorageTarget(uri=uri, endpoint=endpoint, region=region))
    try:
        live = read_run_record(store).live
        retention = Retention.of(live.sync, live.storage)
        given = {"keep_last": keep_last, "grace_seconds": grace_seconds}
        retention = replace(retention, delete_shards=False, **{k: v for k, v in given.items() if v is not None})
        sweeper = Sweeper(store, Onlooker(store))
        if dry_run:
            marked = sweeper.marked(retention)
            for key in marked:
                typer.echo(key)
            typer.echo(f"would delete {len(marked)} objects, {sum(marked.values())} bytes, of {store.uri}")
            return
        swept = sweeper.sweep(retention)
        typer.echo(f"deleted {swept.num_objects} objects, {swept.total_bytes} bytes, of {store.uri}")
    finally:
        store.close()


@app.command()
def delete(
    uri: _UriArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before deleting.")] = False,
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Delete one run, or what is left of one, with all it stored, but no run below it. Refuses any other prefix."""
    store = open_address(StorageTarget(uri=uri, endpoint=endpoint, region=region))
    try:
        _require_run(store)
        found = [info.key for info in store.list_after("")]
        others = tuple(key.removesuffix(RUN) for key in found if key.endswith(f"/{RUN}"))
        keys = [key for key in found if not key.startswith(others)]
        besides = f", but for the runs {', '.join(others)} within" if others else ""
        if not yes:
            typer.confirm(f"Delete everything under {store.uri}{besides}?", abort=True)
        # `latest` first, so that a trainer that still runs loses its next commit; `run.json` last, so that an
        # interrupted deletion can be repeated.
        store.delete([LATEST])
        store.delete(key for key in keys if key not in (LATEST, RUN))
        store.delete([RUN])
        typer.echo(f"deleted {len(keys)} objects of {store.uri}{besides}")
    finally:
        store.close()


def _require_run(store: ObjectStore) -> None:
    """Raises: UserError unless the store holds a run, or nothing but what is left of one.

    Whoever still wrote while a run was deleted leaves objects that nothing else would ever remove.
    """
    try:
        store.head(RUN)
    except NotFound as error:
        foreign = _foreign(info.key for info in store.list_after("") if info.key != LATEST)
        if foreign:
            raise UserError(
                f"{store.uri} holds no {RUN} but {foreign}, so it is not the root of a run; nothing was deleted: "
                "correct the URI"
            ) from error


def _foreign(paths: Iterable[str]) -> str | None:
    """What shows that these keys are not the remains of a run: one that no run writes, or that there are none."""
    found: str | None = "nothing else"
    for path in paths:
        if not names_run_object(path):
            return path
        found = None
    return found
