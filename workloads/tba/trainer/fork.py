"""A run that starts from another run's checkpoint: its version 0 is the policy of that step.

Everything else begins anew: step 0, optimizer, schedule and buffer, and the reference, which is version 0 in every run.
The other run is only read, and by keys alone: `latest`, then parents.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tba.contracts.config import ForkFrom, Model
from tba.contracts.errors import UserError
from tba.contracts.keys import LATEST, MASTER, CheckpointKey
from tba.contracts.records import CheckpointManifest, ForkOrigin, Latest
from tba.lora import merged, scale_of
from tba.models import LoadedModel, build_model, load_weights
from tba.run_record import read_run_record
from tba.snapshots import fetch_assets, fetch_snapshot
from tba.snapshots.files import get_file
from tba.snapshots.layout import parse
from tba.store import NotFound, ObjectStore
from tba.trainer.checkpoint import FACTS, read_facts, read_manifest


def load_fork(store: ObjectStore, fork: ForkFrom, settings: Model) -> tuple[LoadedModel, ForkOrigin]:
    """The model of `fork.step` of the run in `store`, with float32 parameters; `settings.uri` is not read.

    Raises: UserError if there is no such run or step; CorruptObject, StoreUnavailable.
    """
    record = read_run_record(store)
    key, manifest = _find(store, fork)
    prefix = CheckpointKey.parse(key).prefix
    version0 = _version0(store, key)
    assets = dict(fetch_assets(store, version0))
    model, tokenizer = build_model(
        assets, dtype=torch.float32, device="cpu", trust_remote_code=settings.trust_remote_code
    )
    entry = next(f for f in manifest.files if f.name == MASTER)
    master = parse(get_file(store, prefix, entry))
    lora = record.config.model.lora
    if lora is not None:
        base = {
            n: t.float() if t.is_floating_point() else t for n, t in fetch_snapshot(store, version0).tensors.items()
        }
        master = merged(base, master, scale=scale_of(lora))
    load_weights(model, master)
    origin = ForkOrigin(run_id=record.run_id, owner=record.owner, checkpoint=key)
    return LoadedModel(model, tokenizer, assets, f"{record.run_id}/{key}"), origin


def outline_fork(store: ObjectStore, fork: ForkFrom, settings: Model) -> tuple[nn.Module, Any]:
    """The same model on the meta device, and its tokenizer. Raises: as `load_fork` before weights."""
    read_run_record(store)
    key, _ = _find(store, fork)
    return build_model(
        fetch_assets(store, _version0(store, key)),
        dtype=torch.float32,
        device="meta",
        trust_remote_code=settings.trust_remote_code,
    )


def _version0(store: ObjectStore, checkpoint: str) -> str:
    return str(read_facts(store, checkpoint)["version0"])


def _find(store: ObjectStore, fork: ForkFrom) -> tuple[str, CheckpointManifest]:
    steps: list[int] = []
    for key, manifest in _whole(store):
        if manifest.step == fork.step:
            return key, manifest
        steps.append(manifest.step)
    raise UserError(
        f"forkFrom.step: the run at {store.uri} has no checkpoint of step {fork.step}; there are "
        f"{sorted(set(steps)) or 'none'}: choose one of these (`tba pin` keeps one from being swept)"
    )


def _whole(store: ObjectStore) -> Iterator[tuple[str, CheckpointManifest]]:
    """Checkpoints that still have their weights, newest first: the sweep leaves bare manifests as links."""
    try:
        key = Latest.parse(store.get(LATEST).data).checkpoint
    except NotFound:
        raise UserError(f"forkFrom.uri: no run at {store.uri}: it has no `{LATEST}`: correct the URI") from None
    while key is not None:
        try:
            manifest = read_manifest(store, key)
        except NotFound:  # swept: the chain ends here
            return
        prefix = CheckpointKey.parse(key).prefix
        if all(_exists(store, prefix + name) for name in (MASTER, FACTS)):
            yield key, manifest
        key = manifest.parent


def _exists(store: ObjectStore, key: str) -> bool:
    try:
        store.head(key)
    except NotFound:
        return False
    return True
