"""`tba inspect`: what is in the bucket, as tables or JSON."""

import json
from itertools import islice
from typing import Annotated, Any

import typer

from tba.cli.target import Endpoint, Region, Target, open_target

app = typer.Typer(
    help="What is in the bucket of a run.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)

AsJson = Annotated[bool, typer.Option("--json", help="A JSON list.")]
Limit = Annotated[int, typer.Option(min=1, help="At most so many, the newest.")]

_BUFFER_TOTALS = {
    "step", "buffer_rows", "buffer_bytes", "ingested_rows", "duplicate_rows", "failed_rows", "replay_ratio",
    "mop_recycles",
}  # fmt: skip
"""What the last step says of the buffer; absent before the first."""


@app.command()
def shards(
    run: Target, limit: Limit = 20, as_json: AsJson = False, endpoint: Endpoint = None, region: Region = None
) -> None:
    """List the newest shards: who made them, rows, rewards, policies; a damaged one says why."""
    from tba.cli.table import show
    from tba.contracts import keys

    store = open_target(run, endpoint=endpoint, region=region)
    objects = sorted(store.list_after(keys.SHARDS), key=lambda o: o.key)[-limit:]
    show([_shard_row(store.get(o.key).data, o.key, o.size) for o in objects], as_json=as_json, title="shards")


@app.command()
def buffer(
    run: Target,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Show the replay buffer as of the last step, and what was ingested of each incarnation."""
    from tba.cli.chain import checkpoints
    from tba.cli.table import show
    from tba.report.history import read_history

    store = open_target(run, endpoint=endpoint, region=region)
    history = read_history(store)
    last = history.steps[-1] if history.steps else None
    if last and not as_json:
        typer.echo(
            f"step {last.step}: {last.buffer_rows} distinct rows in {last.buffer_bytes / 1e6:.1f} MB; "
            f"{last.ingested_rows} ingested, {last.duplicate_rows} duplicates, {last.failed_rows} without a reward; "
            f"replay ratio {last.replay_ratio:.2f}, pool recycled {last.mop_recycles} times"
        )
    names = {s.incarnation: s.searcher for s in history.searchers}
    newest = next(checkpoints(store), None)
    intervals = newest[1].ingest.intervals if newest else {}
    rows: list[dict[str, Any]] = [
        {
            "searcher": names.get(incarnation, "?"),
            "incarnation": incarnation,
            "shards": sum(end - start for start, end in spans),
            "intervals": " ".join(f"[{start},{end})" for start, end in spans),
        }
        for incarnation, spans in sorted(intervals.items())
    ]
    if as_json:
        totals = last.model_dump(by_alias=True, include=_BUFFER_TOTALS) if last else {}
        typer.echo(json.dumps(totals | {"ingested": rows}))
        return
    show(rows, as_json=False, title="ingested as of the newest checkpoint")


@app.command()
def snapshots(
    run: Target, limit: Limit = 20, as_json: AsJson = False, endpoint: Endpoint = None, region: Region = None
) -> None:
    """List published weights, newest first, as `latest` reaches them."""
    from tba.cli import chain
    from tba.cli.table import show

    store = open_target(run, endpoint=endpoint, region=region)
    rows: list[dict[str, Any]] = [
        {
            "version": manifest.version,
            "epoch": manifest.epoch,
            "encoding": manifest.encoding,
            "depth": manifest.depth,
            "bytes": manifest.total_bytes,
            "tensors": len(manifest.tensors),
            "assets": len(manifest.assets),
            "evaluated": manifest.evaluation is not None,
            "key": key,
        }
        for key, manifest in islice(chain.snapshots(store), limit)
    ]
    show(rows, as_json=as_json, title="snapshots")


@app.command()
def checkpoint(
    run: Target, limit: Limit = 20, as_json: AsJson = False, endpoint: Endpoint = None, region: Region = None
) -> None:
    """List checkpoints, newest first, as `latest` reaches them."""
    from tba.cli import chain
    from tba.cli.table import show
    from tba.contracts import keys
    from tba.report.history import read_history

    store = open_target(run, endpoint=endpoint, region=region)
    pins = {o.key for o in store.list_after(keys.PINS)}
    found = list(islice(chain.checkpoints(store), limit))
    # An evaluation ends after the checkpoint of its step, the last one after all checkpoints: only the history has it.
    scores = {row.step: row.pass_at_1 for row in read_history(store).evaluations}
    scores |= {step: score for _, manifest in reversed(found) for step, score in manifest.eval_scores.items()}
    rows: list[dict[str, Any]] = [
        {
            "step": manifest.step,
            "epoch": manifest.epoch,
            "bytes": sum(f.size for f in manifest.files),
            "files": len(manifest.files),
            "shards ingested": sum(e - s for spans in manifest.ingest.intervals.values() for s, e in spans),
            "minutes trained": manifest.wall_seconds / 60,
            "eval": scores.get(manifest.step),
            "pinned": keys.pin_key(manifest.step) in pins,
            "key": key,
        }
        for key, manifest in found
    ]
    show(rows, as_json=as_json, title="checkpoints")


def _shard_row(data: bytes, key: str, size: int) -> dict[str, Any]:
    from tba.contracts.errors import CorruptObject
    from tba.shards import decode_shard

    row: dict[str, Any] = dict.fromkeys(
        ("window", "searcher", "incarnation", "seq", "rows", "scored", "reward", "tokens", "oldest", "newest")
    )
    row |= {"bytes": size, "problem": ""}
    try:
        from tba.contracts.keys import ShardKey

        name = ShardKey.parse(key)
        row |= {
            "window": name.window, "searcher": name.searcher, "incarnation": name.incarnation[:8], "seq": name.seq,
        }  # fmt: skip
        batch = decode_shard(data, run_id=None)
    except (CorruptObject, ValueError) as error:
        return row | {"searcher": row["searcher"] or key, "problem": str(error)}
    scored = batch.scored
    versions = batch.span_versions
    return row | {
        "rows": len(batch),
        "scored": int(scored.sum()),
        "reward": float(batch.rewards[scored].mean()) if scored.any() else None,
        "tokens": len(batch.response_tokens),
        "oldest": int(versions.min()) if len(versions) else None,
        "newest": int(versions.max()) if len(versions) else None,
    }
