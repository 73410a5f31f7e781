"""Shards as bytes: an Arrow IPC file (zstd, one record batch) with the header and a content hash in its metadata.

pandas, DuckDB and Hugging Face datasets open the file. The hash covers the header and every column's values, so that a
changed bit is noticed wherever it lies; it is no proof of origin, hence every value is range-checked as well.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import xxhash
from pydantic import ValidationError

from tba.arrow import ArrowFile, Column, read_single_batch, write_single_batch
from tba.contracts.errors import CorruptObject
from tba.contracts.explain import first_fault
from tba.contracts.records import FinishReason, ShardHeader, Trajectory
from tba.shards.batch import OUTCOMES, ShardBatch, fault, from_rows

_HEADER = b"tba.header"
_HASH = b"tba.hash"
_OUTCOME_NAMES = [str(o) for o in OUTCOMES]
_FINISH_NAMES = [str(FinishReason.LENGTH), str(FinishReason.STOP)]


def _field(name: str, kind: pa.DataType, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable)


_TOKENS = pa.list_(_field("item", pa.int32()))
_LOGPROBS = pa.list_(_field("item", pa.float32()))
_SPAN_FIELDS = [_field("num_tokens", pa.int64()), _field("epoch", pa.int64()), _field("version", pa.int64())]
_SPANS = pa.list_(_field("item", pa.struct(_SPAN_FIELDS)))

SCHEMA = pa.schema(
    [
        _field("prompt_id", pa.int64()),
        _field("visit", pa.int64()),
        _field("visit_size", pa.int32()),
        _field("outcome", pa.string()),
        _field("reward", pa.float32(), nullable=True),
        _field("finish_reason", pa.string()),
        _field("temperature", pa.float32()),
        _field("created_at", pa.float64()),
        _field("prompt_tokens", _TOKENS),
        _field("response_tokens", _TOKENS),
        _field("spans", _SPANS),
        _field("sampler_logprobs", _LOGPROBS, nullable=True),
        _field("ref_logprob", pa.float32(), nullable=True),
        _field("ref_epoch", pa.int64(), nullable=True),
        _field("ref_version", pa.int64(), nullable=True),
    ]
)


def encode_shard(header: ShardHeader, rows: Sequence[Trajectory]) -> bytes:
    """Encode trajectories; equal input gives equal bytes.

    Raises: ValueError if a row is invalid, so that a searcher fails where the fault is made.
    """
    try:
        batch = from_rows(header, rows)
    except OverflowError as error:
        raise ValueError(f"shard {header.id}: a number does not fit its column: {error}") from error
    found = fault(batch)
    if found:
        raise ValueError(f"shard {header.id}: {found}")
    text = header.to_json()
    try:
        ShardHeader.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(
            f"shard {header.id}: header does not survive JSON, stats must be finite: {first_fault(error)}"
        ) from error
    schema = SCHEMA.with_metadata({_HEADER: text, _HASH: _content_hash(text, batch).encode()})
    return write_single_batch(schema, _arrow_columns(batch))


def decode_shard(
    data: bytes | bytearray | memoryview,
    *,
    run_id: str | None,
    num_prompts: int | None = None,
    vocabulary: int | None = None,
) -> ShardBatch:
    """Decode and verify a shard. `run_id`, `num_prompts` and `vocabulary` (token ids below it) bind it to a run.

    Raises: CorruptObject if the bytes are truncated, changed or foreign, or if any value could not be trained on.
    """
    arrow = read_single_batch(data, SCHEMA, "shard")
    text = arrow.metadata.get(_HEADER, b"")
    try:
        header = ShardHeader.model_validate_json(text)
    except ValidationError as error:
        raise CorruptObject(f"shard: header is not valid: {first_fault(error)}") from error
    what = f"shard {header.incarnation}/{header.seq}"
    if run_id is not None and header.run != run_id:
        raise CorruptObject(f"{what}: belongs to run {header.run!r}, expected {run_id!r}: a foreign shard")
    batch = _columns(header, arrow, what)
    got, expected = _content_hash(text, batch), arrow.metadata.get(_HASH, b"").decode("ascii", "replace")
    if got != expected:
        raise CorruptObject(f"{what}: content hash is {got}, recorded {expected}: the bytes were changed")
    found = fault(batch) or _binding_fault(batch, num_prompts, vocabulary)
    if found:
        raise CorruptObject(f"{what}: {found}")
    return batch


def _binding_fault(batch: ShardBatch, num_prompts: int | None, vocabulary: int | None) -> str | None:
    if num_prompts is not None and len(batch) and int(batch.prompt_ids.max()) >= num_prompts:
        return f"prompt_id {batch.prompt_ids.max()} is beyond the {num_prompts} prompts of the run"
    for name in ("prompt_tokens", "response_tokens"):
        tokens = getattr(batch, name)
        if vocabulary is not None and len(tokens) and int(tokens.max()) >= vocabulary:
            return f"{name} holds id {tokens.max()}, beyond the vocabulary of {vocabulary}"
    return None


def _content_hash(header: bytes, batch: ShardBatch) -> str:
    """xxh3_128 over the header and every column: name, type, length and values, in the order of ShardBatch."""
    state = xxhash.xxh3_128(header)
    for name, values in batch.columns():
        state.update(f"|{name}:{values.dtype.str}:{len(values)}|".encode())
        state.update(np.ascontiguousarray(values).data)
    return state.hexdigest()


def _arrow_columns(b: ShardBatch) -> list[pa.Array]:
    """In the order of SCHEMA."""
    names, reasons = np.array(_OUTCOME_NAMES, object), np.array(_FINISH_NAMES, object)
    spans = pa.StructArray.from_arrays(
        [pa.array(b.span_num_tokens), pa.array(b.span_epochs), pa.array(b.span_versions)], fields=_SPAN_FIELDS
    )
    no_logprobs = np.diff(b.sampler_offsets) == 0
    no_ref = b.ref_epochs < 0
    return [
        pa.array(b.prompt_ids),
        pa.array(b.visits),
        pa.array(b.visit_sizes),
        pa.array(names[b.outcomes], pa.string()),
        pa.array(b.rewards, mask=~b.scored),
        pa.array(reasons[b.finish_stop.astype(np.int64)], pa.string()),
        pa.array(b.temperatures),
        pa.array(b.created_at),
        _list_array(b.prompt_offsets, pa.array(b.prompt_tokens), _TOKENS),
        _list_array(b.response_offsets, pa.array(b.response_tokens), _TOKENS),
        _list_array(b.span_offsets, spans, _SPANS),
        _list_array(b.sampler_offsets, pa.array(b.sampler_logprobs), _LOGPROBS, mask=no_logprobs),
        pa.array(b.ref_logprobs, mask=no_ref),
        pa.array(b.ref_epochs, mask=no_ref),
        pa.array(b.ref_versions, mask=no_ref),
    ]


def _list_array(
    starts: np.ndarray, values: pa.Array, kind: pa.DataType, *, mask: np.ndarray | None = None
) -> pa.ListArray:
    nulls = None if mask is None else pa.array(mask)
    return pa.ListArray.from_arrays(pa.array(starts.astype(np.int32)), values, type=kind, mask=nulls)


def _columns(header: ShardHeader, arrow: ArrowFile, what: str) -> ShardBatch:
    """Columns of a structurally valid file."""
    column = arrow.columns
    spans, span_offsets = column["spans"].lists()
    num_tokens, epochs, versions = spans.children  # (M,) each
    prompt_tokens, prompt_offsets = column["prompt_tokens"].lists()
    response_tokens, response_offsets = column["response_tokens"].lists()
    logprobs, logprob_offsets = column["sampler_logprobs"].lists()
    return ShardBatch(
        header=header,
        prompt_ids=column["prompt_id"].numpy(),
        visits=column["visit"].numpy(),
        visit_sizes=column["visit_size"].numpy(),
        outcomes=_codes(column["outcome"], _OUTCOME_NAMES, what).astype(np.uint8),
        rewards=column["reward"].numpy(null=np.nan),
        finish_stop=_codes(column["finish_reason"], _FINISH_NAMES, what) == 1,
        temperatures=column["temperature"].numpy(),
        created_at=column["created_at"].numpy(),
        prompt_tokens=prompt_tokens.numpy(),
        prompt_offsets=prompt_offsets,
        response_tokens=response_tokens.numpy(),
        response_offsets=response_offsets,
        span_num_tokens=num_tokens.numpy(),
        span_epochs=epochs.numpy(),
        span_versions=versions.numpy(),
        span_offsets=span_offsets,
        sampler_logprobs=logprobs.numpy(),
        sampler_offsets=logprob_offsets,
        ref_logprobs=column["ref_logprob"].numpy(null=np.nan),
        ref_epochs=column["ref_epoch"].numpy(null=-1),
        ref_versions=column["ref_version"].numpy(null=-1),
    )


def _codes(column: Column, names: list[str], what: str) -> np.ndarray:
    codes = column.codes(names)
    if (codes < 0).any():
        raise CorruptObject(f"{what}: row {int(np.argmin(codes))}: a value is not one of {names}")
    return codes
