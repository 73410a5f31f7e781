"""Replay buffer: everything the searchers produced that may still be trained on (system.md §6). Pure: no I/O, no clock.

```
NewRows ─► RowStore (columns, tokens) ─► pending until the visit is complete ─► link: merge equals, cap ─► draws
```
A **row** is one distinct response of a prompt. Row ids stay the same as long as the row lives and are reused after
`add` or `set_max_trajectories` dropped it; no draw ever depends on their values.
Rows of a visit stay *pending*, eligible in no branch, until all its `visit_size` rows arrived; then they are linked to
their prompt, equal responses merged (the newest wins: highest effective version, then last to arrive), and they become
the prompt's newest visit.
"""

import sys
from dataclasses import dataclass, field

import numpy as np

from tba.contracts.errors import CorruptObject
from tba.contracts.records import ShardId, TrajectoryId
from tba.trainer.prompt_table import PromptTable, ragged, split
from tba.trainer.rows import SCORED, NewRows, check
from tba.trainer.rowstore import Fetch, RowStore, State, array_text, text_array

__all__ = ["SCORED", "AddReport", "Fetch", "NewRows", "ReplayBuffer", "State"]

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
        self.prompts = PromptTable()  # for the sampler: what may be drawn
        self._pending: dict[tuple[int, int], _Pending] = {}  # (incarnation number, visit number)
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
        ids[scored] = self._rows.add(rows, scored, self._slots_of(rows, groups)[scored])
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
        return self.prompts.num_drawable

    @property
    def pending_rows(self) -> int:
        """Rows of incomplete visits."""
        return len(self._rows) - self.prompts.num_linked

    @property
    def memory_bytes(self) -> int:
        """Bytes allocated for rows, tokens and tables."""
        pending = sum(120 + sys.getsizeof(p.rows) for p in self._pending.values())
        return self._rows.nbytes + self.prompts.nbytes + pending

    # -- rows out (vectorised over an array of row ids of any shape)

    def tokens(self, row: int) -> np.ndarray:
        """Response tokens, read-only int32 view."""
        return self._rows.tokens(row)

    def prompt_tokens(self, prompt_id: int) -> np.ndarray:
        """Prompt tokens, read-only int32 view."""
        return self.prompts.tokens(prompt_id)

    def prompt_ids(self, rows: np.ndarray) -> np.ndarray:
        """int64."""
        return self.prompts.ids(self._rows["slot"][rows])

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
        """Of the response under its sampler as the shard told it, else the trainer's own at first use; float32, NaN =
        neither yet."""
        return self._rows["mu"][rows]

    def set_mu_logprobs(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Cache; the caller writes only where `mu_logprobs` is NaN."""
        self._rows["mu"][rows] = values

    # -- for the sampler

    def members(self, slot: int, min_version: int) -> np.ndarray:
        """A prompt's distinct rows of at least `min_version`, oldest arrival first."""
        rows = self.prompts.members(slot)
        return rows if min_version <= 0 else rows[self._rows["version"][rows] >= min_version]

    # -- checkpoints

    def state(self) -> State:
        """Everything but tokens, as plain numeric arrays: row identities, order, visits, cached log-probs."""
        state, rank = self._rows.state()
        facts = [(*k, p.prompt_id, p.size, p.arrived, p.broken) for k, p in self._pending.items()]
        state["pending"] = np.array(facts, "i8").reshape(-1, 6)
        state |= ragged("pending", [np.array(p.rows, "i4") for p in self._pending.values()], rank)
        state |= self.prompts.state(rank)
        state["counters"] = np.array([getattr(self, name) for name in _COUNTERS], "i8")
        state["reference"] = text_array(self._reference)
        return state

    def restore(self, state: State, fetch: Fetch) -> dict[ShardId, int]:
        """Fill this new buffer from `state`; later draws are those of the buffer that was saved.

        `fetch(shards)` yields the rows of each of these shards once, in any order; tokens are read again from them.
        Rows of a shard that it leaves out, or whose rows are not all there, are dropped as if they had fallen to a cap;
        returns their number by shard.
        """
        if len(self) or len(self.prompts):
            raise ValueError(f"restore needs a new buffer, got one with {len(self)} rows: make another")
        self.prompts.restore(state)
        missing = self._rows.restore(state, fetch, self.prompts.restore_tokens)
        for name, value in zip(_COUNTERS, state["counters"].tolist(), strict=True):
            setattr(self, name, value)
        self._reference = array_text(state["reference"])
        for fact, rows in zip(state["pending"].tolist(), split(state, "pending"), strict=True):
            incarnation, visit, prompt_id, size, arrived, broken = fact
            self._pending[incarnation, visit] = _Pending(prompt_id, size, arrived, rows.tolist(), bool(broken))
        if missing:
            self._drop(np.sort(np.concatenate(list(missing.values()))))
        self._enforce_limit()
        self.changes += 1
        return {shard: len(rows) for shard, rows in missing.items()}

    # -- private: visits

    def _slots_of(self, rows: NewRows, groups: list[np.ndarray]) -> np.ndarray:
        """Slot of each row's prompt, int32 (n,); prompts without a scored row are not made."""
        slots = np.full(len(rows), -1, "i4")
        for index in groups:
            if (rows.outcomes[index] == SCORED).any():
                slots[index] = self.prompts.make(rows, int(index[0]))
        return slots

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
            self._link(self.prompts.slot(visit.prompt_id), np.array(visit.rows, "i4"))
        return len(visit.rows)

    # -- private: linking

    def _link(self, slot: int, new: np.ndarray) -> None:
        """Make a complete visit's rows drawable: merge equals, note the newest visit, cap the prompt."""
        oldest = int(self._rows["version"][new].min())
        self._rows["count"][new] = 1
        members, winner_of = self.prompts.members(slot), dict[int, int]()
        if self._deduplicate and self._may_have_equals(members, new):
            members, winner_of = self._merge(members, new)
        else:
            members = np.concatenate([members, new])
        visit_rows = _winners(winner_of, new)
        self.prompts.set_visit(slot, visit_rows, self.complete_visits, oldest)
        self.complete_visits += 1
        self._set_members(slot, members)
        self.duplicate_rows += len(winner_of)
        self._rows.free(np.array(list(winner_of), "i8"))
        excess = len(members) - self._capacity
        if excess > 0:
            others = members[~np.isin(members, visit_rows)]
            self._drop(others[:excess].astype("i8"))

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

    def _set_members(self, slot: int, rows: np.ndarray) -> None:
        self.prompts.set_members(slot, rows, int(self._rows["version"][rows].max()) if len(rows) else -1)

    # -- private: dropping

    def _enforce_limit(self) -> None:
        """Drop the rows beyond the global cap, in order of arrival."""
        while self._limit is not None and len(self._rows) > self._limit:
            self._drop(self._rows.oldest(len(self._rows) - self._limit))

    def _drop(self, rows: np.ndarray) -> None:
        """Forget rows that fell to a cap, wherever they are named."""
        slots = np.unique(self._rows["slot"][rows]).tolist()
        if not self._rows["count"][rows].all():
            rows = np.union1d(rows, self._break_visits(rows))
        self._rows.free(rows)
        self.dropped_rows += len(rows)
        alive = self._rows["slot"] >= 0
        for slot in slots:
            members = self.prompts.members(slot)
            self._set_members(slot, members[alive[members]])
            self.prompts.keep_alive(slot, alive)

    def _break_visits(self, rows: np.ndarray) -> np.ndarray:
        """Give incomplete visits up that lose one of `rows`; returns all their rows."""
        lost, taken = set(rows.tolist()), []
        for visit in self._pending.values():
            if not lost.isdisjoint(visit.rows):
                taken += visit.rows
                visit.rows, visit.broken = [], True
        return np.array(taken, "i8")


def _winners(winner_of: dict[int, int], rows: np.ndarray) -> np.ndarray:
    """`rows` with each loser of a merge replaced by the row that stands for it."""
    if not winner_of:
        return rows

    def final(row: int) -> int:
        while row in winner_of:
            row = winner_of[row]
        return row

    return np.array([final(row) for row in rows.tolist()], "i4")
