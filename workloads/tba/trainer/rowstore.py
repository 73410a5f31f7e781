"""Rows of the replay buffer by id: their columns, tokens, identities and cached log-probabilities. Pure.

Knows nothing of visits or of what may be drawn; that is `buffer`'s.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tba.contracts.records import ShardId, TrajectoryId
from tba.trainer.columns import Columns, TokenArena, sequence_hashes
from tba.trainer.rows import NewRows

State = dict[str, np.ndarray]
Fetch = Callable[[Sequence[ShardId]], Iterable[NewRows]]

_QUEUE_SHARE = 64  # the queue of oldest rows is found for so small a part of the store at a time
_SAVED = dict(slot="i4", reward="f4", version="i4", number="i4", ref="f4", mu="f4", count="i4", stop="?")


class RowStore:
    """Columns by row id. `slot` -1 marks a free id, `count` 0 a row that no complete visit has brought yet."""

    def __init__(self) -> None:
        # 55 bytes a row.
        self.columns = Columns(
            slot="i4", start="i8", length="i4", hash="u4", reward="f4", version="i4", shard="i4", number="i4",
            ref="f4", mu="f4", count="u2", stop="?", arrival="i8",
        )  # fmt: skip
        self._tokens = TokenArena()
        self._shards = Columns(incarnation="i4", seq="i8")
        self._incarnations: dict[str, int] = {}
        self._arrivals = 0
        self._oldest: list[tuple[int, int]] = []  # (row, arrival), oldest last

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, name: str) -> np.ndarray:
        """A column by row id; valid until the next `add`."""
        return self.columns[name]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.columns.nbytes + self._tokens.nbytes + self._shards.nbytes + 120 * len(self._oldest)

    def incarnation(self, name: str) -> int:
        """Number of a searcher's incarnation, made if it is new."""
        return self._incarnations.setdefault(name, len(self._incarnations))

    def add(self, rows: NewRows, chosen: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Store rows `chosen` of a shard, whose prompts have `slots`; returns their ids, int64, in order."""
        ids = self.columns.allocate(len(chosen))
        shard = self._shards.allocate(1)
        self._shards["incarnation"][shard] = self.incarnation(rows.shard.incarnation)
        self._shards["seq"][shard] = rows.shard.seq
        values = {
            "slot": slots,
            "reward": rows.rewards[chosen],
            "version": rows.effective_versions[chosen],
            "shard": shard[0],
            "number": rows.numbers[chosen],
            "ref": np.nan if rows.ref_logprobs is None else rows.ref_logprobs[chosen],
            "mu": np.nan if rows.mu_logprobs is None else rows.mu_logprobs[chosen],
            "count": 0,
            "stop": rows.finish_stop[chosen],
            "arrival": np.arange(self._arrivals, self._arrivals + len(chosen)),
        }
        self._arrivals += len(chosen)
        for name, value in values.items():
            self[name][ids] = value
        self._set_tokens(ids, *take(rows.response_tokens, rows.response_offsets, chosen))
        return ids

    def free(self, ids: np.ndarray) -> None:
        """Give ids and tokens back. An id that is given twice would soon name two rows."""
        assert (self["slot"][ids] >= 0).all() and len(set(ids.tolist())) == len(ids), f"freed twice: {ids.tolist()}"
        self._tokens.free(self["start"][ids], self["length"][ids])
        self["slot"][ids] = -1
        self.columns.free(ids)

    def compact(self) -> None:
        """Keep dead tokens below live ones."""
        if self._tokens.fragmented:
            alive = np.flatnonzero(self["slot"] >= 0)
            self["start"][alive] = self._tokens.move(self["start"][alive], self["length"][alive])

    def tokens(self, row: int) -> np.ndarray:
        """Response tokens, read-only int32 view."""
        return self._tokens.view(int(self["start"][row]), int(self["length"][row]))

    def trajectory_ids(self, rows: np.ndarray) -> list[TrajectoryId]:
        """Identities, flattened in order."""
        flat = np.asarray(rows).ravel()
        shards, numbers = self._shard_ids(self["shard"][flat]), self["number"][flat].tolist()
        return [TrajectoryId(s.incarnation, s.seq, n) for s, n in zip(shards, numbers, strict=True)]

    def shards(self) -> set[ShardId]:
        """Shards that hold a row of this store."""
        return set(self._shard_ids(np.unique(self["shard"][self["slot"] >= 0])))

    def oldest(self, num: int) -> np.ndarray:
        """The `num` rows that arrived first, in that order; the caller frees them."""
        taken: list[int] = []
        while len(taken) < num:
            if not self._oldest:
                taken, self._oldest = [], self._find_oldest(num)  # with those taken, which are there until freed
            arrival, slot = self["arrival"], self["slot"]
            while self._oldest and len(taken) < num:
                row, arrived = self._oldest.pop()
                if slot[row] >= 0 and arrival[row] == arrived:  # else it has gone, and its id may live again
                    taken.append(row)
        return np.array(taken, "i8")

    # -- checkpoints

    def state(self) -> tuple[State, np.ndarray]:
        """(arrays, rank): rows in order of arrival without tokens; rank[id] = the row's place among them."""
        alive = np.flatnonzero(self["slot"] >= 0)
        alive = alive[np.argsort(self["arrival"][alive])]
        rank = np.full(len(self["slot"]), -1, "i4")
        rank[alive] = np.arange(len(alive))
        shards, shard = np.unique(self["shard"][alive], return_inverse=True)
        state = {f"row_{name}": self[name][alive].astype(dtype) for name, dtype in _SAVED.items()}
        state["row_shard"] = shard.astype("i4")
        state["shard_incarnation"] = self._shards["incarnation"][shards]
        state["shard_seq"] = self._shards["seq"][shards]
        state["incarnations"] = text_array("\n".join(self._incarnations))
        return state, rank

    def restore(self, state: State, fetch: Fetch, seen: Callable[[NewRows], None]) -> dict[ShardId, np.ndarray]:
        """Fill this empty store: ids become ranks. `seen` gets each fetched shard.

        Returns, by shard that was not fetched whole, the rows that have no tokens: the caller drops them.
        """
        names = array_text(state["incarnations"])
        self._incarnations = {name: i for i, name in enumerate(names.split("\n") if names else [])}
        shards = self._shards.allocate(len(state["shard_seq"]))
        self._shards["incarnation"][shards] = state["shard_incarnation"]
        self._shards["seq"][shards] = state["shard_seq"]
        ids = self.columns.allocate(len(state["row_slot"]))
        for name in (*_SAVED, "shard"):
            self[name][ids] = state[f"row_{name}"]
        for name in ("start", "length", "hash"):
            self[name][ids] = 0
        self["arrival"][ids] = ids
        self._arrivals = len(ids)
        by_shard = np.argsort(state["row_shard"], kind="stable")
        bounds = np.searchsorted(state["row_shard"][by_shard], np.arange(len(shards) + 1))
        wanted = {s: by_shard[bounds[i] : bounds[i + 1]] for i, s in enumerate(self._shard_ids(shards))}
        for rows in fetch(list(wanted)):
            seen(rows)
            if self._restore_tokens(rows, wanted[rows.shard]):
                del wanted[rows.shard]
        return wanted

    # -- private

    def _restore_tokens(self, rows: NewRows, ids: np.ndarray) -> bool:
        """False, and nothing done, if the shard lacks one of the rows."""
        order = np.argsort(rows.numbers)
        place = np.searchsorted(rows.numbers, self["number"][ids], sorter=order)
        index = order[np.minimum(place, len(order) - 1)] if len(order) else np.zeros(len(ids), "i8")
        if not len(order) or (rows.numbers[index] != self["number"][ids]).any():
            return False
        self._set_tokens(ids, *take(rows.response_tokens, rows.response_offsets, index))
        return True

    def _set_tokens(self, ids: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        self["start"][ids] = self._tokens.append(tokens, offsets)
        self["length"][ids] = np.diff(offsets)
        self["hash"][ids] = sequence_hashes(tokens, offsets)

    def _shard_ids(self, shards: np.ndarray) -> list[ShardId]:
        names = list(self._incarnations)
        incarnations, seqs = self._shards["incarnation"][shards].tolist(), self._shards["seq"][shards].tolist()
        return [ShardId(names[i], s) for i, s in zip(incarnations, seqs, strict=True)]

    def _find_oldest(self, at_least: int) -> list[tuple[int, int]]:
        """The oldest rows, oldest last: all others, and all to come, are newer."""
        alive = np.flatnonzero(self["slot"] >= 0)
        num = min(len(alive), max(at_least, len(alive) // _QUEUE_SHARE))
        arrival = self["arrival"][alive]
        chosen = np.argpartition(arrival, num - 1)[:num]
        chosen = chosen[np.argsort(-arrival[chosen])]
        return list(zip(alive[chosen].tolist(), arrival[chosen].tolist(), strict=True))


def take(tokens: np.ndarray, offsets: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sequences `index` of a ragged array, as a ragged array (tokens, offsets)."""
    lengths = offsets[index + 1] - offsets[index]
    taken = np.concatenate([np.zeros(1, "i8"), np.cumsum(lengths, dtype="i8")])
    return tokens[np.arange(taken[-1]) + np.repeat(offsets[index] - taken[:-1], lengths)], taken


def text_array(text: str) -> np.ndarray:
    """UTF-8 bytes as uint8."""
    return np.frombuffer(text.encode(), "u1").copy()


def array_text(array: np.ndarray) -> str:
    """Inverse of `text_array`."""
    return array.astype("u1").tobytes().decode()
