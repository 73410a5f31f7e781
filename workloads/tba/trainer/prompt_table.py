"""Prompts of the replay buffer by slot: tokens, linked rows, and the newest complete visit of each. Pure.

A *slot* is a prompt's rank in order of first appearance. Visits are ordered by completion, never by policy version: of
the visits that a policy began the short ones complete first, so that "newest version first" trains on short responses.
"""

import sys

import numpy as np

from tba.trainer.columns import Columns, TokenArena
from tba.trainer.rows import NewRows
from tba.trainer.rowstore import State, take

_NO_ROWS = np.zeros(0, "i4")
_ARRAY_BYTES = sys.getsizeof(_NO_ROWS) + 8  # of a small array beyond its data: object and pointer to it


class PromptTable:
    """What is known of each prompt, and which prompts may be drawn."""

    def __init__(self) -> None:
        # visit: completion number of the newest visit, -1 = none left; oldest: least version of its rows;
        # newest: greatest version of all linked rows.
        self._columns = Columns(id="i8", start="i8", length="i4", num_rows="i4", visit="i8", oldest="i4", newest="i4")
        self._tokens = TokenArena()
        self._slots: dict[int, int] = {}  # prompt id -> slot
        self._members: list[np.ndarray] = []  # by slot: linked rows, oldest first
        self._visit_rows: list[np.ndarray] = []  # by slot: rows of the newest visit, repeated as generated
        self._log = _visit_log()  # visits in order of completion, some outdated
        self.num_linked = 0  # rows in all members
        self._num_visit_rows = 0

    def __len__(self) -> int:
        """Prompts ever seen."""
        return len(self._slots)

    @property
    def num_drawable(self) -> int:
        """Prompts with at least one linked row."""
        return int(np.count_nonzero(self._columns["num_rows"]))

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        lists = 4 * (self.num_linked + self._num_visit_rows) + 2 * _ARRAY_BYTES * len(self._members)
        table = sys.getsizeof(self._slots) + 32 * len(self._slots)
        return self._columns.nbytes + self._tokens.nbytes + self._log.nbytes + lists + table

    # -- by prompt

    def slot(self, prompt_id: int) -> int:
        """Raises: KeyError for a prompt never seen."""
        return self._slots[prompt_id]

    def make(self, rows: NewRows, i: int) -> int:
        """The slot of row i's prompt, made if it is new."""
        prompt_id = int(rows.prompt_ids[i])
        slot = self._slots.get(prompt_id)
        if slot is None:
            slot = self._slots[prompt_id] = int(self._columns.allocate(1)[0])
            for name, value in (("id", prompt_id), ("start", -1), ("num_rows", 0), ("visit", -1), ("newest", -1)):
                self._columns[name][slot] = value
            self._members.append(_NO_ROWS)
            self._visit_rows.append(_NO_ROWS)
        if self._columns["start"][slot] < 0:
            self._set_tokens(slot, rows, i)
        return slot

    def tokens(self, prompt_id: int) -> np.ndarray:
        """Prompt tokens, read-only int32 view."""
        slot = self._slots[prompt_id]
        return self._tokens.view(int(self._columns["start"][slot]), int(self._columns["length"][slot]))

    # -- by slot

    def ids(self, slots: np.ndarray) -> np.ndarray:
        """Prompt ids, int64."""
        return self._columns["id"][slots]

    def members(self, slot: int) -> np.ndarray:
        """The prompt's distinct rows, oldest arrival first."""
        return self._members[slot]

    def visit_rows(self, slot: int) -> np.ndarray:
        """Rows of the prompt's newest visit, a response generated twice standing twice."""
        return self._visit_rows[slot]

    def set_members(self, slot: int, rows: np.ndarray, newest_version: int) -> None:
        """Replace the linked rows; `newest_version` among them, -1 if there are none."""
        self.num_linked += len(rows) - len(self._members[slot])
        self._members[slot] = rows
        self._columns["num_rows"][slot], self._columns["newest"][slot] = len(rows), newest_version

    def set_visit(self, slot: int, rows: np.ndarray, number: int, oldest_version: int) -> None:
        """Make `rows`, completed as visit `number`, the prompt's newest visit."""
        self._set_visit_rows(slot, rows)
        self._columns["visit"][slot], self._columns["oldest"][slot] = number, oldest_version
        entry = self._log.allocate(1)
        self._log["slot"][entry], self._log["visit"][entry] = slot, number
        if len(self._log) > 2 * len(self._members) + 64:
            self._trim_log()

    def keep_alive(self, slot: int, alive: np.ndarray) -> None:
        """Forget rows of the newest visit that are not `alive` (by row id)."""
        rows = self._visit_rows[slot]
        self._set_visit_rows(slot, rows[alive[rows]])
        if not len(self._visit_rows[slot]):
            self._columns["visit"][slot] = -1

    # -- what may be drawn

    def newest_visits(self, limit: int, min_version: int) -> list[tuple[int, int]]:
        """(slot, completion number) of at most `limit` prompts' newest visits, last completed first.

        Only visits none of whose rows is older than `min_version`.
        """
        visit, oldest = self._columns["visit"], self._columns["oldest"]
        found: list[tuple[int, int]] = []
        end, size = len(self._log), max(4 * limit, 256)
        while end > 0 and len(found) < limit:
            part = slice(max(0, end - size), end)
            slots, numbers = self._log["slot"][part][::-1], self._log["visit"][part][::-1]
            good = (visit[slots] == numbers) & (oldest[slots] >= min_version)
            found += zip(slots[good].tolist(), numbers[good].tolist(), strict=True)
            end, size = part.start, 2 * size
        return found[:limit]

    def visits_between(self, start: int, end: int, min_version: int) -> list[tuple[int, int]]:
        """As `newest_visits`: the visits with start <= completion number < end, first completed first."""
        visit = self._columns["visit"]
        slots = np.flatnonzero((visit >= start) & (visit < end) & (self._columns["oldest"] >= min_version))
        slots = slots[np.argsort(visit[slots])]
        return list(zip(slots.tolist(), visit[slots].tolist(), strict=True))

    def newest_version(self) -> int | None:
        """Greatest effective version among rows that may be drawn."""
        newest = self._columns["newest"][self._columns["num_rows"] > 0]
        return int(newest.max()) if len(newest) else None

    def replayable(self, min_version: int) -> np.ndarray:
        """Slots of prompts that have a row of at least `min_version`, ascending int32."""
        good = (self._columns["num_rows"] > 0) & (self._columns["newest"] >= min_version)
        return np.flatnonzero(good).astype("i4")

    # -- checkpoints

    def state(self, rank: np.ndarray) -> State:
        """Everything but tokens, with rank[row] in place of rows."""
        state = {f"prompt_{name}": self._columns[name].copy() for name in ("id", "visit", "oldest", "newest")}
        return state | ragged("members", self._members, rank) | ragged("visit", self._visit_rows, rank)

    def restore(self, state: State) -> None:
        """Fill this empty table; `restore_tokens` gives prompts their tokens."""
        ids = state["prompt_id"]
        slots = self._columns.allocate(len(ids))
        for name in ("id", "visit", "oldest", "newest"):
            self._columns[name][slots] = state[f"prompt_{name}"]
        self._columns["start"][slots] = -1
        self._slots = {prompt_id: slot for slot, prompt_id in enumerate(ids.tolist())}
        self._members, self._visit_rows = split(state, "members"), split(state, "visit")
        self._columns["num_rows"][slots] = [len(rows) for rows in self._members]
        self.num_linked, self._num_visit_rows = len(state["members_rows"]), len(state["visit_rows"])
        self._trim_log()

    def restore_tokens(self, rows: NewRows) -> None:
        """Take prompt tokens that are still lacking."""
        known, first = np.unique(rows.prompt_ids, return_index=True)
        for prompt_id, i in zip(known.tolist(), first.tolist(), strict=True):
            slot = self._slots.get(prompt_id)
            if slot is not None and self._columns["start"][slot] < 0:
                self._set_tokens(slot, rows, i)

    # -- private

    def _set_tokens(self, slot: int, rows: NewRows, i: int) -> None:
        tokens, offsets = take(rows.prompt_tokens, rows.prompt_offsets, np.array([i]))
        self._columns["start"][slot] = self._tokens.append(tokens, offsets)[0]
        self._columns["length"][slot] = len(tokens)

    def _set_visit_rows(self, slot: int, rows: np.ndarray) -> None:
        self._num_visit_rows += len(rows) - len(self._visit_rows[slot])
        self._visit_rows[slot] = rows

    def _trim_log(self) -> None:
        """Keep current visits only."""
        visit = self._columns["visit"]
        slots = np.flatnonzero(visit >= 0)
        slots = slots[np.argsort(visit[slots])]
        self._log = _visit_log()
        entries = self._log.allocate(len(slots))
        self._log["slot"][entries], self._log["visit"][entries] = slots, visit[slots]


def ragged(name: str, lists: list[np.ndarray], rank: np.ndarray) -> State:
    """Lists of rows as two arrays of a checkpoint."""
    flat = np.concatenate([_NO_ROWS, *lists])
    return {f"{name}_offsets": np.cumsum([0, *map(len, lists)], dtype="i8"), f"{name}_rows": rank[flat]}


def split(state: State, name: str) -> list[np.ndarray]:
    """Inverse of `ragged`, ranks being rows."""
    offsets, rows = state[f"{name}_offsets"].tolist(), state[f"{name}_rows"].astype("i4")
    return [rows[a:b].copy() for a, b in zip(offsets[:-1], offsets[1:], strict=True)]


def _visit_log() -> Columns:
    return Columns(slot="i4", visit="i8")
