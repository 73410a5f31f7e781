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
        self.key_buffer: torch.Tensor | None = None  # (B, H, >= T, D)
        self.value_buffer: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Of the base class; buffers are made by `update`."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append along T and return all of it."""
        end = self.length + key_states.shape[-2]
        self.key_buffer = keys = _appended(self.key_buffer, self.length, key_states)
        self.value_buffer = values = _appended(self.value_buffer, self.length, value_states)
        self.length = end
        return keys[:, :, :end], values[:, :, :end]

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
    """All layers. Rows change by `join` alone, which makes a new cache."""

    def __init__(self, num_layers: int) -> None:
        self.rows_of = [RowLayer() for _ in range(num_layers)]
        super().__init__(layers=list(self.rows_of))

    @property
    def length(self) -> int:
        """T."""
        return self.rows_of[0].length

    def move(self, device: torch.device | str) -> None:
        """To another device, in place."""
        for rows in self.rows_of:
            if rows.key_buffer is not None and rows.value_buffer is not None:
                rows.key_buffer, rows.value_buffer = rows.key_buffer.to(device), rows.value_buffer.to(device)

    @classmethod
    def join(cls, parts: "list[tuple[RowCache, torch.Tensor, int]]") -> "RowCache":
        """Stack selected rows of several caches, right-aligned.

        Each part is (cache, row indices (n,) int64, leading positions to leave out).
        """
        joined = cls(len(parts[0][0].rows_of))
        length = max(cache.length - skip for cache, _, skip in parts)
        for i, target in enumerate(joined.rows_of):
            sources = [(cache.rows_of[i], rows, skip) for cache, rows, skip in parts]
            target.key_buffer = _stack([(s.key_buffer, s.length, rows, skip) for s, rows, skip in sources], length)
            target.value_buffer = _stack([(s.value_buffer, s.length, rows, skip) for s, rows, skip in sources], length)
            target.length = length
        return joined


def _empty(like: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    return like.new_empty((rows, like.shape[1], length + _ROOM, like.shape[3]))


def _appended(buffer: torch.Tensor | None, length: int, states: torch.Tensor) -> torch.Tensor:
    """The buffer, or a larger copy of it, with `states` written from `length` on."""
    end = length + states.shape[-2]
    if buffer is None or end > buffer.shape[-2]:
        larger = _empty(states, states.shape[0], end)
        if buffer is not None:
            larger[:, :, :length] = buffer[:, :, :length]
        buffer = larger
    buffer[:, :, length:end] = states
    return buffer


def _stack(parts: list[tuple[torch.Tensor | None, int, torch.Tensor, int]], length: int) -> torch.Tensor:
    filled = [(buffer, end, index, skip) for buffer, end, index, skip in parts if buffer is not None]
    stacked = _empty(filled[0][0], sum(len(index) for _, _, index, _ in filled), length)
    at = 0
    for buffer, end, index, skip in filled:
        part = stacked[at : at + len(index)]
        pad = length - (end - skip)
        part[:, :, :pad] = 0  # masked, but 0 * garbage may be nan
        part[:, :, pad:length] = buffer[:, :, skip:end].index_select(0, index)
        at += len(index)
    return stacked
