"""Explores every interleaving, crash and lost reply of two trainers and two searchers over an abstract bucket.

The programs below decide nothing themselves: they call the functions that trainer and committer run (`Read.seen`,
`published`, `Bookkeeping.ingest`, `carry_out`, …). `Rules` holds those that a mutation test replaces.

What they work on is in model_world.py, what must hold in model_invariants.py. A move is one visible action (read, swap,
list, put); local actions are run together with the visible one before them, unless `Scope.fine`. A fault is a request
without a reply that takes effect at once, at any later time or never.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

from support.model_invariants import check_change, check_complete, check_final, check_readable, check_staleness
from support.model_world import Flight, Interned, Memory, Rules, Scope, Searcher, Shard, Trainer, Violation, World

from tba.contracts.keys import CheckpointKey, WeightsKey
from tba.contracts.records import CheckpointManifest, Latest, PolicyId, RunState, ShardId
from tba.protocol.bookkeeping import Bookkeeping
from tba.protocol.commit import Done, Plan, Swap
from tba.protocol.latest import RunEnded, checkpointed, finished, published, window_advanced
from tba.protocol.windows import Windows, carry_out

Move = tuple[str, Callable[[], World]]
"""What happens, and the world after it; it is asked for second, so that a violation on the way has a name."""
COMMITS = ("takeover", "publish", "window", "checkpoint", "finish")


@dataclass
class Result:
    states: int
    moves: int
    violation: str = ""
    trace: list[str] = field(default_factory=list)
    finals: int = 0  # worlds without a further move
    completed: int = 0  # of them, with the run Complete


class Explorer:
    """Breadth first, so a counterexample is a shortest one."""

    def __init__(self, scope: Scope, rules: Rules | None = None) -> None:
        self.scope = scope
        self.rules = rules or Rules()
        self._values = Interned()
        self._saved: dict[str, tuple[CheckpointManifest, tuple[ShardId, ...]]] = {}
        self._seen: dict[tuple, tuple[str, int]] = {}
        self._polled: dict[tuple, int] = {}

    def run(self, max_states: int = 10_000_000) -> Result:
        """Explore all of the scope, or up to the first violation."""
        start = self._initial()
        parents: dict[World, tuple[World | None, str]] = {start: (None, "start")}
        todo = deque([start])
        result = Result(1, 0)
        world, label = start, ""
        try:
            while todo:
                world, label = todo.popleft(), "look"
                stuck = True
                for label, move in self.moves(world):  # noqa: B007 - the handler below reads it
                    stuck = False
                    result.moves += 1
                    after = move()
                    if after not in parents:
                        parents[after] = (world, label)
                        todo.append(after)
                if len(parents) > max_states:
                    raise RuntimeError(f"scope too large: more than {max_states} states")
                if stuck:
                    label = "no further move"
                    result.finals += 1
                    result.completed += check_final(world.trainers, self._values.bodies[world.latest])
        except Violation as violation:
            result.violation = str(violation)
            result.trace = [*_path(parents, world), f"{label}  <- {violation}"]
        result.states = len(parents)
        return result

    # -- moves ---------------------------------------------------------------------------------------------------

    def moves(self, world: World) -> Iterator[Move]:
        """Every next move; carrying it out raises Violation if it leads where nothing must."""
        for i, trainer in enumerate(world.trainers):
            if trainer.pc == "down":
                # By symmetry trainer 0 starts first.
                if trainer.lives > 0 and (i == 0 or world.trainers[0].life > 0):
                    yield f"trainer {i}: starts", partial(self._put, world, i, _born(trainer))
            elif trainer.pc not in ("over", "fenced"):
                yield from self._trainer(world, i, trainer)
        for i, searcher in enumerate(world.searchers):
            yield from self._searcher(world, i, searcher)
        if world.flight is not None:
            yield "network: the swap without a reply takes effect", partial(self._arrive, world, world.flight)

    def _trainer(self, world: World, i: int, t: Trainer) -> Iterator[Move]:
        name = f"trainer {i}"
        if t.lives > 0:  # killed for good is the same as never moving again, which is explored anyway
            yield f"{name}: is killed in {t.pc} {t.phase}", partial(self._put, world, i, Trainer(t.lives, t.life))
        if t.phase in ("data", "manifest"):
            yield f"{name}: puts {t.phase} of {t.pc}", partial(self._upload, world, i, t)
        elif t.phase == "read":
            yield f"{name}: reads latest for {t.pc}", partial(self._read, world, i, t, world.latest)
        elif t.phase == "swap":
            yield from self._swap(world, i, t)
        elif t.pc == "restore":
            yield f"{name}: restores", partial(self._restore, world, i, t)
        elif t.pc == "train":
            yield f"{name}: lists, ingests, steps", partial(self._poll, world, i, t, starved=False)
        elif t.pc == "drain" and all(s.pc == "over" for s in world.searchers):
            yield f"{name}: lists everything, ingests", partial(self._poll, world, i, t, starved=True)

    def _searcher(self, world: World, i: int, s: Searcher) -> Iterator[Move]:
        name = f"searcher {i}"
        if s.pc == "poll":
            latest = self._values.bodies[world.latest]
            if latest is not None and latest.manifest is not None:
                key = WeightsKey.parse(latest.manifest)
                window = latest.commit if self.scope.windows else 0
                loaded = s._replace(pc="upload", policy=PolicyId(key.epoch, key.version), window=window)
                label = f"{name}: loads epoch {key.epoch} version {key.version}, window {window}"
                yield label, partial(self._put_searcher, world, i, loaded)
        elif s.pc == "upload":
            shard = Shard(s.window, i, s.life, s.seq, s.policy)
            landed = world._replace(shards=world.shards | {shard})
            done = s._replace(pc="poll", seq=s.seq + 1, left=s.left - 1, policy=PolicyId(0, 0), window=0)
            yield f"{name}: uploads shard {s.seq}", partial(self._put_searcher, landed, i, done)
            if world.faults > 0 and shard not in world.shards:
                unsure = landed._replace(faults=world.faults - 1)
                yield f"{name}: uploads shard {s.seq}, no reply", partial(self._put_searcher, unsure, i, s)
            if s.lives > 1:
                born = Searcher(s.lives - 1, s.left - 1, s.life + 1)
                yield f"{name}: is killed before its upload", partial(self._put_searcher, world, i, born)
                yield f"{name}: is killed after its upload", partial(self._put_searcher, landed, i, born)

    # -- the trainer's program -------------------------------------------------------------------------------------

    def _enter(self, t: Trainer, pc: str) -> Trainer:
        """Go to `pc`; a commit begins a new plan, publish and checkpoint fix the key of what they make."""
        t = t._replace(pc=pc, phase="", key="", base=0)
        if pc not in COMMITS:
            return t
        t = t._replace(commits=t.commits + 1, landed=0, phase="ask")
        memory = self._values.memories[t.book]
        book = memory.book
        if pc == "publish":
            key = WeightsKey(book.step, book.epoch, self._object_nonce(t))
            return t._replace(key=key.path, phase=self.rules.phases[0])
        if pc == "checkpoint":
            key = CheckpointKey(book.step, book.epoch, self._object_nonce(t))
            self._saved[key.path] = (self.rules.record(book), memory.trained)
            return t._replace(key=key.path, phase=self.rules.phases[0])
        return t

    def _object_nonce(self, t: Trainer) -> str:
        """Names what is in the object, so that one key never stands for two contents in different worlds."""
        return f"{t.life:08x}{t.book:024x}"

    def _after(self, t: Trainer) -> Trainer:
        """Where the program goes once a commit is done."""
        book = self._values.memories[t.book].book
        every, steps = self.scope.checkpoint_every, self.scope.steps
        if t.pc == "takeover":
            return self._enter(t, "restore")
        if t.pc == "publish":
            due = book.checkpoint is None or (book.step % every == 0 and self._unsaved(book))
            return self._enter(t, "checkpoint") if due else self._forward(t, book, steps)
        if t.pc == "checkpoint":
            saved = self._values.memory(self._values.memories[t.book]._replace(book=book.checkpointed(t.key)))
            t = t._replace(book=saved)
            drained = book.checkpoint is not None and not self._unsaved(book)
            return self._enter(t, "finish") if drained else self._forward(t, book, steps)
        if t.pc == "window":
            return self._enter(t, "train")
        return _ended("over")

    def _unsaved(self, book: Bookkeeping) -> bool:
        return CheckpointKey.parse(book.checkpoint).step < book.step if book.checkpoint else True

    def _forward(self, t: Trainer, book: Bookkeeping, steps: int) -> Trainer:
        if book.step >= steps:
            return self._enter(t, "drain")
        return self._enter(t, "window" if self.scope.windows else "train")

    def _restore(self, world: World, i: int, t: Trainer) -> World:
        latest = self._values.bodies[t.known]
        assert latest is not None
        if latest.checkpoint is None:
            memory = Memory(Bookkeeping.begun(latest.epoch), ())
        else:
            manifest, trained = self._saved[latest.checkpoint]
            memory = Memory(Bookkeeping.restored(manifest, latest.checkpoint, latest.epoch), trained)
        check_staleness(world.shards, memory, self.rules.staleness)
        t = self._enter(t._replace(book=self._values.memory(memory)), "publish")
        return self._local(self._put(world, i, t), i)

    def _poll(self, world: World, i: int, t: Trainer, *, starved: bool) -> World:
        """List what the plan says, ingest what is new, step (not when draining)."""
        question = (t.book, t.known if self.scope.windows else 0, world.shards, starved)
        if question not in self._polled:
            self._polled[question] = self._values.memory(self._ingested(world, t, starved=starved))
        t = self._enter(t._replace(book=self._polled[question]), "checkpoint" if starved else "publish")
        return self._local(self._put(world, i, t), i)

    def _ingested(self, world: World, t: Trainer, *, starved: bool) -> Memory:
        memory = self._values.memories[t.book]
        latest = self._values.bodies[t.known]
        assert latest is not None
        windows = Windows(lowest_unswept=memory.book.ingest_state.lowest_unswept_window)
        windows = windows.observed(latest.commit if self.scope.windows else 0, 0.0, linger_seconds=0.0)
        plan = self.rules.plan(windows, starved)
        by_path = {shard.path: shard for shard in world.shards}
        paths = sorted(by_path)
        listing = carry_out(plan, lambda prefix, after: _list(paths, prefix, after))
        new = sorted({by_path[p].id for p in listing.keys if not memory.book.contains(by_path[p].id)})
        book = memory.book.ingest(*new).swept(windows.listed(plan, listing).durable(()))
        memory = Memory(book if starved else book.stepped(), tuple(sorted((*memory.trained, *new))))
        if len(set(memory.trained)) < len(memory.trained):
            raise Violation("a shard is trained twice in the surviving run")
        check_staleness(world.shards, memory, self.rules.staleness)
        return memory

    def _upload(self, world: World, i: int, t: Trainer) -> World:
        """Put one part. The commit starts from what the process remembers of `latest`, as the committer does."""
        following = self.rules.phases[self.rules.phases.index(t.phase) + 1]
        world = world._replace(objects=world.objects | {(t.phase, t.key)})
        t = t._replace(phase="ask" if following == "read" else following)
        return self._local(self._put(world, i, t), i)

    def _local(self, world: World, i: int) -> World:
        """Run local actions up to the next visible one."""
        while True:
            t = world.trainers[i]
            if t.phase == "ask":
                return self._read(world, i, t, t.known)
            if self.scope.fine:
                return world
            if t.phase in ("data", "manifest"):
                return self._upload(world, i, t)
            if t.pc == "restore":
                return self._restore(world, i, t)
            return world

    # -- one commit, driven as the committer drives it -------------------------------------------------------------

    def _read(self, world: World, i: int, t: Trainer, current: int) -> World:
        """Go on with the body `current`, from storage or from memory."""
        kind, body = self._ask(i, t, current)
        if kind == "swap":
            if t.pc == "takeover":
                t = t._replace(landed=0)  # whatever landed has been overtaken: it goes on on top, as one more epoch
            return self._put(world, i, t._replace(phase="swap", base=current))
        if kind == "done":
            return self._finish_commit(world, i, t, body)
        return self._put(world, i, _ended("fenced" if kind == "fenced" else "over"))

    def _ask(self, i: int, t: Trainer, current: int) -> tuple[str, int]:
        """What the commit machine makes of the body `current`: (swap | done | fenced | ended, body)."""
        number = t.commits
        question = (i, t.life, number, t.pc, t.key, t.book if t.pc != "takeover" else 0, current)
        if question not in self._seen:
            self._seen[question] = self._ask_machine(i, t, current)
        return self._seen[question]

    def _ask_machine(self, i: int, t: Trainer, current: int) -> tuple[str, int]:
        nonce = self.rules.nonce(i, t.life, t.commits)
        if t.pc == "takeover":
            plan = Plan.take_over(nonce)
        else:
            plan = Plan(nonce, self._transition(t), self._values.memories[t.book].book.epoch)
        try:
            answer = self.rules.seen(plan.start(), self._values.bodies[current], str(current) if current else None)
        except RunEnded:
            return "ended", current
        except ValueError as error:
            raise Violation(f"a transition of {t.pc} is refused: {error}") from error
        if isinstance(answer, Swap):
            assert answer.etag == (str(current) if current else None)
            return "swap", self._values.body(answer.body)
        if isinstance(answer, Done):
            return "done", self._values.body(answer.latest)
        return "fenced", current

    def _transition(self, t: Trainer) -> Callable[[Latest, str], Latest]:
        if t.pc == "publish":
            version = WeightsKey.parse(t.key).version
            return lambda current, nonce: published(current, manifest=t.key, version=version, nonce=nonce)
        if t.pc == "checkpoint":
            return lambda current, nonce: checkpointed(current, t.key, nonce)
        if t.pc == "window":
            return window_advanced
        return lambda current, nonce: finished(current, RunState.COMPLETE, nonce)

    def _swap(self, world: World, i: int, t: Trainer) -> Iterator[Move]:
        name = f"trainer {i}: swaps latest for {t.pc}"
        _, body = self._ask(i, t, t.base)
        again = t._replace(phase="read", base=0)
        flight = Flight(body, t.base, i, t.life, t.commits)
        if self.rules.conditional and world.latest != t.base:
            yield f"{name}: conflict", partial(self._put, world, i, again)
        else:
            yield f"{name}: done", partial(self._confirmed, world, i, flight)
            if t.lives > 0:
                died = Trainer(t.lives, t.life)
                yield f"{name}: done, and is killed", lambda: self._put(self._land(world, flight), i, died)
        if world.faults > 0 and world.flight is None:
            # Arriving at once is a lost reply, never arriving is a failed request, later is a late one.
            flying = world._replace(faults=world.faults - 1, flight=flight)
            yield f"{name}: no reply", partial(self._put, flying, i, again)

    def _confirmed(self, world: World, i: int, flight: Flight) -> World:
        world = self._land(world, flight)
        return self._finish_commit(world, i, world.trainers[i], flight.body)

    def _arrive(self, world: World, flight: Flight) -> World:
        world = world._replace(flight=None)
        matches = not self.rules.conditional or world.latest == flight.etag
        return self._land(world, flight) if matches else world

    def _land(self, world: World, flight: Flight) -> World:
        """The swap takes effect. Raises: Violation if it must not."""
        sender = world.trainers[flight.trainer]
        if sender.life == flight.life and sender.pc not in ("down", "over", "fenced"):
            if sender.commits != flight.number or sender.landed:
                raise Violation(f"one commit takes effect twice: {flight}")
            world = self._put(world, flight.trainer, sender._replace(landed=1))
        before, body = self._values.bodies[world.latest], self._values.bodies[flight.body]
        assert body is not None
        world = world._replace(latest=flight.body)
        check_change(before, body)
        check_readable(world, body)
        if body.state is RunState.COMPLETE:
            assert body.checkpoint is not None
            check_complete(world.shards, self._saved[body.checkpoint][1])
        return self._pruned(world)

    def _finish_commit(self, world: World, i: int, t: Trainer, body: int) -> World:
        if t.landed != 1:
            raise Violation(f"trainer {i} takes a commit of {t.pc} for done that took effect {t.landed} times")
        latest = self._values.bodies[body]
        assert latest is not None
        for j, other in enumerate(world.trainers):
            held = self._values.bodies[other.known]
            if t.pc == "takeover" and j != i and held is not None and held.epoch == latest.epoch:
                raise Violation(f"two trainers hold epoch {latest.epoch}")
        return self._local(self._put(world, i, self._after(t._replace(known=body))), i)

    # -- values ----------------------------------------------------------------------------------------------------

    def _initial(self) -> World:
        self._values.memory(Memory(Bookkeeping(epoch=0), ()))
        return World(
            latest=0,
            trainers=tuple(Trainer(lives) for lives in self.scope.trainer_lives),
            searchers=tuple(
                Searcher(lives, left, pc="poll" if left else "over")
                for lives, left in zip(self.scope.searcher_lives, self.scope.shards, strict=True)
            ),
            shards=frozenset(),
            objects=frozenset(),
            flight=None,
            faults=self.scope.faults,
        )

    def _put(self, world: World, i: int, trainer: Trainer) -> World:
        trainers = (*world.trainers[:i], trainer, *world.trainers[i + 1 :])
        died = trainer.pc in ("down", "over", "fenced") and world.trainers[i].key
        world = world._replace(trainers=trainers)
        return self._pruned(world) if died else world

    def _put_searcher(self, world: World, i: int, searcher: Searcher) -> World:
        if searcher.left <= 0:
            searcher = Searcher(0, 0, pc="over")
        return world._replace(searchers=(*world.searchers[:i], searcher, *world.searchers[i + 1 :]))

    def _pruned(self, world: World) -> World:
        """Forget objects that nobody can reach any more, and a delayed swap that can match no more."""
        latest = self._values.bodies[world.latest]
        if self.rules.conditional and world.flight is not None and latest is not None:
            expected = self._values.bodies[world.flight.etag]
            # `commit` strictly rises, which every change is checked for, so no older body comes back.
            if expected is None or expected.commit < latest.commit:
                world = world._replace(flight=None)
        keys = {t.key for t in world.trainers}
        if latest is not None:
            keys |= {latest.manifest, latest.checkpoint}
        if world.flight is not None:
            flying = self._values.bodies[world.flight.body]
            assert flying is not None
            keys |= {flying.manifest, flying.checkpoint}
        return world._replace(objects=frozenset(o for o in world.objects if o[1] in keys))


def _born(trainer: Trainer) -> Trainer:
    """A new process, which first takes over."""
    return Trainer(trainer.lives - 1, trainer.life + 1, "takeover", "read")


def _ended(pc: str) -> Trainer:
    """A process that will not move again; nothing else about it matters."""
    return Trainer(0, 1, pc)


def _list(paths: list[str], prefix: str, after: str | None) -> Iterator[SimpleNamespace]:
    return (SimpleNamespace(key=p) for p in paths if p.startswith(prefix) and (after is None or p > after))


def _path(parents: dict[World, tuple[World | None, str]], world: World | None) -> list[str]:
    labels = []
    while world is not None:
        world, label = parents[world]
        labels.append(label)
    return labels[::-1]
