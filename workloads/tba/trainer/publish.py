"""Publishes the policy's weights: stage on the host in the loop's thread, upload and commit beside it.

```
loop thread        stage (copy to host, cast) ──► next step
background thread          └► data objects ► manifest ► CAS of latest (the commit point)
```
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tba.contracts.history import PublishRow
from tba.contracts.keys import WeightsKey, new_nonce
from tba.contracts.records import EvalRequest, Latest, SnapshotManifest
from tba.log import SNAPSHOT_PUBLISHED, log
from tba.protocol.latest import published
from tba.snapshots import publish_snapshot
from tba.store import ObjectStore
from tba.trainer.background import Background
from tba.trainer.committer import Committer


@dataclass(frozen=True, slots=True)
class Published:
    """A snapshot that `latest` names, or named."""

    key: str
    manifest: SnapshotManifest
    row: PublishRow


class Publisher:
    """Uploads at most one snapshot at a time; a second waits for the first, and the wait is counted."""

    def __init__(
        self,
        store: ObjectStore,
        committer: Committer,
        *,
        assets: Mapping[str, bytes],
        give_up_seconds: float,
        on_published: Callable[[Published], None],
    ) -> None:
        self._store = store
        self._committer = committer
        self._assets = assets
        self._on_published = on_published
        self._parent: str | None = None
        self.background = Background("publish", give_up_seconds=give_up_seconds)

    def publish(
        self,
        tensors: Mapping[str, Tensor],
        *,
        version: int,
        epoch: int,
        evaluation: EvalRequest | None,
        stage_seconds: float,
    ) -> float:
        """Start publishing host tensors (owned by the publisher from now on); returns seconds waited for the last.

        Raises: Fenced, StoreUnavailable: of the previous publish.
        """

        def task() -> None:
            started = time.monotonic()
            # A fresh prefix for each try: what a broken try left behind is garbage, never half of a snapshot.
            key = WeightsKey(version, epoch, new_nonce())
            manifest = publish_snapshot(
                self._store, key, tensors, assets=self._assets, parent=self._parent, evaluation=evaluation
            )
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
            log.info(SNAPSHOT_PUBLISHED, policy_version=version, epoch=epoch, total_bytes=manifest.total_bytes)
            self._on_published(Published(key.path, manifest, row))

        return self.background.submit(task)

    def _commit(self, key: WeightsKey, manifest: SnapshotManifest) -> Latest:
        wants = manifest.evaluation is not None

        def transition(current: Latest, nonce: str) -> Latest:
            return published(current, manifest=key.path, version=key.version, nonce=nonce, evaluation=wants)

        return self._committer.commit(transition)
