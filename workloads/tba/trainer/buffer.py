"""Replay buffer: everything the searchers produced that may still be trained on (system.md §6). Pure: no I/O, no clock.

```
NewRows ─► RowStore (columns, tokens) ─► pending until the visit is complete ─► link: merge equals, cap ─► draws
```
A **row** is one distinct response of a prompt. Row ids stay the same as long as the row lives and are reused after
`add` or `set_max_trajectories` dropped it; no draw ever depends on their values.
Rows of a visit stay *pending*, eligible in no branch, until all its `visit_size` rows arrived; then they are linked to
their prompt, equal responses merged (the newest wins: highest effective version, then last to arrive), and they become
the prompt's newest visit. A prompt is addressed by its *slot*: its rank in order of first appearance.
"""

import sys
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tba.contracts.errors import CorruptObject
from tba.contracts.records import ShardId, TrajectoryId
from tba.trainer.columns import Columns, TokenArena
from tba.trainer.rows import SCORED, NewRows, check
from tba.trainer.rowstore import Fetch, RowStore, State, array_text, take, text_array

__all__ = ["SCORED", "AddReport", "Fetch", "NewRows", "ReplayBuffer", "State"]

_NO_ROWS = np.zeros(0, "i4")
_ARRAY_BYTES = sys.getsizeof(np.zeros(0)) + 8  # of a small array beyond its data: object and pointer to it
_COUNTERS = ("ingested_rows", "failed_rows", "duplicate_rows", "dropped_rows", "complete_visits")


@dataclass(frozen=True, slots=True)
class AddReport:
    """What became of rows in one `add`."""

    added: int  # rows that became distinct stored responses (may have arrived earlier and been pending)
    duplicates: int  # rows merged with an equal response
    failed: int  # rows without a reward in this call
    dropped: int  # stored rows that fell to a cap
    completed_visits: int  # with at least one scored row


@dataclass(slots=True)
class _Pending:
    """An incomplete visit."""

    prompt_id: int
    size: int
    arrived: int = 0
    rows: list[int] = field(default_factory=list)
    broken: bool = False  # a cap took some of its rows: the rest would favour late finishers


class ReplayBuffer:
    """Columnar, de-duplicated store of responses by prompt."""

    def __init__(
        self, *, capacity_per_prompt: int, deduplicate: bool = True, max_trajectories: int | None = None
    ) -> None:
        """`capacity_per_prompt`: distinct responses a prompt; its newest visit is kept whole even if larger."""
        self._capacity = capacity_per_prompt
        self._deduplicate = deduplicate
        self._limit = max_trajectories
        self._rows = RowStore()
        # visit: arrival number of the newest complete visit, -1 = none left; oldest: least version of its rows;
        # newest: greatest version of all linked rows.
        self._prompts = Columns(id="i8", start="i8", length="i4", num_rows="i4", visit="i8", oldest="i4", newest="i4")
        self._prompt_tokens = TokenArena()
        self._slots: dict[int, int] = {}  # prompt id -> slot
        self._members: list[np.ndarray] = []  # by slot: linked rows, oldest first
        self._visit_rows: list[np.ndarray] = []  # by slot: rows of the newest visit, repeated as generated
        self._order: list[int] = []  # sorted keys (version, arrival, slot) of newest visits, some outdated
        self._pending: dict[tuple[int, int], _Pending] = {}  # (incarnation number, visit number)
        self._num_linked = 0
        self._num_visit_rows = 0
        self._reference = ""
        self.ingested_rows = 0  # rows with a reward, before de-duplication, cumulative
        self.failed_rows = 0  # rows without a reward, cumulative
        self.duplicate_rows = 0  # cumulative
        self.dropped_rows = 0  # cumulative
        self.complete_visits = 0  # with at least one scored row, cumulative
        self.changes = 0  # rises with every change of what may be drawn

    # -- rows in

    def add(self, rows: NewRows) -> AddReport:
        """Take a shard's rows. Raises: CorruptObject, before anything changed, if they contradict themselves."""
        check(rows)
        incarnation = self._rows.incarnation(rows.shard.incarnation)
        groups = rows.visit_groups()
        self._check_pending(rows, incarnation, groups)
        duplicates, dropped, visits = self.duplicate_rows, self.dropped_rows, self.complete_visits
        scored = np.flatnonzero(rows.outcomes == SCORED)
        ids = np.full(len(rows), -1, "i8")
        ids[scored] = self._rows.add(rows, scored, np.array([self._slot(rows, i) for i in scored.tolist()], "i4"))
        linked = sum(self._arrive(rows, incarnation, index, ids[index]) for index in groups)
        self.ingested_rows += len(scored)
        self.failed_rows += len(rows) - len(scored)
        self._enforce_limit()
        self._rows.compact()
        self.changes += 1
        return AddReport(
            added=linked - (self.duplicate_rows - duplicates),
            duplicates=self.duplicate_rows - duplicates,
            failed=len(rows) - len(scored),
            dropped=self.dropped_rows - dropped,
            completed_visits=self.complete_visits - visits,
        )

    def set_max_trajectories(self, limit: int | None) -> int:
        """Change the global cap (live); returns the rows dropped at once."""
        before = self.dropped_rows
        if limit != self._limit:
            self._limit = limit
            self._enforce_limit()
            self.changes += 1
        return self.dropped_rows - before

    # -- sizes

    def __len__(self) -> int:
        """Distinct responses stored, pending ones included."""
        return len(self._rows)

    @property
    def num_prompts(self) -> int:
        """Prompts with at least one response that may be drawn."""
        return int(np.count_nonzero(self._prompts["num_rows"]))

    @property
    def pending_rows(self) -> int:
        """Rows of incomplete visits."""
        return len(self._rows) - self._num_linked

    @property
    def memory_bytes(self) -> int:
        """Bytes allocated for rows, tokens and tables."""
        lists = 4 * (self._num_linked + self._num_visit_rows) + 2 * _ARRAY_BYTES * len(self._members)
        tables = sys.getsizeof(self._slots) + sys.getsizeof(self._order) + 40 * len(self._order)
        pending = sum(120 + sys.getsizeof(p.rows) for p in self._pending.values())
        return self._rows.nbytes + self._prompts.nbytes + self._prompt_tokens.nbytes + lists + tables + pending

    # -- rows out (vectorised over an array of row ids of any shape)

    def tokens(self, row: int) -> np.ndarray:
        """Response tokens, read-only int32 view."""
        return self._rows.tokens(row)

    def prompt_tokens(self, prompt_id: int) -> np.ndarray:
        """Prompt tokens, read-only int32 view."""
        slot = self._slots[prompt_id]
        return self._prompt_tokens.view(int(self._prompts["start"][slot]), int(self._prompts["length"][slot]))

    def prompt_ids(self, rows: np.ndarray) -> np.ndarray:
        """int64."""
        return self._prompts["id"][self._rows["slot"][rows]]

    def num_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Response tokens, int64."""
        return self._rows["length"][rows].astype("i8")

    def rewards(self, rows: np.ndarray) -> np.ndarray:
        """float32."""
        return self._rows["reward"][rows]

    def versions(self, rows: np.ndarray) -> np.ndarray:
        """Effective policy version of the oldest span, int64."""
        return self._rows["version"][rows].astype("i8")

    def multiplicities(self, rows: np.ndarray) -> np.ndarray:
        """How often each response has been generated (at most 65535), int64."""
        return self._rows["count"][rows].astype("i8")

    def finish_stop(self, rows: np.ndarray) -> np.ndarray:
        """bool: ended by end-of-sequence or a stop string."""
        return self._rows["stop"][rows]

    def trajectory_ids(self, rows: np.ndarray) -> list[TrajectoryId]:
        """Identities, flattened in order."""
        return self._rows.trajectory_ids(rows)

    def shards(self) -> set[ShardId]:
        """Shards that a restore will read again; all others may be deleted."""
        return self._rows.shards()

    # -- cached log-probabilities

    def set_reference(self, key: str) -> None:
        """Name the reference policy; a change forgets every cached reference log-probability."""
        if key != self._reference:
            self._reference = key
            self._rows["ref"][:] = np.nan

    def ref_logprobs(self, rows: np.ndarray) -> np.ndarray:
        """float32; NaN = not cached."""
        return self._rows["ref"][rows]

    def set_ref_logprobs(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Cache under the current reference."""
        self._rows["ref"][rows] = values

    def mu_logprobs(self, rows: np.ndarray) -> np.ndarray:
        """The trainer's own log-probability at first use, float32; NaN = not used yet."""
        return self._rows["mu"][rows]

    def set_mu_logprobs(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Cache; the caller writes only where `mu_logprobs` is NaN."""
        self._rows["mu"][rows] = values

    # -- for the sampler

    def newest_visits(self, limit: int, min_version: int) -> list[tuple[int, int]]:
        """(slot, arrival number) of at most `limit` prompts' newest visits, by version then arrival, newest first.

        Only visits none of whose rows is older than `min_version`.
        """
        current, found = self._prompts["visit"], []
        for key in reversed(self._order):
            if len(found) == limit or key >> 64 < min_version:
                break
            slot, arrival = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
            if current[slot] == arrival:
                found.append((slot, arrival))
        return found

    def visits_between(self, start: int, end: int, min_version: int) -> list[tuple[int, int]]:
        """As `newest_visits`: the newest visits with start <= arrival number < end, in order of arrival."""
        visit = self._prompts["visit"]
        slots = np.flatnonzero((visit >= start) & (visit < end) & (self._prompts["oldest"] >= min_version))
        slots = slots[np.argsort(visit[slots])]
        return list(zip(slots.tolist(), visit[slots].tolist(), strict=True))

    def newest_version(self) -> int | None:
        """Greatest effective version among rows that may be drawn."""
        newest = self._prompts["newest"][self._prompts["num_rows"] > 0]
        return int(newest.max()) if len(newest) else None

    def replayable(self, min_version: int) -> np.ndarray:
        """Slots of prompts that have a row of at least `min_version`, ascending int32."""
        good = (self._prompts["num_rows"] > 0) & (self._prompts["newest"] >= min_version)
        return np.flatnonzero(good).astype("i4")

    def visit_rows(self, slot: int) -> np.ndarray:
        """Rows of the prompt's newest visit, a response generated twice standing twice."""
        return self._visit_rows[slot]

    def members(self, slot: int, min_version: int) -> np.ndarray:
        """The prompt's distinct rows of at least `min_version`, oldest arrival first."""
        rows = self._members[slot]
        return rows if min_version <= 0 else rows[self._rows["version"][rows] >= min_version]

    def slot_prompt_ids(self, slots: Sequence[int]) -> np.ndarray:
        """Prompt ids, int64."""
        return self._prompts["id"][np.asarray(slots, "i8")]

    # -- checkpoints

    def state(self) -> State:
        """Everything but tokens, as plain numeric arrays: row identities, order, visits, cached log-probs."""
        state, rank = self._rows.state()
        for name in ("id", "visit", "oldest"):
            state[f"prompt_{name}"] = self._prompts[name].copy()
        pending = list(self._pending.values())
        facts = [(*k, p.prompt_id, p.size, p.arrived, p.broken) for k, p in self._pending.items()]
        state["pending"] = np.array(facts, "i8").reshape(-1, 6)
        ragged = {"members": self._members, "visit": self._visit_rows, "pending": [p.rows for p in pending]}
        for name, lists in ragged.items():
            state[f"{name}_offsets"] = np.cumsum([0, *map(len, lists)], dtype="i8")
            flat = np.concatenate([_NO_ROWS, *(np.asarray(rows, "i4") for rows in lists)])
            state[f"{name}_rows"] = rank[flat]
        state["counters"] = np.array([getattr(self, name) for name in _COUNTERS], "i8")
        state["reference"] = text_array(self._reference)
        return state

    def restore(self, state: State, fetch: Fetch) -> None:
        """Fill this new buffer from `state`; later draws are those of the buffer that was saved.

        `fetch(shards)` yields the rows of each of these shards once, in any order; tokens are read again from them.
        Raises: CorruptObject if a row is missing.
        """
        if len(self) or self._slots:
            raise ValueError(f"restore needs a new buffer, got one with {len(self)} rows: make another")
        ids = state["prompt_id"]
        slots = self._prompts.allocate(len(ids))
        self._prompts["id"][slots], self._prompts["start"][slots] = ids, -1
        self._prompts["visit"][slots], self._prompts["oldest"][slots] = state["prompt_visit"], state["prompt_oldest"]
        self._slots = {prompt_id: slot for slot, prompt_id in enumerate(ids.tolist())}
        self._rows.restore(state, fetch, self._take_prompts)
        for name, value in zip(_COUNTERS, state["counters"].tolist(), strict=True):
            setattr(self, name, value)
        self._reference = array_text(state["reference"])
        self._members = [_NO_ROWS] * len(ids)
        for slot, rows in enumerate(_split(state, "members")):
            self._set_members(slot, rows)
        self._visit_rows = _split(state, "visit")
        self._num_linked, self._num_visit_rows = len(state["members_rows"]), len(state["visit_rows"])
        visits = zip(state["prompt_oldest"].tolist(), state["prompt_visit"].tolist(), strict=True)
        self._order = sorted(_order_key(v, a, slot) for slot, (v, a) in enumerate(visits) if a >= 0)
        for fact, rows in zip(state["pending"].tolist(), _split(state, "pending"), strict=True):
            incarnation, visit, prompt_id, size, arrived, broken = fact
            self._pending[incarnation, visit] = _Pending(prompt_id, size, arrived, rows.tolist(), bool(broken))
        self._enforce_limit()
        self.changes += 1

    # -- private: prompts and visits

    def _slot(self, rows: NewRows, i: int) -> int:
        """The slot of row i's prompt, made if it is new."""
        prompt_id = int(rows.prompt_ids[i])
        slot = self._slots.get(prompt_id)
        if slot is None:
            slot = self._slots[prompt_id] = int(self._prompts.allocate(1)[0])
            for name, value in (("id", prompt_id), ("start", -1), ("num_rows", 0), ("visit", -1), ("newest", -1)):
                self._prompts[name][slot] = value
            self._members.append(_NO_ROWS)
            self._visit_rows.append(_NO_ROWS)
        if self._prompts["start"][slot] < 0:
            self._set_prompt_tokens(slot, rows, i)
        return slot

    def _set_prompt_tokens(self, slot: int, rows: NewRows, i: int) -> None:
        tokens, offsets = take(rows.prompt_tokens, rows.prompt_offsets, np.array([i]))
        self._prompts["start"][slot] = self._prompt_tokens.append(tokens, offsets)[0]
        self._prompts["length"][slot] = len(tokens)

    def _take_prompts(self, rows: NewRows) -> None:
        """Prompt tokens that a restore still lacks."""
        known, first = np.unique(rows.prompt_ids, return_index=True)
        for prompt_id, i in zip(known.tolist(), first.tolist(), strict=True):
            slot = self._slots.get(prompt_id)
            if slot is not None and self._prompts["start"][slot] < 0:
                self._set_prompt_tokens(slot, rows, i)

    def _check_pending(self, rows: NewRows, incarnation: int, groups: list[np.ndarray]) -> None:
        """Raises: CorruptObject if a visit's rows contradict those of it that came in earlier shards."""
        for index in groups:
            visit = int(rows.visits[index[0]])
            known = self._pending.get((incarnation, visit))
            if known is None:
                continue
            same = known.prompt_id == rows.prompt_ids[index[0]] and known.size == rows.visit_sizes[index[0]]
            if not same or known.arrived + len(index) > known.size:
                raise CorruptObject(
                    f"visit {visit} of shard {rows.shard} must go on with prompt {known.prompt_id} and fill "
                    f"{known.size} rows, of which {known.arrived} came before: quarantine it and check its searcher"
                )

    def _arrive(self, rows: NewRows, incarnation: int, index: np.ndarray, ids: np.ndarray) -> int:
        """Count rows of one visit; link the visit if that completes it. Returns the rows linked."""
        first = int(index[0])
        key = (incarnation, int(rows.visits[first]))
        visit = self._pending.get(key)
        if visit is None:
            visit = self._pending[key] = _Pending(int(rows.prompt_ids[first]), int(rows.visit_sizes[first]))
        visit.arrived += len(index)
        visit.rows += ids[ids >= 0].tolist()
        if visit.broken:
            self._rows.free(np.array(visit.rows, "i8"))
            self.dropped_rows += len(visit.rows)
            visit.rows = []
        if visit.arrived < visit.size:
            return 0
        del self._pending[key]
        if visit.rows:
            self._link(self._slots[visit.prompt_id], np.array(visit.rows, "i4"))
        return len(visit.rows)

    # -- private: linking

    def _link(self, slot: int, new: np.ndarray) -> None:
        """Make a complete visit's rows drawable: merge equals, note the newest visit, cap the prompt."""
        oldest = int(self._rows["version"][new].min())
        self._rows["count"][new] = 1
        winner_of: dict[int, int] = {}
        if self._deduplicate and self._may_have_equals(self._members[slot], new):
            members, winner_of = self._merge(self._members[slot], new)
            self._visit_rows[slot] = _winners(winner_of, self._visit_rows[slot])
        else:
            members = np.concatenate([self._members[slot], new])
        self._set_visit(slot, _winners(winner_of, new), oldest)
        self._set_members(slot, members)
        self._num_linked += len(new) - len(winner_of)
        self.duplicate_rows += len(winner_of)
        self._rows.free(np.array(list(winner_of), "i8"))
        excess = len(members) - self._capacity
        if excess > 0:
            others = members[~np.isin(members, self._visit_rows[slot])]
            self._drop(others[:excess].astype("i8"))

    def _set_visit(self, slot: int, rows: np.ndarray, oldest: int) -> None:
        """Make `rows` the prompt's newest visit, unless it holds one of a newer policy."""
        arrival = self.complete_visits
        self.complete_visits += 1
        if self._prompts["visit"][slot] >= 0 and self._prompts["oldest"][slot] > oldest:
            return
        self._num_visit_rows += len(rows) - len(self._visit_rows[slot])
        self._visit_rows[slot] = rows
        self._prompts["visit"][slot], self._prompts["oldest"][slot] = arrival, oldest
        insort(self._order, _order_key(oldest, arrival, slot))
        if len(self._order) > 2 * len(self._members) + 64:
            current = self._prompts["visit"]
            self._order = [k for k in self._order if current[k & 0xFFFFFFFF] == (k >> 32) & 0xFFFFFFFF]

    def _may_have_equals(self, members: np.ndarray, new: np.ndarray) -> bool:
        """Whether hashes leave room for an equal response."""
        hashes = self._rows["hash"]
        fresh = set(hashes[new].tolist())
        return len(fresh) < len(new) or not fresh.isdisjoint(hashes[members].tolist())

    def _merge(self, members: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, dict[int, int]]:
        """(members with `new`, oldest first, without losers; loser -> the equal row that replaces it)."""
        hashes, versions = self._rows["hash"], self._rows["version"]
        kept = dict.fromkeys(members.tolist())
        by_hash: dict[int, list[int]] = {}
        for row in kept:
            by_hash.setdefault(int(hashes[row]), []).append(row)
        winner_of: dict[int, int] = {}
        for row in new.tolist():
            same_hash = by_hash.setdefault(int(hashes[row]), [])
            equal = next((r for r in same_hash if np.array_equal(self.tokens(r), self.tokens(row))), None)
            if equal is not None and versions[equal] > versions[row]:
                self._absorb(equal, row)
                winner_of[row] = equal
                continue
            if equal is not None:
                self._absorb(row, equal)
                winner_of[equal] = row
                same_hash.remove(equal)
                del kept[equal]
            same_hash.append(row)
            kept[row] = None
        return np.array(list(kept), "i4"), winner_of

    def _absorb(self, winner: int, loser: int) -> None:
        """Move what outlives the losing record: how often it was generated, and its reference log-probability."""
        count, ref = self._rows["count"], self._rows["ref"]
        count[winner] = min(int(count[winner]) + int(count[loser]), 65535)
        if np.isnan(ref[winner]):
            ref[winner] = ref[loser]

    def _set_members(self, slot: int, members: np.ndarray) -> None:
        self._members[slot] = members
        self._prompts["num_rows"][slot] = len(members)
        self._prompts["newest"][slot] = self._rows["version"][members].max() if len(members) else -1

    # -- private: dropping

    def _enforce_limit(self) -> None:
        """Drop the rows beyond the global cap, in order of arrival."""
        while self._limit is not None and len(self._rows) > self._limit:
            self._drop(self._rows.oldest(len(self._rows) - self._limit))

    def _drop(self, rows: np.ndarray) -> None:
        """Forget rows that fell to a cap, wherever they are named."""
        slots = np.unique(self._rows["slot"][rows]).tolist()
        linked = int(np.count_nonzero(self._rows["count"][rows]))
        if linked < len(rows):
            rows = np.union1d(rows, self._break_visits(rows))
        self._rows.free(rows)
        self._num_linked -= linked
        self.dropped_rows += len(rows)
        alive = self._rows["slot"]
        for slot in slots:
            self._set_members(slot, self._members[slot][alive[self._members[slot]] >= 0])
            visit_rows = self._visit_rows[slot]
            left = visit_rows[alive[visit_rows] >= 0]
            self._num_visit_rows -= len(visit_rows) - len(left)
            self._visit_rows[slot] = left
            if not len(left):
                self._prompts["visit"][slot] = -1

    def _break_visits(self, rows: np.ndarray) -> np.ndarray:
        """Give incomplete visits up that lose one of `rows`; returns all their rows."""
        lost, taken = set(rows.tolist()), []
        for visit in self._pending.values():
            if not lost.isdisjoint(visit.rows):
                taken += visit.rows
                visit.rows, visit.broken = [], True
        return np.array(taken, "i8")


def _order_key(version: int, arrival: int, slot: int) -> int:
    """Sorts as (version, arrival, slot)."""
    return (version << 64) | (arrival << 32) | slot


def _winners(winner_of: dict[int, int], rows: np.ndarray) -> np.ndarray:
    """`rows` with each loser of a merge replaced by the row that stands for it."""
    if not winner_of:
        return rows

    def final(row: int) -> int:
        while row in winner_of:
            row = winner_of[row]
        return row

    return np.array([final(row) for row in rows.tolist()], "i4")


def _split(state: State, name: str) -> list[np.ndarray]:
    """The lists of a ragged array in a checkpoint."""
    offsets, rows = state[f"{name}_offsets"].tolist(), state[f"{name}_rows"].astype("i4")
    return [rows[a:b].copy() for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
