"""The weights of a step as a model directory, and a model directory as a snapshot."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tba.cli.chain import find_assets, find_weights
from tba.cli.output import writing_to
from tba.contracts.config import Model
from tba.contracts.errors import CorruptObject, UserError
from tba.contracts.keys import CHECKPOINTS, MASTER, CheckpointKey, new_nonce
from tba.contracts.records import SnapshotManifest
from tba.lora import merged, peft_files, scale_of
from tba.models import load_model, weight_tensors, write_assets
from tba.run_record import read_run_record
from tba.snapshots.fetch import fetch_adapter, fetch_assets, fetch_snapshot
from tba.snapshots.files import get_file
from tba.snapshots.layout import parse
from tba.snapshots.manifest import Link, fetch_manifest
from tba.snapshots.snapshot import Snapshot
from tba.store.protocol import ObjectStore
from tba.trainer.checkpoint import read_facts, read_manifest

WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"


def read_snapshot(store: ObjectStore, version: int | None) -> Snapshot:
    """A verified snapshot with its assets, made from the checkpoint of that step if it was swept.

    Raises: UserError, CorruptObject, StoreUnavailable.
    """
    key = find_weights(store, version)
    snapshot = of_checkpoint(store, key) if key.startswith(CHECKPOINTS) else fetch_snapshot(store, key)
    if not snapshot.assets:
        snapshot = dataclasses.replace(snapshot, assets=newest_assets(store))
    return snapshot


def newest_assets(store: ObjectStore) -> dict[str, bytes]:
    """Configuration and tokenizer of the run's model. Raises: UserError, CorruptObject, StoreUnavailable."""
    return fetch_assets(store, find_assets(store))


def write_directory(tensors: Mapping[str, Tensor], assets: Mapping[str, bytes], folder: Path) -> None:
    """Write what `from_pretrained` reads. Weights come last: a directory that has them is whole. Raises: UserError."""
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_assets(assets, folder)
    partial = folder / f".{WEIGHTS_FILE}.partial"
    # transformers refuses a file that does not say which framework wrote it.
    save_file({n: t.contiguous() for n, t in tensors.items()}, partial, metadata={"format": "pt"})
    partial.replace(folder / WEIGHTS_FILE)


def export_adapter(store: ObjectStore, version: int | None, folder: Path) -> int:
    """Write the adapter of a step, float32, as PEFT reads it; returns its step.

    Raises: UserError if the run has none, that step is version 0 or `folder` cannot be made; CorruptObject,
    StoreUnavailable.
    """
    record = read_run_record(store)
    model, forked = record.config.model, record.config.fork_from is not None
    if model.lora is None:
        raise UserError(f"--adapter: the run in {store.uri} trains all weights: export without --adapter")
    key = find_weights(store, version)
    if key.startswith(CHECKPOINTS):
        checkpoint = CheckpointKey.parse(key)
        entry = next((f for f in read_manifest(store, key).files if f.name == MASTER), None)
        if entry is None:
            raise CorruptObject(f"checkpoint {key} lists no {MASTER}")
        step, tensors = checkpoint.step, parse(get_file(store, checkpoint.prefix, entry))
    else:
        link = Link(key, fetch_manifest(store, key))
        if link.manifest.encoding != "adapter":
            raise UserError(f"--adapter: version {link.manifest.version} is the base itself: choose a later --step")
        step, tensors = link.manifest.version, fetch_adapter(store, link)
    # The base of a fork is its version 0: `model.uri` would load, and be another model.
    named, settings = peft_files(tensors, model.lora, uri=None if forked else model.uri, revision=record.model_revision)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2))
    partial = folder / f".{ADAPTER_FILE}.partial"
    save_file(named, partial, metadata={"format": "pt"})
    partial.replace(folder / ADAPTER_FILE)
    return step


def directory_snapshot(folder: Path, *, trust_remote_code: bool = False) -> Snapshot:
    """The model in `folder` in the shape engines load. Raises: UserError."""
    settings = Model(uri=f"file://{folder.resolve()}", trust_remote_code=trust_remote_code)
    loaded = load_model(settings, base_dir=folder)
    manifest = SnapshotManifest(epoch=1, version=0, nonce=new_nonce(), files=[], tensors=[])
    return Snapshot(str(folder), manifest, weight_tensors(loaded.model), dict(loaded.assets))


def of_checkpoint(store: ObjectStore, manifest_key: str) -> Snapshot:
    """What the trainer published, or would have: master weights in the run's dtype. Without assets."""
    key = CheckpointKey.parse(manifest_key)
    entry = next((f for f in read_manifest(store, manifest_key).files if f.name == MASTER), None)
    if entry is None:
        raise CorruptObject(f"checkpoint {manifest_key} lists no {MASTER}")
    config = read_run_record(store).config.model
    dtype: torch.dtype = getattr(torch, config.dtype)
    master = parse(get_file(store, key.prefix, entry))
    manifest = SnapshotManifest(epoch=key.epoch, version=key.step, nonce=key.nonce, files=[], tensors=[])
    if config.lora is not None:
        base = fetch_snapshot(store, str(read_facts(store, manifest_key)["version0"]))
        weights = merged(base.tensors, master, scale=scale_of(config.lora))
        return Snapshot(manifest_key, manifest, weights, base.assets)
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in master.items()}
    return Snapshot(manifest_key, manifest, tensors, {})
