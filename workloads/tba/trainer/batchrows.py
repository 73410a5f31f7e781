"""What a gradient needs of a batch's rows: read from the buffer, or from arrays that rank 0 sent to another rank.

P prompts (groups) a batch, K responses a group; n distinct rows, m distinct prompts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Groups(Protocol):
    """Which rows make the groups of a batch; a `sampling.BatchPlan` is one."""

    @property
    def rows(self) -> np.ndarray:
        """(P, K) int64."""
        ...

    @property
    def weights(self) -> np.ndarray:
        """(P, K) float32; 0 = empty slot."""
        ...

    @property
    def prompt_ids(self) -> np.ndarray:
        """(P,) int64."""
        ...


class RowSource(Protocol):
    """Rows by id; a `buffer.ReplayBuffer` is one."""

    def tokens(self, row: int) -> np.ndarray:
        """Of the response."""
        ...

    def prompt_tokens(self, prompt_id: int) -> np.ndarray:
        """Of a prompt."""
        ...

    def prompt_ids(self, rows: np.ndarray) -> np.ndarray:
        """Whose responses they are."""
        ...

    def num_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Response lengths."""
        ...

    def rewards(self, rows: np.ndarray) -> np.ndarray:
        """float32."""
        ...

    def ref_logprobs(self, rows: np.ndarray) -> np.ndarray:
        """float32; NaN where not scored."""
        ...

    def set_ref_logprobs(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Keep them."""
        ...

    def mu_logprobs(self, rows: np.ndarray) -> np.ndarray:
        """float32; NaN where no sampler told it, before a row's first use."""
        ...

    def set_mu_logprobs(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Keep them."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class BatchGroups:
    """The groups of a batch whose rows are numbered from 0."""

    rows: np.ndarray  # (P, K) int64
    weights: np.ndarray  # (P, K) float32
    prompt_ids: np.ndarray  # (P,) int64


class BatchRows:
    """The rows of one batch after another, as arrays. What is set is forgotten: rank 0 keeps it in its buffer."""

    def __init__(self) -> None:
        self._arrays: Mapping[str, np.ndarray] = {}
        self._lengths = np.zeros(0, np.int64)  # (n,)
        self._place: dict[int, int] = {}

    def take(self, arrays: Mapping[str, np.ndarray]) -> BatchGroups:
        """Hold those of the next batch, `arrays` of `pack_batch`; returns its groups."""
        self._arrays = arrays
        self._lengths = np.diff(arrays["tokens_offsets"])
        self._place = {prompt: i for i, prompt in enumerate(arrays["known_prompts"].tolist())}
        return BatchGroups(arrays["rows"], arrays["weights"], arrays["prompts"])

    def tokens(self, row: int) -> np.ndarray:
        """Of the response."""
        return self._cut("tokens", row)

    def prompt_tokens(self, prompt_id: int) -> np.ndarray:
        """Of a prompt of the batch."""
        return self._cut("prompt_tokens", self._place[prompt_id])

    def prompt_ids(self, rows: np.ndarray) -> np.ndarray:
        """Whose responses they are."""
        return self._arrays["prompt_of"][rows]

    def num_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Response lengths."""
        return self._lengths[rows]

    def rewards(self, rows: np.ndarray) -> np.ndarray:
        """float32."""
        return self._arrays["rewards"][rows]

    def ref_logprobs(self, rows: np.ndarray) -> np.ndarray:
        """float32; NaN where not scored."""
        return self._arrays["ref_logprobs"][rows]

    def set_ref_logprobs(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Nothing: rank 0 does it."""

    def mu_logprobs(self, rows: np.ndarray) -> np.ndarray:
        """float32; NaN where no sampler told it, before a row's first use."""
        return self._arrays["mu_logprobs"][rows]

    def set_mu_logprobs(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Nothing: rank 0 does it."""

    def _cut(self, name: str, index: int) -> np.ndarray:
        offsets = self._arrays[f"{name}_offsets"]
        return self._arrays[name][offsets[index] : offsets[index + 1]]


def pack_batch(source: RowSource, groups: Groups) -> dict[str, np.ndarray]:
    """A batch's rows as arrays; row ids become 0 ... n - 1 in the same order, prompt ids stay."""
    known, inverse = np.unique(groups.rows, return_inverse=True)
    prompts = np.unique(groups.prompt_ids)
    arrays = {
        "rows": inverse.reshape(groups.rows.shape).astype(np.int64),
        "weights": groups.weights,
        "prompts": groups.prompt_ids,
        "known_prompts": prompts,
        "prompt_of": source.prompt_ids(known),
        "rewards": source.rewards(known),
        "ref_logprobs": source.ref_logprobs(known),
        "mu_logprobs": source.mu_logprobs(known),
    }
    arrays |= _joined("tokens", [source.tokens(row) for row in known.tolist()])
    return arrays | _joined("prompt_tokens", [source.prompt_tokens(p) for p in prompts.tolist()])


def _joined(name: str, parts: list[np.ndarray]) -> dict[str, np.ndarray]:
    offsets = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
    return {name: np.concatenate(parts), f"{name}_offsets": offsets}
