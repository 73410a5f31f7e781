"""Resumable trainer state: data objects, then the manifest, then CAS of `latest`. Arrow-free, pickle-free.

The buffer's tokens are not in it: rows are read again from their shards (system.md §4, "the buffer is the bucket").
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from tba.contracts.config import LiveConfig
from tba.contracts.errors import CorruptObject
from tba.contracts.keys import CheckpointKey
from tba.contracts.parse import parse_object
from tba.contracts.records import CheckpointManifest, FileEntry, IngestEntry, ShardId
from tba.failpoints import failpoint
from tba.log import CHECKPOINT_REFUSED, CHECKPOINT_RESTORED, log
from tba.snapshots.files import get_file, put_files
from tba.snapshots.layout import parse, serialise
from tba.store import NotFound, ObjectStore

FACTS = "facts.json"
SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class TrainerState:
    """Everything a resumed trainer continues from, detached from the live one."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    """File name without suffix (master, optimizer, reference, buffer) -> named host tensors."""
    facts: Mapping[str, Any]
    """JSON: sampler, counters, gradient norms, reference policy."""


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """What the training loop adds to the learner's facts."""

    version0: str | None
    """Manifest key of version 0; None until it is published."""
    carried: Sequence[IngestEntry] = ()
    """Ingested in this state but after its last step: a resumed trainer logs them again, for the epoch before is cut
    there."""
    foreign: Collection[str] = ()
    """Keys below `shards/` that are no shards, reported once."""
    live: LiveConfig | None = None
    """The settings that the trainer followed; None: those of run.json."""

    def to_json(self) -> dict[str, Any]:
        """Facts of a checkpoint."""
        return {
            "version0": self.version0,
            "carried": [entry.to_json().decode() for entry in self.carried],
            "foreign": sorted(self.foreign),
            "live": self.live and self.live.to_json().decode(),
        }

    @classmethod
    def of(cls, facts: Mapping[str, Any], manifest_key: str) -> Self:
        """Undo `to_json`. Raises: CorruptObject if another release wrote them."""
        carried = [parse_object(IngestEntry, f"carried of {manifest_key}", entry) for entry in facts.get("carried", ())]
        live = facts.get("live")
        followed = None if live is None else parse_object(LiveConfig, f"live of {manifest_key}", live)
        return cls(facts["version0"], carried, facts.get("foreign", ()), followed)


def write_checkpoint(store: ObjectStore, manifest: CheckpointManifest, state: TrainerState) -> str:
    """Upload state and manifest; returns the manifest's key. Visible only once `latest` names it.

    `manifest.files` is filled in here. Raises: StoreUnavailable.
    """
    key = CheckpointKey(manifest.step, manifest.epoch, manifest.nonce)
    failpoint("checkpoint.before_data")
    entries: list[FileEntry] = []
    for name, tensors in state.tensors.items():  # one at a time: never all of the state twice in memory
        entries += put_files(store, key.prefix, {f"{name}{SUFFIX}": serialise(tensors)})
    entries += put_files(store, key.prefix, {FACTS: json.dumps(state.facts).encode()})
    failpoint("checkpoint.before_manifest")
    store.put_once(key.path, manifest.model_copy(update={"files": entries}).to_json())
    failpoint("checkpoint.before_commit")
    return key.path


def read_manifest(store: ObjectStore, manifest_key: str) -> CheckpointManifest:
    """Raises: NotFound, CorruptObject, AccessDenied, StoreUnavailable."""
    manifest = parse_object(CheckpointManifest, manifest_key, store.get(manifest_key).data)
    key = CheckpointKey.parse(manifest_key)
    if (manifest.step, manifest.epoch, manifest.nonce) != (key.step, key.epoch, key.nonce):
        raise CorruptObject(f"checkpoint manifest {manifest_key} says step {manifest.step}, epoch {manifest.epoch}")
    return manifest


def read_checkpoint(store: ObjectStore, manifest_key: str) -> tuple[CheckpointManifest, TrainerState]:
    """Fetch and verify one checkpoint. Raises: NotFound, CorruptObject, StoreUnavailable."""
    manifest = read_manifest(store, manifest_key)
    prefix = CheckpointKey.parse(manifest_key).prefix
    tensors: dict[str, dict[str, Tensor]] = {}
    facts: dict[str, Any] | None = None
    for entry in manifest.files:
        data = get_file(store, prefix, entry)
        if entry.name == FACTS:
            facts = json.loads(bytes(data))
        else:
            tensors[entry.name.removesuffix(SUFFIX)] = parse(data)
    if facts is None:
        raise CorruptObject(f"checkpoint {manifest_key} lists no {FACTS}")
    return manifest, TrainerState(tensors, facts)


def held_shards(store: ObjectStore, manifest_key: str) -> list[ShardId]:
    """Shards whose rows the checkpoint's buffer holds. Raises: NotFound, CorruptObject."""
    paths = read_facts(store, manifest_key)["shard_paths"]
    return [ShardId(inc, int(seq)) for inc, items in paths.items() for seq, _ in items]


def read_facts(store: ObjectStore, manifest_key: str) -> dict[str, Any]:
    """The facts of a checkpoint, without its tensors. Raises: NotFound, CorruptObject."""
    manifest = read_manifest(store, manifest_key)
    for entry in manifest.files:
        if entry.name == FACTS:
            return json.loads(bytes(get_file(store, CheckpointKey.parse(manifest_key).prefix, entry)))
    raise CorruptObject(f"checkpoint {manifest_key} lists no {FACTS}")


def restore_newest(store: ObjectStore, manifest_key: str) -> tuple[str, CheckpointManifest, TrainerState]:
    """The checkpoint `latest` names, or the nearest readable ancestor: parents are followed, never a listing.

    Raises: CorruptObject if none can be read; a run that has checkpoints never starts again from step 0.
    """
    key: str | None = manifest_key
    refused: list[str] = []
    while key is not None:
        parent: str | None = None
        try:
            parent = read_manifest(store, key).parent
            manifest, state = read_checkpoint(store, key)
            log.info(CHECKPOINT_RESTORED, key=key, step=manifest.step, refused=refused)
            return key, manifest, state
        except (CorruptObject, NotFound) as error:
            problem = f"{error.args[0]} is missing" if isinstance(error, NotFound) else str(error)
            log.error(CHECKPOINT_REFUSED, key=key, error=problem)
            refused.append(f"{key}: {problem}")
            key = parent
    raise CorruptObject("no checkpoint of this run can be read: " + "; ".join(refused))
