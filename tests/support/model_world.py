"""The world of the model: an abstract bucket, two trainers, two searchers, all as small values.

A world is one tuple of them; bodies of `latest` and trainer memories are interned as integers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from tba.contracts.keys import ShardKey
from tba.contracts.records import CheckpointManifest, Latest, PolicyId, ShardId
from tba.protocol.bookkeeping import Bookkeeping
from tba.protocol.commit import Done, FencedOut, Read, Swap
from tba.protocol.windows import ListPlan, Windows


class Violation(Exception):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Scope:
    """How much is explored."""

    trainer_lives: tuple[int, int] = (2, 1)
    searcher_lives: tuple[int, int] = (1, 1)
    shards: tuple[int, int] = (1, 1)
    steps: int = 2
    checkpoint_every: int = 2
    faults: int = 1
    fine: bool = False
    windows: bool = False
    """Shards lie under the commit their searcher had seen, and a trainer commits an empty window before each step;
    otherwise all lie in one window."""


@dataclass(frozen=True)
class Rules:
    """The real protocol; a mutation replaces one of them."""

    conditional: bool = True
    nonce: Callable[[int, int, int], str] = lambda trainer, life, number: f"{trainer:08x}{life:08x}{number:016x}"
    seen: Callable[..., Swap | Done | FencedOut] = Read.seen
    record: Callable[[Bookkeeping], CheckpointManifest] = lambda book: book.manifest("0" * 32, [])
    staleness: Callable[[Bookkeeping, PolicyId], int] = Bookkeeping.staleness
    plan: Callable[[Windows, bool], ListPlan] = lambda windows, starved: windows.plan(starved=starved, sweep_keys=1)
    phases: tuple[str, ...] = ("data", "manifest", "read")
    """Of a publish or checkpoint, in order; with `read` the commit begins."""


class Trainer(NamedTuple):
    lives: int
    life: int = 0
    pc: str = "down"  # down, takeover, restore, publish, window, train, checkpoint, drain, finish, over, fenced
    phase: str = ""  # within publish and checkpoint: data, manifest; within any commit: ask, read, swap
    commits: int = 0  # plans begun in this life
    landed: int = 0  # times the current plan has taken effect
    base: int = 0  # body on which the swap builds
    known: int = 0  # newest body this process knows of
    book: int = 0
    key: str = ""


class Searcher(NamedTuple):
    lives: int
    left: int  # shards still to make
    life: int = 0
    pc: str = "poll"  # poll, upload, over
    seq: int = 0
    policy: PolicyId = PolicyId(0, 0)
    window: int = 0


class Shard(NamedTuple):
    window: int
    searcher: int
    life: int
    seq: int
    policy: PolicyId

    @property
    def id(self) -> ShardId:
        return ShardId(f"{self.searcher:016x}{self.life:016x}", self.seq)

    @property
    def path(self) -> str:
        return ShardKey(self.window, f"searcher-{self.searcher}", self.id.incarnation, self.seq).path


class Flight(NamedTuple):
    """A swap under way in the network after its sender gave up waiting."""

    body: int
    etag: int
    trainer: int
    life: int
    number: int


class World(NamedTuple):
    latest: int
    trainers: tuple[Trainer, ...]
    searchers: tuple[Searcher, ...]
    shards: frozenset[Shard]
    objects: frozenset[tuple[str, str]]  # (data | manifest, manifest key), reachable or being made
    flight: Flight | None
    faults: int


class Memory(NamedTuple):
    """What a trainer process holds, and the ghost `trained`: what its weights have learnt from, a sorted multiset."""

    book: Bookkeeping
    trained: tuple[ShardId, ...]


class Interned:
    """Bodies of `latest` and memories of trainers as small integers: worlds compare and hash fast."""

    def __init__(self) -> None:
        self.bodies: list[Latest | None] = [None]
        self.memories: list[Memory] = []
        self._body_ids: dict[bytes, int] = {}
        self._memory_ids: dict[object, int] = {}

    def body(self, latest: Latest) -> int:
        """Its number; that of `latest` not being there is 0."""
        data = latest.to_json()
        if data not in self._body_ids:
            self._body_ids[data] = len(self.bodies)
            self.bodies.append(latest)
        return self._body_ids[data]

    def memory(self, memory: Memory) -> int:
        """Its number."""
        book = memory.book
        state = book.ingest_state
        name = (
            replace(book, ingest_state=None, lineage=None),
            tuple(sorted((k, tuple(v)) for k, v in state.intervals.items())),
            state.lowest_unswept_window,
            tuple(sorted(book.lineage.resume_steps.items())),
            memory.trained,
        )
        if name not in self._memory_ids:
            self._memory_ids[name] = len(self.memories)
            self.memories.append(memory)
        return self._memory_ids[name]
