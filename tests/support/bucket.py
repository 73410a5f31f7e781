"""A bucket filled by hand for garbage tests: snapshots, checkpoints and shards at chosen times."""

from dataclasses import dataclass, field

from support.memory_store import MemoryStore, Nonces

from tba.contracts.keys import LATEST, CheckpointKey, ShardKey, WeightsKey
from tba.contracts.records import CheckpointManifest, FileEntry, IngestState, Latest, Lineage, ShardId, SnapshotManifest
from tba.protocol.latest import checkpointed, published
from tba.trainer.committer import Committer

HASH = "0" * 32


@dataclass
class Bucket:
    """Writes as a trainer would. Each write happens at `store.clock`, which the test moves."""

    store: MemoryStore = field(default_factory=MemoryStore)
    nonce: Nonces = field(default_factory=Nonces)

    def __post_init__(self) -> None:
        self.committer = Committer.take_over(self.store)
        self.parent: str | None = None
        self.scores: dict[int, float] = {}

    @property
    def epoch(self) -> int:
        return self.committer.epoch

    @property
    def latest(self) -> Latest:
        return Latest.model_validate_json(self.store.objects[LATEST].data)

    def take_over(self) -> None:
        self.committer = Committer.take_over(self.store)

    def snapshot(self, version, *, base=None, commit=True, complete=True, evaluation=False) -> str:
        key = WeightsKey(version, self.epoch, self.nonce())
        self.store.put_once(f"{key.prefix}data.safetensors", b"w")
        if complete:
            manifest = SnapshotManifest(
                epoch=key.epoch, version=version, nonce=key.nonce, base=base, tensors=[],
                encoding="full" if base is None else "delta",
                files=[FileEntry(name="data.safetensors", size=1, hash=HASH)],
            )  # fmt: skip
            self.store.put_once(key.path, manifest.to_json())
        if commit:
            self.committer.commit(
                lambda current, nonce: published(
                    current, manifest=key.path, version=version, nonce=nonce, evaluation=evaluation
                )
            )
        return key.path

    def checkpoint(self, step, *, score=None, commit=True, complete=True, ingest=None) -> str:
        """`score`: of this step's evaluation, which ends after the checkpoint has been written."""
        key = CheckpointKey(step, self.epoch, self.nonce())
        self.store.put_once(f"{key.prefix}data.safetensors", b"c")
        manifest = CheckpointManifest(
            epoch=key.epoch, step=step, nonce=key.nonce, parent=self.parent, ingest=ingest or IngestState(),
            files=[FileEntry(name="data.safetensors", size=1, hash=HASH)], lineage=Lineage(), ingest_log_seq=0,
            metrics_log_seq=0, wall_seconds=0, eval_scores=dict(self.scores),
        )  # fmt: skip
        if complete:
            self.store.put_once(key.path, manifest.to_json())
        if commit:
            self.committer.commit(lambda current, nonce: checkpointed(current, key.path, nonce))
            self.parent = key.path
        if score is not None:
            self.scores[step] = score
        return key.path

    def shard(self, seq) -> tuple[ShardId, str]:
        key = ShardKey(1, "searcher-0", "a" * 32, seq)
        self.store.put_once(key.path, b"s")
        return ShardId(key.incarnation, seq), key.path

    def folders(self, kind) -> list[str]:
        """Folders of `kind` that still hold data, as `number/epoch`."""
        found = (k.removeprefix(kind).split("/") for k in self.store.objects if k.startswith(kind) and "data" in k)
        return sorted(f"{int(number)}/{int(rest.split('-')[0])}" for number, rest, _ in found)

    def missing(self) -> list[str]:
        """What is named by `latest`, and not there: its snapshot with all bases, and its newest checkpoint."""
        gone, key = [], self.latest.manifest
        while key is not None:
            gone += [k for k in (key, key.replace("manifest.json", "data.safetensors")) if k not in self.store.objects]
            key = SnapshotManifest.model_validate_json(self.store.objects[key].data).base if not gone else None
        newest = self.latest.checkpoint
        if newest is not None:
            pair = (newest, newest.replace("manifest.json", "data.safetensors"))
            gone += [k for k in pair if k not in self.store.objects]
        return gone

    def baseless(self) -> list[str]:
        """Deltas whose base is not whole."""
        manifests = [k for k in self.store.objects if k.startswith("weights/") and k.endswith("/manifest.json")]
        bases = {k: SnapshotManifest.model_validate_json(self.store.objects[k].data).base for k in manifests}
        data = {b: b.replace("manifest.json", "data.safetensors") for b in bases.values() if b is not None}
        return [k for k, b in bases.items() if b is not None and not {b, data[b]} <= set(self.store.objects)]

    def restorable(self) -> list[int]:
        """Steps of the checkpoints that following parents can restore, newest first."""
        steps, key = [], self.latest.checkpoint
        while key in self.store.objects:
            manifest = CheckpointManifest.model_validate_json(self.store.objects[key].data)
            if key.replace("manifest.json", "data.safetensors") in self.store.objects:
                steps.append(manifest.step)
            key = manifest.parent
        return steps
