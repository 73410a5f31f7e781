"""Weights that move a little with each version, published as an anchor and deltas on it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tba.contracts.keys import WeightsKey, new_nonce
from tba.contracts.records import SnapshotManifest
from tba.snapshots import publish_snapshot
from tba.snapshots.encode import Base, encode_delta
from tba.snapshots.publish import publish_delta

ASSETS = {"config.json": b"{}"}


def moving_weights(version: int) -> dict[str, Tensor]:
    """bf16 matrices, a float32 vector, a scalar, an empty tensor, and one tensor that never changes."""
    generator = torch.Generator().manual_seed(0)
    found = {f"layer.{i}": torch.randn(40, 30, generator=generator).bfloat16() for i in range(4)}
    found["norm"] = torch.randn(7, generator=generator)
    found["scale"] = torch.tensor(1.5)
    found["empty"] = torch.zeros(0, 3, dtype=torch.bfloat16)
    for step in range(version):
        for name in ("layer.0", "layer.1", "layer.2", "norm", "scale"):
            noise = torch.rand(found[name].shape, generator=torch.Generator().manual_seed(step))
            found[name] = torch.where(noise < 0.1, found[name] * 1.01, found[name])
    return found


@dataclass
class Chain:
    """Publishes into `store` as one trainer's process does; deltas of any size."""

    store: Any
    epoch: int = 1
    max_file_bytes: int = 2**30
    bases: list[Base] = field(default_factory=list)

    def full(self, version: int) -> str:
        key, tensors = WeightsKey(version, self.epoch, new_nonce()), moving_weights(version)
        manifest = publish_snapshot(
            self.store, key, tensors, assets=ASSETS, parent=self._parent, evaluation=None,
            max_file_bytes=self.max_file_bytes,
        )  # fmt: skip
        return self._published(key, manifest, tensors)

    def delta(self, version: int) -> str:
        key, tensors = WeightsKey(version, self.epoch, new_nonce()), moving_weights(version)
        encoded = encode_delta(self.bases[-1], tensors, max_bytes=float("inf"))
        assert encoded is not None
        manifest = publish_delta(
            self.store, key, encoded, parent=self._parent, evaluation=None, max_file_bytes=self.max_file_bytes
        )
        return self._published(key, manifest, tensors)

    def up_to(self, version: int) -> list[str]:
        """An anchor of version 0 and deltas 1..version."""
        return [self.full(0), *(self.delta(v) for v in range(1, version + 1))]

    @property
    def _parent(self) -> str | None:
        return self.bases[-1].key if self.bases else None

    def _published(self, key: WeightsKey, manifest: SnapshotManifest, tensors: Mapping[str, Tensor]) -> str:
        self.bases.append(Base(key.path, manifest, tensors))
        return key.path


def same(found: Mapping[str, Tensor], version: int) -> bool:
    """Whether these are the weights of `version`, bit for bit."""
    wanted = moving_weights(version)
    return found.keys() == wanted.keys() and all(
        found[n].dtype == t.dtype and found[n].shape == t.shape and torch.equal(found[n], t) for n, t in wanted.items()
    )
