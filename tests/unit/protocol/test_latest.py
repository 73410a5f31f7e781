import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory_store import Nonces

from tba.contracts.keys import CheckpointKey, WeightsKey
from tba.contracts.records import Latest, RunState
from tba.protocol.latest import (
    TERMINAL,
    RunEnded,
    checkpointed,
    evaluation_done,
    evaluation_wanted,
    finished,
    first,
    published,
    taken_over,
    window_advanced,
)


def weights(version, epoch, attempt=0):
    return WeightsKey(version, epoch, f"{attempt:032x}").path


def checkpoint(step, epoch):
    return CheckpointKey(step, epoch, "c" * 32).path


def moved(latest, move, number, nonce):
    key = weights(number, latest.epoch)
    return {
        "t": lambda: taken_over(latest, nonce),
        "p": lambda: published(latest, manifest=key, version=number, nonce=nonce),
        "c": lambda: checkpointed(latest, checkpoint(number, latest.epoch), nonce),
        "w": lambda: window_advanced(latest, nonce),
        "e": lambda: evaluation_wanted(latest, key, nonce),
        "d": lambda: evaluation_done(latest, key, nonce),
        "f": lambda: finished(latest, RunState.FAILED if number % 2 else RunState.COMPLETE, nonce),
    }[move]()


def test_a_rollback_by_hand():
    """Published 120 and checkpointed 100, then crashed: the next trainer goes on from 100."""
    nonce = Nonces()
    latest = first(nonce())
    assert (latest.commit, latest.epoch, latest.version, latest.step, latest.manifest) == (1, 1, 0, 0, None)
    latest = published(latest, manifest=weights(0, 1), version=0, nonce=nonce())
    latest = checkpointed(latest, checkpoint(0, 1), nonce())
    latest = published(latest, manifest=weights(100, 1), version=100, nonce=nonce())
    latest = checkpointed(latest, checkpoint(100, 1), nonce())
    latest = published(latest, manifest=weights(120, 1), version=120, step=122, nonce=nonce(), evaluation=True)
    assert (latest.commit, latest.epoch, latest.version, latest.step) == (6, 1, 120, 122)
    assert latest.evaluation == weights(120, 1)

    claimed = taken_over(latest, nonce())
    assert (claimed.commit, claimed.epoch, claimed.version, claimed.manifest) == (7, 2, 120, weights(120, 1))
    assert claimed.evaluation is None, "120 will be rolled back: its evaluation must not count"
    assert claimed.checkpoint == checkpoint(100, 1)
    restored = published(claimed, manifest=weights(100, 2), version=100, nonce=nonce())
    assert (restored.version, restored.step, restored.manifest) == (100, 100, weights(100, 2))
    done = finished(checkpointed(restored, checkpoint(101, 2), nonce()), RunState.COMPLETE, nonce())
    assert (done.commit, done.step, done.version, done.state) == (10, 101, 100, RunState.COMPLETE)


def test_an_evaluation_at_or_before_the_checkpoint_survives_a_take_over_but_not_a_deeper_fallback():
    nonce = Nonces()
    latest = published(first(nonce()), manifest=weights(50, 1), version=50, nonce=nonce(), evaluation=True)
    latest = taken_over(checkpointed(latest, checkpoint(50, 1), nonce()), nonce())
    assert latest.evaluation == weights(50, 1)
    fallen = published(latest, manifest=weights(25, 2), version=25, nonce=nonce())
    assert fallen.evaluation is None, "the checkpoint was corrupt and its parent was restored"
    kept = published(latest, manifest=weights(50, 2), version=50, nonce=nonce())
    assert evaluation_done(kept, weights(50, 1), nonce()).evaluation is None
    assert evaluation_done(kept, weights(7, 1), nonce()).evaluation == weights(50, 1), "another one stays wanted"
    assert evaluation_wanted(kept, weights(50, 2), nonce()).evaluation == weights(50, 2)


@given(st.lists(st.tuples(st.sampled_from("tpcwedf"), st.integers(0, 6)), max_size=30))
def test_whatever_happens_commit_rises_by_one_epoch_never_falls_and_the_end_is_final(moves):
    nonce, latest = Nonces(), first("0" * 32)
    for move, number in moves:
        before, fresh = latest, nonce()
        try:
            latest = moved(before, move, number, fresh)
        except RunEnded:
            assert before.state in TERMINAL
            continue
        except ValueError:
            continue
        assert before.state is RunState.RUNNING
        assert (latest.commit, latest.nonce) == (before.commit + 1, fresh)
        assert latest.epoch == before.epoch + (move == "t")
        if latest.version < before.version or latest.step < before.step:
            assert before.manifest is None or WeightsKey.parse(before.manifest).epoch < before.epoch
        if latest.manifest != before.manifest:
            assert latest.manifest == weights(latest.version, latest.epoch)
        assert Latest.model_validate_json(latest.to_json()) == latest


def test_what_another_trainer_made_or_a_falling_version_is_refused():
    nonce = Nonces()
    latest = published(first(nonce()), manifest=weights(4, 1), version=4, nonce=nonce())
    again = published(latest, manifest=weights(4, 1, attempt=1), version=4, nonce=nonce())
    assert again.manifest == weights(4, 1, attempt=1), "a publish whose outcome was unknown may be made again"
    with pytest.raises(ValueError, match="version falls only at a take-over"):
        published(latest, manifest=weights(3, 1), version=3, nonce=nonce())
    with pytest.raises(ValueError, match="snapshot of epoch 1 is needed"):
        published(latest, manifest=weights(5, 2), version=5, nonce=nonce())
    with pytest.raises(ValueError, match="cannot have the key"):
        published(latest, manifest=weights(5, 1), version=6, nonce=nonce())
    with pytest.raises(ValueError, match="cannot have the key"):
        published(latest, manifest=weights(5, 1), version=5, step=4, nonce=nonce())
    with pytest.raises(ValueError, match="not a weights key"):
        published(latest, manifest="latest", version=5, nonce=nonce())
    with pytest.raises(ValueError, match="checkpoint of epoch 1 is needed"):
        checkpointed(latest, checkpoint(5, 2), nonce())
    with pytest.raises(ValueError, match="step never falls within an epoch"):
        checkpointed(checkpointed(latest, checkpoint(5, 1), nonce()), checkpoint(4, 1), nonce())
    same = checkpointed(checkpointed(latest, checkpoint(5, 1), nonce()), checkpoint(5, 1), nonce())
    assert same.checkpoint == checkpoint(5, 1), "a last one, before the trainer goes, may be of the step just saved"
    with pytest.raises(ValueError, match="must be of an epoch <= 1"):
        evaluation_wanted(latest, weights(1, 2), nonce())


def test_a_used_nonce_a_state_that_is_no_end_and_anything_after_the_end_are_refused():
    nonce = Nonces()
    latest = first(nonce())
    with pytest.raises(ValueError, match="nonce is used once"):
        window_advanced(latest, latest.nonce)
    with pytest.raises(ValueError, match="ends as Complete or Failed"):
        finished(latest, RunState.RUNNING, nonce())
    ended = finished(latest, RunState.FAILED, nonce())
    for move in (window_advanced, taken_over, lambda c, n: finished(c, RunState.COMPLETE, n)):
        with pytest.raises(RunEnded, match="Failed for good"):
            move(ended, nonce())
