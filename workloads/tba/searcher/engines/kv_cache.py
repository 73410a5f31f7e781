"""A key/value cache whose rows come and go: room ahead instead of a copy a token, rows selected, batches joined.

Rows are left-padded: a row's own entries are the last ones, and contiguous. Letters: B rows, T length, H heads, D size.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_ROOM = 32
"""Positions allocated ahead."""


class RowLayer(CacheLayerMixin):
    """Keys and values of one layer, (B, H, T, D) each, in buffers with room to grow."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Called by the base class's interface; buffers are made at the first update."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append along T and return all of it."""
        end = self.length + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = (_empty(s, s.shape[0], end) for s in (key_states, value_states))
        elif end > self.keys.shape[-2]:
            self.keys, self.values = (_moved(b, self.length, end) for b in (self.keys, self.values))
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(key length, offset) for the attention mask."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """T."""
        return self.length

    def get_max_length(self) -> int:
        """No limit."""
        return -1


class RowCache(Cache):
    """All layers. `join` and `select` are the only ways in which rows change."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[RowLayer() for _ in range(num_layers)])

    @property
    def length(self) -> int:
        """T."""
        return self.layers[0].get_seq_length()

    @classmethod
    def join(cls, parts: "list[tuple[RowCache, torch.Tensor, int]]") -> "RowCache":
        """Stack selected rows of several caches, right-aligned.

        Each part is (cache, row indices (n,) int64, leading positions to leave out).
        """
        joined = cls(len(parts[0][0].layers))
        length = max(cache.length - skip for cache, _, skip in parts)
        for i, target in enumerate(joined.layers):
            sources = [(cache.layers[i], rows, skip) for cache, rows, skip in parts]
            target.dtype, target.device = sources[0][0].dtype, sources[0][0].device
            target.keys = _stack([(s.keys, s.length, rows, skip) for s, rows, skip in sources], length)  # type: ignore[attr-defined]
            target.values = _stack([(s.values, s.length, rows, skip) for s, rows, skip in sources], length)  # type: ignore[attr-defined]
            target.length = length  # type: ignore[attr-defined]
            target.is_initialized = True
        return joined


def _empty(like: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    return like.new_empty((rows, like.shape[1], length + _ROOM, like.shape[3]))


def _moved(buffer: torch.Tensor, length: int, end: int) -> torch.Tensor:
    larger = _empty(buffer, buffer.shape[0], end)
    larger[:, :, :length] = buffer[:, :, :length]
    return larger


def _stack(parts: list[tuple[torch.Tensor, int, torch.Tensor, int]], length: int) -> torch.Tensor:
    rows = sum(len(index) for _, _, index, _ in parts)
    stacked = _empty(parts[0][0], rows, length)
    at = 0
    for buffer, filled, index, skip in parts:
        part = stacked[at : at + len(index)]
        pad = length - (filled - skip)
        part[:, :, :pad] = 0  # masked, but 0 * garbage may be nan
        part[:, :, pad:length] = buffer[:, :, skip:filled].index_select(0, index)
        at += len(index)
    return stacked
