"""Snapshots: published weights, full or as deltas, written and read without a temporary file (system.md §4).

Names are imported on first use: manifests are readable (`tba status`, `tba inspect`) without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tba.snapshots.fetch import fetch_assets, fetch_snapshot
    from tba.snapshots.fetcher import SnapshotFetcher
    from tba.snapshots.manifest import fetch_manifest
    from tba.snapshots.publish import publish_snapshot
    from tba.snapshots.snapshot import Snapshot

__all__ = ["Snapshot", "SnapshotFetcher", "fetch_assets", "fetch_manifest", "fetch_snapshot", "publish_snapshot"]

_HOMES = {
    "Snapshot": "tba.snapshots.snapshot",
    "SnapshotFetcher": "tba.snapshots.fetcher",
    "fetch_assets": "tba.snapshots.fetch",
    "fetch_manifest": "tba.snapshots.manifest",
    "fetch_snapshot": "tba.snapshots.fetch",
    "publish_snapshot": "tba.snapshots.publish",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
