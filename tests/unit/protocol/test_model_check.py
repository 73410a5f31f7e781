"""Every interleaving, crash and lost reply of two trainers and two searchers in small scopes (see support/model.py).

`pytest tests/unit/protocol/test_model_check.py -s` prints the states explored and the counterexamples.
"""

import pytest
from support.model import Explorer
from support.model_world import Rules, Scope

from tba.contracts.records import IngestState
from tba.protocol.commit import Read

SCOPES = {
    "a trainer restarts, another takes over, both train, two searchers": (
        Scope(trainer_lives=(2, 1), shards=(1, 1), steps=1, checkpoint_every=1, faults=0),
        100_000,
    ),
    "two steps of which only the second is checkpointed, so versions are rolled back": (
        Scope(trainer_lives=(2, 1), shards=(1, 0), steps=2, checkpoint_every=2, faults=0),
        30_000,
    ),
    "replies are lost or come late, two searchers": (
        Scope(trainer_lives=(1, 1), shards=(1, 1), steps=1, faults=1),
        40_000,
    ),
    "two requests without a reply, three take-overs, nothing but commits": (
        Scope(trainer_lives=(2, 1), shards=(0, 0), steps=1, checkpoint_every=1, faults=2),
        40_000,
    ),
    "a searcher is killed around its upload and starts again": (
        Scope(trainer_lives=(1, 1), searcher_lives=(2, 1), shards=(2, 1), steps=1, faults=0),
        50_000,
    ),
    "shards land in windows that were swept long ago": (
        Scope(trainer_lives=(1, 1), shards=(1, 1), steps=1, faults=0, windows=True),
        40_000,
    ),
    "each put of a publish and a checkpoint is a move of its own": (
        Scope(trainer_lives=(2, 1), shards=(0, 0), steps=1, faults=0, fine=True),
        5_000,
    ),
}

SMALL = Scope(trainer_lives=(1, 1), shards=(1, 0), steps=1, faults=1)
ROLLBACK = Scope(trainer_lives=(1, 1), shards=(1, 0), steps=2, checkpoint_every=2, faults=0)


@pytest.mark.parametrize("name", SCOPES)
def test_no_interleaving_crash_or_lost_reply_breaks_the_protocol(name):
    scope, least = SCOPES[name]
    result = Explorer(scope).run()
    print(f"\n{name}: {result.states} states, {result.moves} moves, {result.finals} ends, all invariants hold")
    assert not result.violation, "\n".join(result.trace)
    assert result.states > least
    assert result.completed == result.finals > 0, "whatever happens, the run is Complete in the end"


def _put_nonce_aside(read: Read, current, etag):
    """A commit machine that never recognises its own body."""
    return Read.seen(read, current and current.model_copy(update={"nonce": "f" * 32}), etag)


MUTATIONS = {
    "latest is put without a condition": (
        SMALL,
        Rules(conditional=False),
        "commit must rise by one|a fenced trainer|takes effect",
    ),
    "two trainers draw the same nonces": (
        SMALL,
        Rules(nonce=lambda trainer, life, number: f"{number:032x}"),
        "two trainers hold epoch|took effect 0 times",
    ),
    "every commit of a trainer has one nonce": (
        SMALL,
        Rules(nonce=lambda trainer, life, number: f"{trainer:032x}"),
        "took effect 0 times",
    ),
    "a lost reply is not resolved by the nonce": (
        SMALL,
        Rules(seen=_put_nonce_aside),
        "two bodies have the nonce|takes effect twice",
    ),
    "a checkpoint leaves out the ingested intervals": (
        SMALL,
        Rules(record=lambda book: book.manifest("0" * 32, []).model_copy(update={"ingest": IngestState()})),
        "trained twice",
    ),
    "staleness takes versions as they are after a rollback": (
        ROLLBACK,
        Rules(staleness=lambda book, policy: book.step - policy.version),
        "staleness -1",
    ),
    "old windows are never listed again": (
        Scope(trainer_lives=(1, 0), shards=(1, 1), steps=2, checkpoint_every=1, faults=0, windows=True),
        Rules(plan=lambda windows, starved: windows.plan(starved=False, sweep_keys=0)),
        "the bucket holds",
    ),
    "a manifest is written after the commit": (
        SMALL,
        Rules(phases=("data", "read", "manifest")),
        "whose objects are not complete",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_weakened_protocol_has_a_counterexample(name):
    scope, rules, expected = MUTATIONS[name]
    assert not Explorer(scope).run().violation, "the real protocol holds in this scope"
    result = Explorer(scope, rules).run()
    print(f"\n{name}: counterexample after {result.states} states")
    print("\n".join(f"  {i:2} {label}" for i, label in enumerate(result.trace)))
    assert result.violation, f"no counterexample in {result.states} states"
    assert any(part in result.violation for part in expected.split("|")), result.violation
