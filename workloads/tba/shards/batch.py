"""`ShardBatch`: the rows of a shard as columns, made from trajectories and checked as a whole.

Legend: n rows; T response tokens, U prompt tokens, M spans and L sampler log-probs over all rows. `x_offsets` (n + 1)
int64 starts at 0: row i owns x[x_offsets[i]:x_offsets[i + 1]].
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain

import numpy as np

from tba.contracts.records import FinishReason, Outcome, PolicyId, ShardHeader, Span, Trajectory

OUTCOMES = (Outcome.SCORED, Outcome.FAILED, Outcome.TIMED_OUT)
SCORED = 0
_OUTCOME_CODES = {outcome: code for code, outcome in enumerate(OUTCOMES)}
_EPOCH_LIMIT = 10**6  # of the key layout
_VERSION_LIMIT = 10**10
_INT32_LIMIT = 2**31


@dataclass(frozen=True, slots=True, eq=False)
class ShardBatch:
    """Columns of a shard. Field order is the order in which they are hashed."""

    header: ShardHeader
    prompt_ids: np.ndarray  # (n,) int64
    visits: np.ndarray  # (n,) int64
    visit_sizes: np.ndarray  # (n,) int32
    outcomes: np.ndarray  # (n,) uint8: index into OUTCOMES
    rewards: np.ndarray  # (n,) float32: nan unless scored
    finish_stop: np.ndarray  # (n,) bool: ended by itself; False = by the token limit
    temperatures: np.ndarray  # (n,) float32
    created_at: np.ndarray  # (n,) float64 seconds since the Unix epoch
    prompt_tokens: np.ndarray  # (U,) int32
    prompt_offsets: np.ndarray  # (n + 1,) int64
    response_tokens: np.ndarray  # (T,) int32
    response_offsets: np.ndarray  # (n + 1,) int64
    span_num_tokens: np.ndarray  # (M,) int64
    span_epochs: np.ndarray  # (M,) int64
    span_versions: np.ndarray  # (M,) int64
    span_offsets: np.ndarray  # (n + 1,) int64
    sampler_logprobs: np.ndarray  # (L,) float32
    sampler_offsets: np.ndarray  # (n + 1,) int64: no entries = not recorded
    ref_logprobs: np.ndarray  # (n,) float32: nan if none
    ref_epochs: np.ndarray  # (n,) int64: -1 if none
    ref_versions: np.ndarray  # (n,) int64: -1 if none

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def scored(self) -> np.ndarray:
        """(n,) bool: rows with a reward."""
        return self.outcomes == SCORED

    def policies(self) -> tuple[np.ndarray, np.ndarray]:
        """Epochs and versions (n,) int64 of each row's oldest span, as `Trajectory.policy` has it."""
        if len(self) == 0:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        order = self.span_versions * _EPOCH_LIMIT + self.span_epochs  # below 1e16: no overflow
        oldest = np.minimum.reduceat(order, self.span_offsets[:-1])  # every row has a span
        return oldest % _EPOCH_LIMIT, oldest // _EPOCH_LIMIT

    def row(self, i: int) -> Trajectory:
        """Row `i` as a record: for inspection, not for speed."""
        if not 0 <= i < len(self):
            raise IndexError(f"row must be in 0..{len(self) - 1}, got {i}")
        spans = slice(self.span_offsets[i], self.span_offsets[i + 1])
        logprobs = self.sampler_logprobs[self.sampler_offsets[i] : self.sampler_offsets[i + 1]].tolist()
        has_ref = bool(self.ref_epochs[i] >= 0)
        return Trajectory(
            prompt_id=int(self.prompt_ids[i]),
            visit=int(self.visits[i]),
            visit_size=int(self.visit_sizes[i]),
            prompt_tokens=self.prompt_tokens[self.prompt_offsets[i] : self.prompt_offsets[i + 1]].tolist(),
            response_tokens=self.response_tokens[self.response_offsets[i] : self.response_offsets[i + 1]].tolist(),
            outcome=OUTCOMES[self.outcomes[i]],
            reward=float(self.rewards[i]) if self.outcomes[i] == SCORED else None,
            finish_reason=FinishReason.STOP if self.finish_stop[i] else FinishReason.LENGTH,
            spans=[
                Span(*map(int, span))
                for span in zip(
                    self.span_num_tokens[spans], self.span_epochs[spans], self.span_versions[spans], strict=True
                )
            ],
            temperature=float(self.temperatures[i]),
            created_at=float(self.created_at[i]),
            sampler_logprobs=logprobs or None,
            ref_logprob=float(self.ref_logprobs[i]) if has_ref else None,
            ref_policy=PolicyId(int(self.ref_epochs[i]), int(self.ref_versions[i])) if has_ref else None,
        )

    def columns(self) -> list[tuple[str, np.ndarray]]:
        """Every column with its name, in hashing order."""
        return [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "header"]


def from_rows(header: ShardHeader, rows: Sequence[Trajectory]) -> ShardBatch:
    """Columns of `rows`, unchecked. Raises: OverflowError if a number does not fit its column."""
    prompt_tokens, prompt_offsets = _flat([r.prompt_tokens for r in rows], np.int32)
    response_tokens, response_offsets = _flat([r.response_tokens for r in rows], np.int32)
    logprobs, logprob_offsets = _flat([r.sampler_logprobs or () for r in rows], np.float32)
    spans = np.array(list(chain.from_iterable(r.spans for r in rows)), np.int64).reshape(-1, 3)  # (M, 3)
    refs = np.array([r.ref_policy or (-1, -1) for r in rows], np.int64).reshape(-1, 2)  # (n, 2)
    return ShardBatch(
        header=header,
        prompt_ids=np.array([r.prompt_id for r in rows], np.int64),
        visits=np.array([r.visit for r in rows], np.int64),
        visit_sizes=np.array([r.visit_size for r in rows], np.int32),
        outcomes=np.array([_OUTCOME_CODES[r.outcome] for r in rows], np.uint8),
        rewards=_optional(r.reward for r in rows),
        finish_stop=np.array([r.finish_reason == FinishReason.STOP for r in rows], np.bool_),
        temperatures=np.array([r.temperature for r in rows], np.float32),
        created_at=np.array([r.created_at for r in rows], np.float64),
        prompt_tokens=prompt_tokens,
        prompt_offsets=prompt_offsets,
        response_tokens=response_tokens,
        response_offsets=response_offsets,
        span_num_tokens=np.ascontiguousarray(spans[:, 0]),
        span_epochs=np.ascontiguousarray(spans[:, 1]),
        span_versions=np.ascontiguousarray(spans[:, 2]),
        span_offsets=offsets([len(r.spans) for r in rows]),
        sampler_logprobs=logprobs,
        sampler_offsets=logprob_offsets,
        ref_logprobs=_optional(r.ref_logprob for r in rows),
        ref_epochs=np.ascontiguousarray(refs[:, 0]),
        ref_versions=np.ascontiguousarray(refs[:, 1]),
    )


def offsets(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """(n,) lengths -> (n + 1,) int64 offsets."""
    result = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=result[1:])
    return result


def fault(batch: ShardBatch) -> str | None:
    """What is wrong with the values, naming the first bad row; None if they can be trained on."""
    for check in (_row_fault, _token_fault, _span_fault, _reference_fault):
        found = check(batch)
        if found:
            return found
    return None


def _row_fault(b: ShardBatch) -> str | None:
    scored = b.scored
    return (
        _first(b.prompt_ids < 0, "prompt_id must be >= 0, got", b.prompt_ids)
        or _first(b.visits < 0, "visit must be >= 0, got", b.visits)
        or _first(b.visit_sizes < 1, "visit_size must be >= 1, got", b.visit_sizes)
        or _first(scored & ~np.isfinite(b.rewards), "a scored row needs a finite reward, got", b.rewards)
        or _first(~scored & ~np.isnan(b.rewards), "only a scored row may have a reward, got", b.rewards)
        or _first(~((b.temperatures >= 0) & (b.temperatures < np.inf)), "temperature must be >= 0, got", b.temperatures)
        or _first(~np.isfinite(b.created_at), "created_at must be finite, got", b.created_at)
    )


def _token_fault(b: ShardBatch) -> str | None:
    prompts, responses, logprobs = (np.diff(o) for o in (b.prompt_offsets, b.response_offsets, b.sampler_offsets))
    return (
        _first(prompts < 1, "a prompt needs at least one token, got", prompts)
        or _first(b.scored & (responses < 1), "a scored response needs at least one token, got", responses)
        or _first(b.prompt_tokens < 0, "prompt token must be >= 0, got", b.prompt_tokens, b.prompt_offsets)
        or _first(b.response_tokens < 0, "response token must be >= 0, got", b.response_tokens, b.response_offsets)
        or _first((logprobs != 0) & (logprobs != responses), "sampler_logprobs must be one a token, got", logprobs)
        or _first(
            ~np.isfinite(b.sampler_logprobs), "sampler_logprob not finite:", b.sampler_logprobs, b.sampler_offsets
        )
    )


def _span_fault(b: ShardBatch) -> str | None:
    counts, responses = np.diff(b.span_offsets), np.diff(b.response_offsets)
    if (found := _first(counts < 1, "a row needs at least one span, got", counts)) or len(b) == 0:
        return found
    tokens, epochs, versions = b.span_num_tokens, b.span_epochs, b.span_versions
    # Bounded before summing, so that huge values cannot wrap around to the right sum.
    empty = np.repeat(responses == 0, counts)  # a response without tokens names its policy by a span of 0 tokens
    bad = ((tokens < 1) & ~(empty & (tokens == 0))) | (tokens >= _INT32_LIMIT)
    return (
        _first(bad, "span num_tokens must be >= 1, got", tokens, b.span_offsets)
        or _first((epochs < 0) | (epochs >= _EPOCH_LIMIT), "span epoch out of range:", epochs, b.span_offsets)
        or _first((versions < 0) | (versions >= _VERSION_LIMIT), "span version out of range:", versions, b.span_offsets)
        or _first(
            np.add.reduceat(tokens, b.span_offsets[:-1]) != responses,
            "spans must cover the response exactly; its length is",
            responses,
        )
    )


def _reference_fault(b: ShardBatch) -> str | None:
    has = ~np.isnan(b.ref_logprobs)
    epochs, versions = b.ref_epochs, b.ref_versions
    named = (epochs >= 0) & (epochs < _EPOCH_LIMIT) & (versions >= 0) & (versions < _VERSION_LIMIT)
    unnamed = (epochs == -1) & (versions == -1)
    return _first(np.isinf(b.ref_logprobs), "ref_logprob must be finite, got", b.ref_logprobs) or _first(
        ~np.where(has, named, unnamed), "ref_logprob and ref_policy go together; ref epoch is", epochs
    )


def _first(bad: np.ndarray, text: str, values: np.ndarray, rows: np.ndarray | None = None) -> str | None:
    """`row i: text value` of the first bad entry; `rows` are the offsets that tell a flat entry's row."""
    if not bad.any():
        return None
    at = int(np.argmax(bad))
    row = at if rows is None else int(np.searchsorted(rows, at, side="right")) - 1
    return f"row {row}: {text} {values[at]}"


def _flat(lists: Sequence[Sequence[float]], dtype: type[np.generic]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenated values and their (n + 1,) offsets."""
    arrays = [np.asarray(values, dtype) for values in lists]
    flat = np.concatenate(arrays) if arrays else np.empty(0, dtype)
    return flat, offsets([len(a) for a in arrays])


def _optional(values: Iterable[float | None]) -> np.ndarray:
    return np.array([np.nan if v is None else v for v in values], np.float32)
