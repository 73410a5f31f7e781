"""Publishes the policy's weights: stage on the host in the loop's thread, encode, upload and commit beside it.

```
loop thread        stage (copy to host, cast) ──► next step
background thread          └► delta? (encoded by a pool of threads) ► data objects ► manifest ► CAS of latest: commit
```
With several ranks each stages, encodes and uploads its own part, beside its own training (`parts`, `uploader`); what
is here is rank 0's. See docs/decisions/0030-sharded-upload.md.

Deltas form a chain: each builds on the snapshot before it, so that a searcher that follows reads the least there is. A
late joiner reads the anchor and less than `sync.delta.anchorEvery` deltas, however long the run is. Host memory: the
staged weights of the last publish stay beside those of the next one as long as `sync.delta.enabled`.
See docs/decisions/0020-delta-snapshots.md.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from tba import telemetry
from tba.contracts.config import Delta
from tba.contracts.errors import CorruptObject
from tba.contracts.history import PublishRow
from tba.contracts.keys import WeightsKey, new_nonce
from tba.contracts.records import EvalRequest, Latest, SnapshotManifest
from tba.log import SNAPSHOT_PUBLISHED, SNAPSHOT_REJECTED, log
from tba.protocol.latest import published
from tba.snapshots.encode import Base, EncodedDelta, encode_delta, full_bytes
from tba.snapshots.manifest import Link, fetch_manifest
from tba.snapshots.publish import (
    DELTA,
    FULL,
    MAX_FILE_BYTES,
    Part,
    finish_delta,
    finish_snapshot,
    part_stem,
    publish_adapter,
    put_encoded,
    put_tensors,
)
from tba.store import ObjectStore, OutOfSpace
from tba.trainer.background import Background
from tba.trainer.committer import Committer
from tba.trainer.parts import Parts


@dataclass(frozen=True, slots=True)
class Published:
    """A snapshot that `latest` names, or named."""

    key: str
    manifest: SnapshotManifest
    row: PublishRow


@dataclass(frozen=True, slots=True)
class AdapterOf:
    """Says that tensors are an adapter's, and of what."""

    base: str
    """Manifest key of version 0."""
    scale: float


class Publisher:
    """Uploads at most one snapshot at a time; a second waits for the first, and the wait is counted."""

    def __init__(
        self,
        store: ObjectStore,
        committer: Committer,
        *,
        assets: Mapping[str, bytes],
        delta: Callable[[], Delta],
        give_up_seconds: float,
        on_published: Callable[[Published], None],
        parts: Parts | None = None,
    ) -> None:
        """`parts`: the other ranks that upload, where several hold the weights; null: all are in this process."""
        self._store = store
        self._committer = committer
        self._assets = assets
        self._delta = delta
        self._on_published = on_published
        self._parts = parts
        self._parent: str | None = None
        self._base: Base | None = None
        self._adapted: Link | None = None
        self.background = Background("publish", give_up_seconds=give_up_seconds)

    def publish(
        self,
        tensors: Mapping[str, Tensor],
        *,
        version: int,
        epoch: int,
        evaluation: EvalRequest | None,
        stage_seconds: float,
        adapter: AdapterOf | None = None,
    ) -> float:
        """Start publishing host tensors, which nobody may change from now on; returns seconds waited for the last.

        They are this process's part where others have theirs. `adapter`: they are this one's alone, and all are here.
        Raises: Fenced, StoreUnavailable: of the previous publish.
        """
        encoded: dict[str, EncodedDelta | None] = {}  # by base: a try after a broken one has it already

        def task() -> None:
            started = time.monotonic()
            # A fresh prefix for each try: what a broken try left behind is garbage, never half of a snapshot.
            key = WeightsKey(version, epoch, new_nonce())
            try:
                if adapter is not None:
                    manifest = self._upload_adapter(key, tensors, adapter, evaluation)
                else:
                    manifest = self._upload(key, tensors, encoded, evaluation)
            except OutOfSpace:
                # Else each try would take what has become free since the last one, and none would ever fit.
                self._store.delete([left.key for left in self._store.list_after(key.prefix)])
                raise
            uploaded = time.monotonic()
            self._commit(key, manifest)
            row = PublishRow(
                epoch=epoch,
                step=version,
                time=time.time(),
                version=version,
                encoding=manifest.encoding,
                total_bytes=manifest.total_bytes,
                stage_seconds=stage_seconds,
                upload_seconds=uploaded - started,
                commit_seconds=time.monotonic() - uploaded,
            )
            self._parent = key.path
            follows = self._delta().enabled and adapter is None
            self._base = Base(key.path, manifest, tensors) if follows else None
            if self._parts is not None and adapter is None:
                self._parts.settle(key.path if follows else None)
            log.info(
                SNAPSHOT_PUBLISHED,
                policy_version=version,
                epoch=epoch,
                encoding=manifest.encoding,
                total_bytes=manifest.total_bytes,
            )
            self._on_published(Published(key.path, manifest, row))

        return self.background.submit(task)

    def _upload(
        self,
        key: WeightsKey,
        tensors: Mapping[str, Tensor],
        encoded: dict[str, EncodedDelta | None],
        evaluation: EvalRequest | None,
    ) -> SnapshotManifest:
        """As a delta if that is allowed and small enough, else in full."""
        settings, base = self._delta(), self._base
        if base is not None and may_follow(base.key, base.manifest, settings, key.epoch, self._committer.latest):
            if base.key not in encoded:
                encoded[base.key] = _encode(base, tensors, settings, self._parts)
            delta = encoded[base.key]
            if delta is not None:
                return self._upload_delta(key, delta, evaluation)
        return self._upload_full(key, tensors, evaluation)

    def _upload_delta(self, key: WeightsKey, delta: EncodedDelta, evaluation: EvalRequest | None) -> SnapshotManifest:
        own = partial(put_encoded, self._store, key, delta.part, stem=self._stem(DELTA), max_file_bytes=MAX_FILE_BYTES)
        part = self._put(key, "delta", own)
        return finish_delta(self._store, key, delta, part, parent=self._parent, evaluation=evaluation)

    def _upload_full(
        self, key: WeightsKey, tensors: Mapping[str, Tensor], evaluation: EvalRequest | None
    ) -> SnapshotManifest:
        own = partial(put_tensors, self._store, key, tensors, stem=self._stem(FULL), max_file_bytes=MAX_FILE_BYTES)
        part = self._put(key, "full", own)
        return finish_snapshot(self._store, key, part, assets=self._assets, parent=self._parent, evaluation=evaluation)

    def _put(self, key: WeightsKey, encoding: Literal["full", "delta"], own: Callable[[], Part]) -> Part:
        """All data objects below `key`; `own` writes this process's."""
        return own() if self._parts is None else self._parts.put(self._store, key, encoding, own)

    def _stem(self, stem: str) -> str:
        return stem if self._parts is None else part_stem(stem, 0)

    def _upload_adapter(
        self, key: WeightsKey, tensors: Mapping[str, Tensor], adapter: AdapterOf, evaluation: EvalRequest | None
    ) -> SnapshotManifest:
        if self._adapted is None or self._adapted.key != adapter.base:
            self._adapted = Link(adapter.base, fetch_manifest(self._store, adapter.base))
        return publish_adapter(
            self._store,
            key,
            tensors,
            scale=adapter.scale,
            base=self._adapted,
            parent=self._parent,
            evaluation=evaluation,
        )

    def _commit(self, key: WeightsKey, manifest: SnapshotManifest) -> Latest:
        wants = manifest.evaluation is not None

        def transition(current: Latest, nonce: str) -> Latest:
            return published(current, manifest=key.path, version=key.version, nonce=nonce, evaluation=wants)

        return self._committer.commit(transition)


def _encode(base: Base, tensors: Mapping[str, Tensor], settings: Delta, parts: Parts | None) -> EncodedDelta | None:
    """What this process holds of the difference; None: publish in full, for all."""
    started = time.monotonic()
    limit = settings.max_ratio * full_bytes(base.manifest.tensors)  # all parts together
    threads = None if parts is None else parts.num_threads
    own = partial(encode_delta, base, tensors, max_bytes=limit, num_threads=threads)
    try:
        return own() if parts is None else parts.encode(base.key, own, max_bytes=limit)
    except CorruptObject as error:
        log.error(SNAPSHOT_REJECTED, key=base.key, error=str(error))
        return None
    finally:
        telemetry.SYNC_SECONDS.labels("encode").observe(time.monotonic() - started)


def may_follow(key: str, manifest: SnapshotManifest, settings: Delta, epoch: int, latest: Latest) -> bool:
    """Whether a snapshot of `epoch` may be a delta on the one at `key`: chains are short, none crosses a take-over."""
    in_use = latest.manifest == key and manifest.epoch == epoch
    return settings.enabled and in_use and manifest.depth + 1 < settings.anchor_every
