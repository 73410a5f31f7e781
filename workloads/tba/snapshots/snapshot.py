"""A snapshot in host memory. Names are known without torch: an engine that needs no weights runs without it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tba.contracts.records import SnapshotManifest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Verified weights in host memory. Nobody writes into them: others may hold views of the same bytes."""

    key: str  # of the manifest
    manifest: SnapshotManifest
    tensors: "dict[str, Tensor]"  # views of one buffer; pinned if this process uses CUDA
    assets: dict[str, bytes]  # config.json, tokenizer files; of a delta its anchor's, of an adapter its base's
    adapter: "dict[str, Tensor] | None" = None  # to go on `tensors`, which are its base's; None: they are all there is

    def merged(self) -> "Snapshot":
        """The same weights without an adapter beside them. What has none is shared. Raises: CorruptObject."""
        if self.adapter is None:
            return self
        from tba.lora import merged
        from tba.snapshots.hostmemory import HOST_ALLOCATION

        with HOST_ALLOCATION:  # pinned, if this process uses CUDA
            weights = merged(self.tensors, self.adapter, scale=self.manifest.scale or 0.0)
        return Snapshot(self.key, self.manifest, weights, self.assets)
