"""Evaluation blocks: answers of one snapshot to a range of held-out prompts, written once by any searcher.

An Arrow IPC file with a hash over its values in the metadata. Tokens are kept so that a person can read the answers.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

from tba.arrow import ArrowFile, read_single_batch, write_single_batch
from tba.contracts.errors import CorruptObject
from tba.contracts.records import Outcome

_HASH = b"tba.hash"

SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.int64(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("reward", pa.float64(), nullable=True),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("response_tokens", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class EvalResponse:
    """One answer of an evaluation."""

    prompt_id: int  # row in the evaluation's prompt set
    sample: int  # 0..samples-1
    outcome: Outcome
    reward: float | None  # None unless scored
    num_tokens: int
    response_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EvalBlock:
    """All answers of one block."""

    rows: tuple[EvalResponse, ...]


def encode_block(block: EvalBlock) -> bytes:
    """Encode; equal input gives equal bytes. Raises: ValueError if a row contradicts itself."""
    found = _fault(block)
    if found:
        raise ValueError(f"evaluation block: {found}")
    rows = block.rows
    columns = [
        pa.array([r.prompt_id for r in rows], pa.int64()),
        pa.array([r.sample for r in rows], pa.int32()),
        pa.array([str(r.outcome) for r in rows], pa.string()),
        pa.array([r.reward for r in rows], pa.float64()),
        pa.array([r.num_tokens for r in rows], pa.int32()),
        pa.array([r.response_tokens for r in rows], SCHEMA.field("response_tokens").type),
    ]
    return write_single_batch(SCHEMA.with_metadata({_HASH: _content_hash(block)}), columns)


def decode_block(data: bytes) -> EvalBlock:
    """Decode and verify. Raises: CorruptObject if the bytes are truncated, changed, foreign or contradictory."""
    file = read_single_batch(data, SCHEMA, "evaluation block")
    try:
        block = _rows(file)
    except ValueError as e:  # an outcome that is none
        raise CorruptObject(f"evaluation block: {e}") from e
    if file.metadata.get(_HASH) != _content_hash(block):
        raise CorruptObject("evaluation block: values do not match their hash: the bytes were changed")
    found = _fault(block)
    if found:
        raise CorruptObject(f"evaluation block: {found}")
    return block


def _rows(file: ArrowFile) -> EvalBlock:
    column = file.columns
    tokens, offsets = column["response_tokens"].lists()
    ids = tokens.numpy()
    rows = []
    for i, (prompt_id, sample, outcome, reward, num_tokens) in enumerate(
        zip(
            column["prompt_id"].numpy().tolist(),
            column["sample"].numpy().tolist(),
            column["outcome"].strings(),
            column["reward"].numpy(null=np.nan).tolist(),
            column["num_tokens"].numpy().tolist(),
            strict=True,
        )
    ):
        scored = Outcome(outcome) is Outcome.SCORED
        answer = tuple(ids[offsets[i] : offsets[i + 1]].tolist())
        rows.append(EvalResponse(prompt_id, sample, Outcome(outcome), reward if scored else None, num_tokens, answer))
    return EvalBlock(tuple(rows))


def _fault(block: EvalBlock) -> str | None:
    for i, row in enumerate(block.rows):
        if (row.outcome is Outcome.SCORED) != (row.reward is not None):
            return f"row {i}: a scored row, and no other, has a reward; got {row.outcome} with {row.reward}"
        if row.reward is not None and not np.isfinite(row.reward):
            return f"row {i}: reward must be finite, got {row.reward}"
        if row.num_tokens != len(row.response_tokens):
            return f"row {i}: num_tokens is {row.num_tokens} of {len(row.response_tokens)} tokens"
        if row.prompt_id < 0 or row.sample < 0:
            return f"row {i}: prompt_id and sample must be >= 0, got {row.prompt_id}, {row.sample}"
    return None


def _content_hash(block: EvalBlock) -> bytes:
    state = xxhash.xxh3_128()
    for r in block.rows:
        state.update(f"{r.prompt_id},{r.sample},{r.outcome},{r.reward!r},{r.num_tokens}:".encode())
        state.update(np.asarray(r.response_tokens, np.int64).tobytes())
    return state.hexdigest().encode()
