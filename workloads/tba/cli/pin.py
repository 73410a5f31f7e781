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
    """Keep the checkpoint of STEP, and the weights it names, for as long as the pin stands."""
    store = open_target(run, endpoint=endpoint, region=region)
    if remove:
        store.delete([keys.pin_key(step)])
        typer.echo(f"step {step} is no longer pinned")
        return
    found = [o.key for o in store.list_after(f"{keys.CHECKPOINTS}{step:010d}/") if o.key.endswith(keys.MANIFEST)]
    if not found:
        steps = sorted(
            {keys.CheckpointKey.parse(o.key).step for o in store.list_after(keys.CHECKPOINTS)
             if o.key.endswith(keys.MANIFEST)}
        )  # fmt: skip
        raise UserError(f"no checkpoint of step {step} in {store.uri}: there are {steps or 'none'}")
    store.put_once(keys.pin_key(step), b"")
    typer.echo(f"step {step} is pinned")
