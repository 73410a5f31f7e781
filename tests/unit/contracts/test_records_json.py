"""Records survive the way through JSON; unknown fields do not pass."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.synthetic_run import latest, run_record, whole_run

from tba.contracts.errors import CorruptObject
from tba.contracts.history import ROW
from tba.contracts.records import (
    CheckpointManifest,
    EvalRequest,
    FileEntry,
    FinishReason,
    IngestState,
    Latest,
    Lineage,
    Outcome,
    PolicyId,
    RunRecord,
    ShardHeader,
    SnapshotManifest,
    Span,
    Trajectory,
)


def checkpoint_manifest():
    return CheckpointManifest(
        epoch=2, step=50, nonce="0" * 32, parent=None, files=[FileEntry(name="a", size=3, hash="f" * 32)],
        ingest=IngestState(intervals={"a" * 32: [(0, 3), (5, 6)]}, lowest_unswept_window=4),
        lineage=Lineage(resume_steps={1: 0, 2: 40}), ingest_log_seq=3, metrics_log_seq=4, wall_seconds=1.5,
    )  # fmt: skip


RECORDS = [
    latest(),
    run_record(),
    checkpoint_manifest(),
    SnapshotManifest(epoch=1, version=0, nonce="0" * 32, files=[], tensors=[]),
    ShardHeader(run="r", searcher="s", incarnation="i", seq=0, reward_version="v", stats={"a": 1.0}),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_a_record_survives_the_way_through_json(record):
    assert type(record).model_validate_json(record.to_json()) == record


@pytest.mark.parametrize("row", {type(r): r for r in whole_run(9)}.values(), ids=lambda r: type(r).__name__)
def test_a_history_row_finds_its_own_kind_again(row):
    assert ROW.validate_json(row.to_json()) == row


def test_names_are_camel_case_outside():
    assert b'"modelRevision"' in run_record().to_json()
    assert b"model_revision" not in run_record().to_json()


@pytest.mark.parametrize("kind", [Latest, RunRecord, CheckpointManifest])
def test_an_unknown_field_is_an_error(kind):
    record = next(r for r in RECORDS if isinstance(r, kind))
    with pytest.raises(ValidationError, match="surprise"):
        kind.model_validate({**record.model_dump(), "surprise": 1})


def test_records_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        latest().step = 5


@given(st.integers(1, 10**4), st.integers(1, 500))
def test_the_blocks_of_an_evaluation_hold_every_prompt_once(num_prompts, block_prompts):
    request = EvalRequest(
        prompts="p", num_prompts=num_prompts, block_prompts=block_prompts, sampling="greedy", samples=1
    )
    covered = [
        p
        for b in range(request.num_blocks)
        for p in range(b * block_prompts, min((b + 1) * block_prompts, num_prompts))
    ]
    assert covered == list(range(num_prompts))


def test_a_trajectory_is_as_old_as_its_oldest_span():
    trajectory = Trajectory(
        prompt_id=0, visit=0, visit_size=2, prompt_tokens=[1], response_tokens=[1, 2, 3], outcome=Outcome.SCORED,
        reward=1.0, finish_reason=FinishReason.STOP, spans=[Span(2, 1, 8), Span(1, 2, 6)], temperature=1.0,
        created_at=0.0,
    )  # fmt: skip
    assert trajectory.policy == PolicyId(2, 6)


def test_a_run_is_the_same_run_whatever_its_live_fields_say():
    config = run_record().config
    live = config.model_copy(update={"buffer": config.buffer.model_copy(update={"max_policy_lag": 3})})
    frozen = config.model_copy(update={"objective": config.objective.model_copy(update={"beta": 0.9})})
    assert live.identity() == config.identity()
    assert frozen.identity() != config.identity()


def test_a_latest_that_cannot_be_parsed_is_a_damaged_object():
    with pytest.raises(CorruptObject, match=r"^latest cannot be parsed: is no valid JSON .*; restore it from a copy"):
        Latest.parse(b'{"commit": 2')
