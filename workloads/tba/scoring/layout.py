"""How rows lie in a forward pass: packed end to end, each prompt once, or padded for models that cannot be packed.

Letters: B rows, n response tokens of all rows; N tokens fed to the model, Q query and E key places of all documents.

```
two rows of one prompt:   p p p  a a  b b b        the last token of a response predicts nothing: it is not fed
documents (query | key):  [p p p | p p p]  [a a | p p p a a]  [b b b | p p p b b b]
```
A document's queries are its last tokens, its keys all of it, and attention is causal: what a response sees of its
prompt is the same as in a row of its own, so the prompt is computed once for all the rows that share it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Layout = Literal["varlen", "buckets", "padded"]
"""varlen: one call of a variable-length kernel; buckets: documents of similar length in one call of SDPA each;
padded: rows of similar length in one forward pass each, nothing shared, any model."""

PADDING_TOKENS = 256
"""Padding that costs about as much as one more forward pass over a small block."""
BUCKET_PADDING = 1024
"""Padded places of attention alone that cost about as much as one more call."""


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Documents of similar length, padded on the right for one call of attention."""

    num: int  # b
    queries: int  # longest
    keys: int  # longest
    offset: Tensor  # (b,) int64: keys before the first query of each document
    aligned: bool
    """Queries are all keys in each document: plain causal attention, no mask."""
    masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)
    """Those made so far, by window and dtype: the layers share them."""


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """What attention within documents needs. Half of it is empty, by layout."""

    shared: bool
    """Some keys belong to several documents."""
    keys: Tensor  # (E,) int64: token of each key place; padded in buckets
    cu_queries: Tensor  # (documents + 1,) int32
    cu_keys: Tensor
    max_queries: int
    max_keys: int
    buckets: tuple[Bucket, ...] = ()
    queries: Tensor | None = None  # (Q,) int64: token of each padded query place
    places: Tensor | None = None  # (N,) int64: query place of each token
    padding: Tensor | None = None  # int64: query places that hold no token


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One forward pass."""

    input_ids: Tensor  # (b, l) int64; (1, N) if packed
    position_ids: Tensor | None
    packing: Packing | None


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Prompt+response rows laid out, and their n response tokens in the order of the rows."""

    blocks: tuple[Block, ...]
    source: Tensor  # (n,) int64: place, in the blocks' tokens one after another, whose hidden state predicts it
    target: Tensor  # (n,) int64: its id
    row: Tensor  # (n,) int64: its row
    within: Tensor  # (n,) int64: its place in the response
    num_rows: int  # B
    longest_response: int
    num_tokens: int
    """Fed to the model, padding apart: what the forward pass costs."""


def pack_rows(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    device: torch.device | str,
    layout: Layout = "buckets",
) -> Rows:
    """Lay out (prompt, response) pairs. Equal prompts are computed once where the layout is a packed one.

    On a GPU the copies are asynchronous, in the order of the current stream.
    Raises: ValueError if a prompt or a response is empty.
    """
    if any(len(p) == 0 for p in prompts) or any(len(r) == 0 for r in responses):
        raise ValueError("prompts and responses must hold at least one token each")
    counts = np.array([len(r) for r in responses], dtype=np.int64)  # (B,)
    row = np.repeat(np.arange(len(counts)), counts)  # (n,)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    if layout == "padded":
        blocks, first, rest, fed = _padded(prompts, responses, device)
    else:
        blocks, first, rest, fed = _packed(prompts, responses, device, layout)
    source = np.where(within == 0, first[row], rest[row] + within - 1)
    return Rows(
        blocks=blocks,
        source=to_device(source, device),
        target=to_device(np.concatenate(responses).astype(np.int64), device),
        row=to_device(row, device),
        within=to_device(within, device),
        num_rows=len(counts),
        longest_response=int(counts.max()),
        num_tokens=fed,
    )


def to_device(array: np.ndarray, device: torch.device | str) -> Tensor:
    """A tensor of the array; to a GPU through pinned memory, so that the copy waits for nothing."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


# -- packed

_Packed = tuple[tuple[Block, ...], np.ndarray, np.ndarray, int]
"""Blocks; per row, place that predicts the first response token, and place of that token; tokens fed."""


@dataclass(slots=True)
class _Documents:
    """Grows by a document at a time."""

    tokens: list[np.ndarray]
    positions: list[np.ndarray]
    queries: list[tuple[int, int]]  # (start, end) of the document's own tokens
    prefix: list[tuple[int, int]]  # (start, end) of tokens before them, of another document
    size: int = 0

    def add(self, tokens: np.ndarray, start: int, prefix: tuple[int, int]) -> int:
        """Append a document whose first token has position `start`; returns that token's place."""
        place = self.size
        if len(tokens):
            self.tokens.append(tokens)
            self.positions.append(np.arange(start, start + len(tokens)))
            self.queries.append((place, place + len(tokens)))
            self.prefix.append(prefix)
            self.size += len(tokens)
        return place


def _packed(
    prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], device: torch.device | str, layout: Layout
) -> _Packed:
    rows_of: dict[bytes, list[int]] = {}
    for i, prompt in enumerate(prompts):
        rows_of.setdefault(np.asarray(prompt, dtype=np.int64).tobytes(), []).append(i)
    documents = _Documents([], [], [], [])
    first, rest = np.zeros(len(prompts), np.int64), np.zeros(len(prompts), np.int64)
    for rows in rows_of.values():
        prompt = prompts[rows[0]]
        size = len(prompt)
        if len(rows) == 1:
            start = documents.add(np.concatenate([prompt, responses[rows[0]][:-1]]), 0, (0, 0))
            first[rows[0]], rest[rows[0]] = start + size - 1, start + size
            continue
        start = documents.add(np.asarray(prompt), 0, (0, 0))
        for row in rows:
            first[row] = start + size - 1
            rest[row] = documents.add(responses[row][:-1], size, (start, start + size))
    packing = _bucketed(documents, device) if layout == "buckets" else _varlen(documents, device)
    input_ids = to_device(np.concatenate(documents.tokens).astype(np.int64)[None], device)
    positions = to_device(np.concatenate(documents.positions).astype(np.int64)[None], device)
    return (Block(input_ids, positions, packing),), first, rest, documents.size


def _varlen(documents: _Documents, device: torch.device | str) -> Packing:
    keys, shared = _key_tokens(documents), _is_shared(documents)
    lengths = [end - start for start, end in documents.queries]
    sizes = [len(k) for k in keys]
    return Packing(
        shared=shared,
        keys=to_device(np.concatenate(keys) if shared else np.zeros(0, np.int64), device),
        cu_queries=to_device(np.cumsum([0, *lengths]).astype(np.int32), device),
        cu_keys=to_device(np.cumsum([0, *sizes]).astype(np.int32), device),
        max_queries=max(lengths),
        max_keys=max(sizes),
    )


def _bucketed(documents: _Documents, device: torch.device | str) -> Packing:
    keys = _key_tokens(documents)
    lengths = [(end - start, len(k)) for (start, end), k in zip(documents.queries, keys, strict=True)]
    buckets: list[Bucket] = []
    query_places, key_places, places = [], [], np.zeros(documents.size, np.int64)
    padding, offset = [], 0
    for chosen in split_documents(lengths):
        width, height = max(lengths[d][0] for d in chosen), max(lengths[d][1] for d in chosen)
        queries, taken = np.zeros((len(chosen), width), np.int64), np.zeros((len(chosen), height), np.int64)
        real = np.zeros((len(chosen), width), dtype=bool)
        for i, d in enumerate(chosen):
            start, end = documents.queries[d]
            queries[i, : end - start] = np.arange(start, end)
            real[i, : end - start] = True
            taken[i, : len(keys[d])] = keys[d]
            places[start:end] = offset + i * width + np.arange(end - start)
        padding.append(offset + np.flatnonzero(~real.ravel()))
        offset += queries.size
        query_places.append(queries.ravel())
        key_places.append(taken.ravel())
        ahead = np.array([lengths[d][1] - lengths[d][0] for d in chosen], np.int64)
        aligned = not ahead.any() and width == height
        buckets.append(Bucket(len(chosen), width, height, to_device(ahead, device), aligned))
    none = torch.zeros(0, dtype=torch.int32)
    return Packing(
        shared=_is_shared(documents),
        keys=to_device(np.concatenate(key_places), device),
        cu_queries=none,
        cu_keys=none,
        max_queries=max(q for q, _ in lengths),
        max_keys=max(k for _, k in lengths),
        buckets=tuple(buckets),
        queries=to_device(np.concatenate(query_places), device),
        places=to_device(places, device),
        padding=to_device(np.concatenate(padding), device),
    )


def split_documents(lengths: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Document numbers, by (queries, keys) from the longest, in buckets of little padding.

    The share allowed keeps buckets few, hence each call large, when there are many long documents.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i][0], -lengths[i][1], i))
    bucket: list[int] = []
    real, height = 0, 0
    for d in order:
        queries, keys = lengths[d]
        taller = max(height, keys)
        places = (len(bucket) + 1) * ((lengths[bucket[0]][0] if bucket else queries) + taller)
        total = real + queries + keys
        if bucket and places - total > BUCKET_PADDING + total // 8:
            yield bucket
            bucket, real, taller = [], 0, keys
        bucket.append(d)
        real, height = real + queries + keys, taller
    if bucket:
        yield bucket


def _key_tokens(documents: _Documents) -> list[np.ndarray]:
    return [
        np.concatenate([np.arange(*prefix), np.arange(*own)])
        for prefix, own in zip(documents.prefix, documents.queries, strict=True)
    ]


def _is_shared(documents: _Documents) -> bool:
    return any(end > start for start, end in documents.prefix)


# -- padded


def _padded(prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], device: torch.device | str) -> _Packed:
    """Causal attention (or any causal mixing) hides padding on the right from real tokens: no mask."""
    lengths = [len(p) + len(r) - 1 for p, r in zip(prompts, responses, strict=True)]
    blocks: list[Block] = []
    first, rest = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    offset = 0
    for rows in split_by_length(lengths):
        width = lengths[rows[0]]
        input_ids = np.zeros((len(rows), width), dtype=np.int64)  # (b, l)
        for i, row in enumerate(rows):
            input_ids[i, : lengths[row]] = np.concatenate([prompts[row], responses[row][:-1]])
            first[row] = offset + i * width + len(prompts[row]) - 1
            rest[row] = first[row] + 1
        offset += input_ids.size
        blocks.append(Block(to_device(input_ids, device), None, None))
    return tuple(blocks), first, rest, sum(lengths)


def split_by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Row numbers, longest first, in blocks whose padding stays below `PADDING_TOKENS` + 1/16 of their tokens."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    block: list[int] = []
    tokens = padding = 0
    for row in order:
        more = lengths[block[0]] - lengths[row] if block else 0
        if padding + more > PADDING_TOKENS + tokens // 16:
            yield block
            block, tokens, padding, more = [], 0, 0, 0
        block.append(row)
        tokens, padding = tokens + lengths[row], padding + more
    if block:
        yield block
