"""Token log-probabilities of responses under a model: the one kernel for policy and reference.

Letters: B rows, L padded length, N response tokens of all rows, D hidden size, V vocabulary.
Logits of shape (N, V) never exist at once: they are made for a chunk of tokens and made again in the backward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tba.contracts.errors import UserError

LOGIT_CHUNK_BYTES = 64 * 1024**2
"""float32 logits alive at once."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Right-padded prompt+response rows. Causal attention makes the padding invisible to real tokens: no mask."""

    input_ids: Tensor  # (B, L) int64
    row: Tensor  # (N,) int64: row of each response token
    position: Tensor  # (N,) int64: position whose hidden state predicts it
    target: Tensor  # (N,) int64: its id

    @property
    def num_rows(self) -> int:
        """B."""
        return self.input_ids.shape[0]


def pad_rows(prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], device: torch.device | str) -> Rows:
    """Pad (prompt, response) pairs on the right with id 0, which no real token attends to.

    Raises: ValueError if a prompt or a response is empty.
    """
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    if any(len(p) == 0 for p in prompts) or any(len(r) == 0 for r in responses):
        raise ValueError("prompts and responses must hold at least one token each")
    input_ids = np.zeros((len(lengths), max(lengths)), dtype=np.int64)  # (B, L)
    row, position = [], []
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        input_ids[i, : len(prompt)] = prompt
        input_ids[i, len(prompt) : lengths[i]] = response
        row.append(np.full(len(response), i, dtype=np.int64))
        position.append(np.arange(len(prompt) - 1, lengths[i] - 1, dtype=np.int64))
    flat_row, flat_position = np.concatenate(row), np.concatenate(position)  # (N,)
    target = input_ids[flat_row, flat_position + 1]  # (N,)
    return Rows(*(torch.from_numpy(a).to(device) for a in (input_ids, flat_row, flat_position, target)))


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
        self._final = _final_transform(model.config)
        self._verify()

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return next(self.model.parameters()).device

    def token_logprobs(self, rows: Rows) -> Tensor:
        """log softmax(logits / T) of each response token: (N,) float32. Differentiable when gradients are on."""
        hidden = self._hidden(rows.input_ids)[rows.row, rows.position]  # (N, D)
        vocabulary = self._head.weight.shape[0]
        chunk = max(1, LOGIT_CHUNK_BYTES // (4 * int(vocabulary)))
        parts = []
        for start in range(0, hidden.shape[0], chunk):
            piece, target = hidden[start : start + chunk], rows.target[start : start + chunk]
            if torch.is_grad_enabled():
                parts.append(checkpoint(self._logprobs, piece, target, use_reentrant=False))
            else:
                parts.append(self._logprobs(piece, target))
        return torch.cat(parts)

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
        logits = self._logits(hidden) / self.temperature
        return logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(dim=1)

    @torch.no_grad()
    def _verify(self) -> None:
        size = int(self._head.weight.shape[0])
        probe = torch.arange(1, 9, device=self.device)[None] % size
        with self._autocast():
            expected = self.model(input_ids=probe, use_cache=False).logits.float()
        got = self._logits(self._hidden(probe)[0])[None]
        if not torch.allclose(got, expected, atol=1e-3, rtol=1e-3):
            raise UserError(
                f"model {type(self.model).__name__} transforms its logits in a way this release does not know "
                f"(max difference {(got - expected).abs().max().item():.3g}): use a model whose logits are its "
                "output embedding of the last hidden state"
            )


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
