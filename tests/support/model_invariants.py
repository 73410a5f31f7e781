"""What must hold in every world of the model, whatever happened on the way to it."""

from collections.abc import Callable, Iterable

from support.model_world import Memory, Shard, Trainer, Violation, World

from tba.contracts.records import Latest, PolicyId, RunState, ShardId
from tba.protocol.bookkeeping import Bookkeeping


def check_change(before: Latest | None, after: Latest) -> None:
    """One body of `latest` takes another's place."""
    if before is None:
        return
    if after.commit != before.commit + 1:
        raise Violation(f"commit must rise by one, went from {before.commit} to {after.commit}")
    if after.epoch < before.epoch:
        raise Violation(f"a fenced trainer of epoch {after.epoch} writes over epoch {before.epoch}")
    if after.nonce == before.nonce:
        raise Violation(f"two bodies have the nonce {after.nonce}")
    if before.state is not RunState.RUNNING:
        raise Violation(f"the run is {before.state} and goes on")


def check_readable(world: World, latest: Latest) -> None:
    """What `latest` names is whole."""
    for key in (latest.manifest, latest.checkpoint):
        if key is not None and not {("data", key), ("manifest", key)} <= world.objects:
            raise Violation(f"latest names {key}, whose objects are not complete")


def check_complete(shards: Iterable[Shard], trained: tuple[ShardId, ...]) -> None:
    """A run that is Complete has trained what the bucket holds."""
    stored = tuple(sorted({shard.id for shard in shards}))
    if trained != stored:
        raise Violation(f"the run is Complete having trained {trained}, the bucket holds {stored}")


def check_staleness(
    shards: Iterable[Shard], memory: Memory, staleness_of: Callable[[Bookkeeping, PolicyId], int]
) -> None:
    """No row is newer than the policy that trains on it."""
    for shard in shards:
        if shard.id in memory.trained and shard.policy.epoch <= memory.book.epoch:
            staleness = staleness_of(memory.book, shard.policy)
            if staleness < 0:
                raise Violation(f"staleness {staleness} of {shard.policy} at step {memory.book.step}")


def check_final(trainers: Iterable[Trainer], latest: Latest | None) -> bool:
    """No move is left; whether the run is Complete."""
    trainers = tuple(trainers)
    complete = latest is not None and latest.state is RunState.COMPLETE
    exhausted = all(t.pc in ("fenced", "over") or (t.pc == "down" and t.lives == 0) for t in trainers)
    if not complete and not exhausted:
        raise Violation("the run stands still with a trainer alive")
    if not complete and any(t.pc == "over" for t in trainers):
        raise Violation("a trainer ended a run that is not Complete")
    return complete
