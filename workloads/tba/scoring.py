"""Token log-probabilities of responses under a model: the one kernel for policy and reference.

Letters: B rows, N response tokens of all rows, D hidden size, V vocabulary; a block has b rows padded to l, and n
response tokens. Logits of shape (N, V) never exist at once if they are large: they are made for a chunk of tokens and
made again in the backward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tba.contracts.errors import UserError

LOGIT_CHUNK_BYTES = 64 * 1024**2
"""float32 logits alive at once."""
BLOCK_PADDING_TOKENS = 256
"""Padding that costs about as much as one more forward pass over a small block."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of similar length, padded on the right. Causal attention hides the padding from real tokens: no mask."""

    input_ids: Tensor  # (b, l) int64
    row: Tensor  # (n,) int64: row of the block that each response token is in
    position: Tensor  # (n,) int64: position whose hidden state predicts it


@dataclass(frozen=True, slots=True)
class Rows:
    """Prompt+response rows, longest first in blocks, and their N response tokens in the order of the blocks."""

    blocks: tuple[Block, ...]
    row: Tensor  # (N,) int64: row of each response token, as the rows were given
    target: Tensor  # (N,) int64: its id
    num_rows: int  # B


def pad_rows(prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], device: torch.device | str) -> Rows:
    """Lay out (prompt, response) pairs, padded with id 0, which no real token attends to.

    Raises: ValueError if a prompt or a response is empty.
    """
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    if any(len(p) == 0 for p in prompts) or any(len(r) == 0 for r in responses):
        raise ValueError("prompts and responses must hold at least one token each")
    blocks, order = [], []
    for rows in split_by_length(lengths):
        order += rows
        input_ids = np.zeros((len(rows), lengths[rows[0]]), dtype=np.int64)  # (b, l)
        for i, row in enumerate(rows):
            input_ids[i, : lengths[row]] = np.concatenate([prompts[row], responses[row]])
        starts = np.array([len(prompts[row]) for row in rows])  # (b,)
        local, position = _response_positions(starts, np.array([len(responses[row]) for row in rows]))
        blocks.append(Block(*(torch.from_numpy(a).to(device) for a in (input_ids, local, position))))
    flat_row = np.repeat(order, [len(responses[row]) for row in order])  # (N,)
    target = np.concatenate([responses[row] for row in order]).astype(np.int64)  # (N,)
    return Rows(tuple(blocks), torch.from_numpy(flat_row).to(device), torch.from_numpy(target).to(device), len(lengths))


def split_by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Row numbers, longest first, in blocks whose padding stays below `BLOCK_PADDING_TOKENS` + 1/16 of their tokens.

    The share keeps the number of blocks small, hence each large, when there are many long rows.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    block: list[int] = []
    tokens = padding = 0
    for row in order:
        more = lengths[block[0]] - lengths[row] if block else 0
        if padding + more > BLOCK_PADDING_TOKENS + tokens // 16:
            yield block
            block, tokens, padding, more = [], 0, 0, 0
        block.append(row)
        tokens, padding = tokens + lengths[row], padding + more
    if block:
        yield block


def _response_positions(starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n,) int64 each: row of every response token, and the position before it."""
    rows = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, starts[rows] - 1 + within


class Scorer:
    """Computes log-probabilities of one causal language model.

    Raises: UserError if the model's logits are not a known function of its last hidden state.
    """

    def __init__(self, model: nn.Module, *, temperature: float, compute_dtype: torch.dtype) -> None:
        self.model = model
        self.temperature = temperature
        self.compute_dtype = compute_dtype
        self._decoder: nn.Module = model.get_decoder()  # type: ignore[operator]
        self._head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        self._vocabulary = int(self._head.weight.shape[0])  # type: ignore[index]
        self._final = _final_transform(model.config)
        self._verify()

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return next(self.model.parameters()).device

    def token_logprobs(self, rows: Rows) -> Tensor:
        """log softmax(logits / T) of each response token: (N,) float32. Differentiable when gradients are on."""
        hidden = torch.cat([self._hidden(b.input_ids)[b.row, b.position] for b in rows.blocks])  # (N, D)
        chunk = max(1, LOGIT_CHUNK_BYTES // (4 * self._vocabulary))
        pieces = list(zip(hidden.split(chunk), rows.target.split(chunk), strict=True))
        if not torch.is_grad_enabled() or len(pieces) == 1:
            return torch.cat([self._logprobs(*piece) for piece in pieces])
        return torch.cat([checkpoint(self._logprobs, *piece, use_reentrant=False) for piece in pieces])

    def sequence_logprobs(self, rows: Rows) -> Tensor:
        """Sums over the response tokens of each row: (B,) float32."""
        tokens = self.token_logprobs(rows)
        return torch.zeros(rows.num_rows, device=tokens.device).index_add(0, rows.row, tokens)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16)

    def _hidden(self, input_ids: Tensor) -> Tensor:  # (B, L) -> (B, L, D)
        with self._autocast():
            return self._decoder(input_ids=input_ids, use_cache=False).last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:  # (n, D) -> (n, V) float32
        with self._autocast():
            logits = self._head(hidden)
        return self._final(logits.float())

    def _logprobs(self, hidden: Tensor, target: Tensor) -> Tensor:  # (n, D), (n,) -> (n,)
        logits = self._logits(hidden)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        return -cross_entropy(logits, target, reduction="none")

    @torch.no_grad()
    def _verify(self) -> None:
        # In float32 whatever the run computes in: a model that caps its logits in bfloat16 differs by its rounding.
        compute_dtype, self.compute_dtype = self.compute_dtype, torch.float32
        probe = torch.arange(1, 9, device=self.device)[None] % self._vocabulary
        with self._autocast():
            expected = self.model(input_ids=probe, use_cache=False).logits.float()
        got = self._logits(self._hidden(probe)[0])[None]
        if not torch.allclose(got, expected, atol=1e-3, rtol=1e-3):
            raise UserError(
                f"model {type(self.model).__name__} transforms its logits in a way this release does not know "
                f"(max difference {(got - expected).abs().max().item():.3g}): use a model whose logits are its "
                "output embedding of the last hidden state"
            )
        self.compute_dtype = compute_dtype


def _final_transform(config: object) -> Callable[[Tensor], Tensor]:
    """What some families do to logits after the output embedding (Cohere, Granite, Gemma)."""
    multiply = getattr(config, "logit_scale", None) or 1.0
    divide = getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)

    def transform(logits: Tensor) -> Tensor:
        if multiply != 1.0 or divide != 1.0:
            logits = logits * (multiply / divide)
        return torch.tanh(logits / cap) * cap if cap else logits

    return transform
