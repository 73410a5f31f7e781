"""Storage of the replay buffer: growable parallel columns with stable ids, and an arena of tokens. Pure."""

import numpy as np

CHUNK_TOKENS = 1 << 20  # of the largest chunk (4 MiB); a position is chunk number x this + offset, in one int64
_FIRST_CHUNK_TOKENS = 1 << 14  # chunks grow with the arena, so that a small buffer stays small


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    """`array` with room for `size` items; large ones grow by an eighth, so that slack stays small."""
    if size <= len(array):
        return array
    room = max(size, len(array) * 2 if len(array) < 65536 else len(array) + len(array) // 8)
    bigger = np.zeros(room, array.dtype)
    bigger[: len(array)] = array
    return bigger


class Columns:
    """Rows as one array a field. An id stays valid until freed, then is handed out again."""

    def __init__(self, **dtypes: str) -> None:
        """`dtypes`: numpy dtype of each field."""
        self._arrays = {name: np.zeros(0, dtype) for name, dtype in dtypes.items()}
        self._size = 0
        self._free = np.zeros(0, "i4")
        self._num_free = 0

    def __len__(self) -> int:
        """Ids in use."""
        return self._size - self._num_free

    def __getitem__(self, name: str) -> np.ndarray:
        """The column of a field up to the highest id ever used; writable, valid until the next `allocate`."""
        return self._arrays[name][: self._size]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(a.nbytes for a in self._arrays.values()) + self._free.nbytes

    def allocate(self, num: int) -> np.ndarray:
        """`num` ids, int64 (num,); their fields hold anything."""
        reused = min(num, self._num_free)
        ids = np.empty(num, "i8")
        ids[:reused] = self._free[self._num_free - reused : self._num_free]
        self._num_free -= reused
        ids[reused:] = np.arange(self._size, self._size + num - reused)
        self._size += num - reused
        for name, array in self._arrays.items():
            self._arrays[name] = _grown(array, self._size)
        return ids

    def free(self, ids: np.ndarray) -> None:
        """Give distinct ids back."""
        self._free = _grown(self._free, self._num_free + len(ids))
        self._free[self._num_free : self._num_free + len(ids)] = ids
        self._num_free += len(ids)


class TokenArena:
    """Token sequences in chunks of int32. A chunk is written once and never reused, so a view of it stays right."""

    def __init__(self) -> None:
        self._chunks: list[np.ndarray | None] = []
        self._used: list[int] = []  # tokens written, by chunk
        self._live: list[int] = []  # of them not freed
        self._vacant: list[int] = []  # chunk numbers given up
        self._current = -1

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(c.nbytes for c in self._chunks if c is not None)

    @property
    def fragmented(self) -> bool:
        """Whether dead tokens are more than half of the living (and it is worth moving them)."""
        live = sum(self._live)
        return sum(self._used) - live > max(live // 2, _FIRST_CHUNK_TOKENS)

    def append(self, tokens: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Store sequences tokens[offsets[i]:offsets[i + 1]]; returns their positions, int64 (n,)."""
        starts = np.empty(len(offsets) - 1, "i8")
        first = 0
        while first < len(starts):
            chunk = self._room_for(int(offsets[first + 1] - offsets[first]))
            used, block = self._used[chunk], self._chunks[chunk]
            assert block is not None
            last = int(np.searchsorted(offsets, offsets[first] + len(block) - used, side="right")) - 1
            begin, end = int(offsets[first]), int(offsets[last])
            block[used : used + end - begin] = tokens[begin:end]
            starts[first:last] = chunk * CHUNK_TOKENS + used + (offsets[first:last] - begin)
            self._used[chunk] += end - begin
            self._live[chunk] += end - begin
            first = last
        return starts

    def view(self, start: int, length: int) -> np.ndarray:
        """One sequence, read-only."""
        if length == 0:  # its position may lie at the end of a chunk
            return np.zeros(0, "i4")
        block = self._chunks[start // CHUNK_TOKENS]
        assert block is not None
        offset = start % CHUNK_TOKENS
        view = block[offset : offset + length]
        view.flags.writeable = False
        return view

    def free(self, starts: np.ndarray, lengths: np.ndarray) -> None:
        """Forget sequences; a chunk without a live token is returned to the system."""
        chunks, which = np.unique(starts[lengths > 0] // CHUNK_TOKENS, return_inverse=True)
        dead = np.bincount(which, weights=lengths[lengths > 0])
        for chunk, num in zip(chunks.tolist(), dead.tolist(), strict=True):
            self._live[chunk] -= int(num)
            self._give_up(chunk)

    def move(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Compact: rewrite the sequences of chunks with many dead tokens; returns all positions anew.

        `starts`, `lengths` must name every live sequence once.
        """
        poor = np.array([2 * (u - live) > live for u, live in zip(self._used, self._live, strict=True)])
        sealed, self._current = self._current, -1  # the current chunk may itself be poor
        if sealed >= 0:
            self._give_up(sealed)
        moved = np.flatnonzero(lengths > 0)
        moved = moved[poor[starts[moved] // CHUNK_TOKENS]]
        moved = moved[np.argsort(starts[moved], kind="stable")]
        result = starts.copy()
        bounds = np.flatnonzero(np.diff(starts[moved] // CHUNK_TOKENS)) + 1
        for part in np.split(moved, bounds):
            if len(part):
                result[part] = self._rewrite(starts[part], lengths[part])
        return result

    def _rewrite(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Copy sequences of one chunk to the end of the arena."""
        block = self._chunks[int(starts[0]) // CHUNK_TOKENS]
        assert block is not None
        offsets = np.concatenate([np.zeros(1, "i8"), np.cumsum(lengths, dtype="i8")])
        source = np.arange(offsets[-1]) + np.repeat(starts % CHUNK_TOKENS - offsets[:-1], lengths)
        new = self.append(block[source], offsets)
        self.free(starts, lengths)
        return new

    def _room_for(self, length: int) -> int:
        """The current chunk if `length` tokens fit into it, else a new one."""
        if length > CHUNK_TOKENS:
            raise ValueError(f"a response may have at most {CHUNK_TOKENS} tokens, got {length}")
        full = self._current
        if full >= 0 and self._used[full] + length <= len(self._chunks[full]):  # type: ignore[arg-type]
            return full
        if self._vacant:
            self._current = self._vacant.pop()
        else:
            self._current = len(self._chunks)
            self._chunks.append(None)
            self._used.append(0)
            self._live.append(0)
        room = min(CHUNK_TOKENS, max(_FIRST_CHUNK_TOKENS, sum(self._live) // 8, length))
        self._chunks[self._current] = np.empty(room, "i4")
        if full >= 0:
            self._give_up(full)
        return self._current

    def _give_up(self, chunk: int) -> None:
        """Return a chunk without a live token, unless it is being written."""
        if self._live[chunk] == 0 and chunk != self._current:
            self._chunks[chunk], self._used[chunk] = None, 0
            self._vacant.append(chunk)


def sequence_hashes(tokens: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """A 32-bit hash of each sequence, uint32 (n,). Equal sequences have equal hashes; the converse must be checked."""
    lengths = np.diff(offsets)
    place = (np.arange(offsets[0], offsets[-1]) - np.repeat(offsets[:-1], lengths)).astype("u8")
    mixed = (tokens[offsets[0] : offsets[-1]].astype("u8") + np.uint64(0x9E3779B97F4A7C15)) * (
        (place * np.uint64(0xD1342543DE82EF95)) | np.uint64(1)
    )
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    total = np.concatenate([np.zeros(1, "u8"), np.cumsum(mixed, dtype="u8")])  # wraps: differences stay exact
    start = offsets - offsets[0]
    return ((total[start[1:]] - total[start[:-1]]) >> np.uint64(32)).astype("u4")
