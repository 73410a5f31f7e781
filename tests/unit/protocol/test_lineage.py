import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.contracts.records import CheckpointManifest, IngestState, Lineage, PolicyId
from tba.protocol.lineage import effective_version, is_discarded, surviving, with_takeover

# Epoch 1 published up to 12, epoch 2 resumed at 10, epoch 3 left no checkpoint, epoch 4 resumed at 20.
LINEAGE = Lineage(resume_steps={1: 0, 2: 10, 4: 20})


def manifest(epoch, step, lineage):
    return CheckpointManifest(
        epoch=epoch, step=step, nonce="0" * 32, parent=None, files=[], ingest=IngestState(), lineage=lineage,
        ingest_log_seq=0, metrics_log_seq=0, wall_seconds=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "expected"),
    [((1, 9), 9), ((1, 12), 10), ((2, 12), 12), ((2, 25), 20), ((3, 23), 20), ((4, 23), 23), ((1, 30), 10)],
)
def test_effective_version_is_the_last_step_shared_with_the_surviving_run(policy, expected):
    assert effective_version(LINEAGE, PolicyId(*policy)) == expected


@pytest.mark.parametrize(
    ("epoch", "step", "discarded"), [(1, 10, False), (1, 11, True), (2, 11, False), (2, 21, True), (4, 99, False)]
)
def test_rows_beyond_a_later_resume_step_are_discarded(epoch, step, discarded):
    assert is_discarded(LINEAGE, epoch, step) is discarded


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=8), st.integers(1, 9), st.integers(0, 40))
def test_staleness_is_never_negative_whatever_was_rolled_back(history, epoch, version):
    """Random runs: each epoch trains some steps and either reaches a checkpoint there or dies without one."""
    lineage, resume, made = Lineage(), 0, {}
    saved = Lineage()
    for number, (steps, saves) in enumerate(history, start=1):
        lineage = with_takeover(saved, number, resume)
        made[number] = resume + steps
        if saves:
            saved, resume = lineage, resume + steps
    last = len(history) + 1
    lineage = with_takeover(saved, last, resume)
    policy = PolicyId(min(epoch, last), min(version, made.get(min(epoch, last), resume)))
    assert 0 <= effective_version(lineage, policy) <= resume


def test_the_lineage_of_a_resumed_run_adds_its_own_epoch_once():
    checkpoint = manifest(2, 20, Lineage(resume_steps={1: 0, 2: 10}))
    assert surviving(checkpoint, 4) == LINEAGE
    assert surviving(checkpoint, 2) == checkpoint.lineage
    assert surviving(None, 3) == Lineage(resume_steps={3: 0})


def test_an_epoch_that_is_not_newer_is_refused():
    with pytest.raises(ValueError, match="epoch must be > 4"):
        with_takeover(LINEAGE, 4, 25)
    with pytest.raises(ValueError, match="resume_step must be >= 0"):
        with_takeover(LINEAGE, 5, -1)
