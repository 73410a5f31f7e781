"""`tba pin`: keep a checkpoint from the sweep."""

from typing import Annotated

import typer

from tba.cli.target import Endpoint, Region, Target, open_target
from tba.contracts import keys
from tba.contracts.errors import UserError


def command(
    run: Target,
    step: Annotated[int, typer.Argument(min=0, help="Step of the checkpoint.")],
    remove: Annotated[bool, typer.Option("--remove", help="Let it be swept again.")] = False,
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Keep the checkpoint of STEP for as long as the pin stands: to go back to, or to `tba export` the weights from.

    Snapshots of that step are swept all the same.
    """
    from tba.cli.chain import checkpoint_steps

    store = open_target(run, endpoint=endpoint, region=region)
    if remove:
        store.delete([keys.pin_key(step)])
        typer.echo(f"step {step} is no longer pinned")
        return
    steps = checkpoint_steps(store)
    if step not in steps:
        raise UserError(f"no checkpoint of step {step} in {store.uri}: there are {sorted(steps) or 'none'}")
    store.put_once(keys.pin_key(step), b"")
    typer.echo(f"the checkpoint of step {step} is pinned: `tba export --step {step}` works for as long")
