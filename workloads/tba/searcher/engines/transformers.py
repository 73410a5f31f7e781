"""Continuous batching over a transformers model (docs/decisions/0005-transformers-engine.md).

 submit ─► waiting ──join, when half of the capacity is free──► rows ──decode, one token a step──► responses
              ▲                                                   │ finished rows leave the cache:
              └ each distinct prompt is computed once             ▼ cost follows the rows alive

Rows are left-padded, so they share one (B, T) attention mask. B rows, T cached length, V vocabulary.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tba.contracts.errors import UserError
from tba.contracts.records import FinishReason, PolicyId, Span
from tba.models import build_model, eos_token_ids, load_weights
from tba.searcher.engines.engine import Request, Response, extend_spans
from tba.searcher.engines.kv_cache import RowCache
from tba.searcher.engines.sampling import sample, uniforms

if TYPE_CHECKING:
    from tba.snapshots import Snapshot

_ATTENTION = {"full_attention", "sliding_attention"}
_ADMIT = 0.5
"""Share of the capacity that must be free before waiting requests join: a join costs a forward pass and a copy."""
_STOP_TAIL_TOKENS = 8
"""Tokens decoded beyond a stop string's length: some tokens are no character of their own."""


@dataclass(slots=True)
class _Row:
    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Prompt and response tokens."""
        return len(self.request.prompt_tokens) + len(self.tokens)


@dataclass(slots=True)
class _Prefix:
    """A computed prompt that requests still wait for: row `index` of `cache`, where `mask` (T,) sees."""

    cache: RowCache
    index: int
    mask: torch.Tensor
    logits: torch.Tensor  # (V,) of the first response token


class TransformersEngine:
    """Any causal model of transformers with full or sliding attention, on CPU or one GPU.

    `max_rows` null: as many as fit `kv_cache_bytes` at `max_model_len`, 16 to 512.
    """

    needs_weights = True
    takes_adapters = False

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_model_len: int,
        max_rows: int | None = None,
        kv_cache_bytes: int = 2**30,
        trust_remote_code: bool = False,
    ) -> None:
        self._dtype, self._device = dtype, torch.device(device)
        self._max_model_len = max_model_len
        self._max_rows, self._kv_cache_bytes = max_rows, kv_cache_bytes
        self._trust_remote_code = trust_remote_code
        self._model: Any = None
        self._tokenizer: Any = None
        self._eos: set[int] = set()
        self._num_layers = 0
        self._policy = PolicyId(0, 0)
        self._capacity = 0
        self._waiting: deque[Request] = deque()
        self._prefixes: dict[tuple[int, ...], _Prefix] = {}
        self._clear()

    def _clear(self) -> None:
        self._rows: list[_Row | None] = []  # None: finished, still in the cache
        self._cache: RowCache | None = None
        self._mask = torch.zeros((0, 0), dtype=torch.long, device=self._device)  # (B, T)

    @property
    def capacity(self) -> int:
        """Rows it decodes together."""
        return self._capacity

    @property
    def in_flight(self) -> int:
        """Waiting and decoding."""
        return len(self._waiting) + self._alive

    @property
    def _alive(self) -> int:
        return sum(row is not None for row in self._rows)

    def load(self, snapshot: "Snapshot") -> None:
        """Build the model from the first snapshot's assets, then fill it; cached keys of old weights stay in use."""
        model, tokenizer = self._model, self._tokenizer
        if model is None:
            model, tokenizer = build_model(
                snapshot.assets, dtype=self._dtype, device=self._device, trust_remote_code=self._trust_remote_code
            )
        load_weights(model, snapshot.tensors)
        if self._model is None:
            self._adopt(model, tokenizer)
        self._policy = snapshot.manifest.policy
        self._prefixes.clear()  # new requests start from the new weights

    def _adopt(self, model: Any, tokenizer: Any) -> None:
        text = model.config.get_text_config(decoder=True)
        kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
        if kinds - _ATTENTION:
            raise UserError(
                f"engine transformers cannot cache layers of type {sorted(kinds - _ATTENTION)}: "
                "use engine vllm or a model with full attention"
            )
        self._model, self._tokenizer = model, tokenizer
        self._eos = eos_token_ids(tokenizer, model.config)
        self._num_layers = text.num_hidden_layers
        self._capacity = self._max_rows or self._rows_that_fit(text)

    def _rows_that_fit(self, text: Any) -> int:
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        token_bytes = 2 * self._num_layers * heads * size * self._dtype.itemsize
        return max(16, min(512, self._kv_cache_bytes // (token_bytes * self._max_model_len)))

    def submit(self, request: Request) -> None:
        """Queue a request."""
        if self._model is None:
            raise RuntimeError("load a snapshot before submitting requests")
        self._waiting.append(request)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def sleep(self, *, free_memory: bool) -> None:
        """Between two steps nothing runs. `free_memory`: model and cached keys wait in the host's memory."""
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)
            if free_memory:
                self._move("cpu")
                torch.cuda.empty_cache()

    def wake(self) -> None:
        """Model and cached keys return."""
        self._move(self._device)

    def _move(self, device: torch.device | str) -> None:
        if self._model is None:
            return
        self._model.to(device)
        self._mask = self._mask.to(device)
        for cache in {id(c): c for c in (self._cache, *(p.cache for p in self._prefixes.values())) if c}.values():
            cache.move(device)
        for prefix in self._prefixes.values():
            prefix.mask, prefix.logits = prefix.mask.to(device), prefix.logits.to(device)

    def abort(self) -> None:
        """Forget all requests."""
        self._waiting.clear()
        self._prefixes.clear()
        self._clear()

    def close(self) -> None:
        """Free model and cache."""
        self.abort()
        self._model = None

    @torch.inference_mode()
    def step(self) -> list[Response]:
        """A token for every row; or, if enough rows are free, the first token of new ones."""
        alive = self._alive
        free = self._capacity - alive
        # Joining copies the cache: not for every single row that ends.
        if self._waiting and (alive == 0 or free >= max(1, int(self._capacity * _ADMIT))):
            return self._admit([self._waiting.popleft() for _ in range(min(free, len(self._waiting)))])
        return self._decode() if alive else []

    def _admit(self, requests: list[Request]) -> list[Response]:
        responses = [self._refusal(r) for r in requests if not self._fits(r)]
        requests = [r for r in requests if self._fits(r)]
        if not requests:
            return responses
        # The S requests of a visit share their prompt; those that wait for a free row will find it computed.
        prompts = list(dict.fromkeys(tuple(r.prompt_tokens) for r in requests))
        self._prefill([p for p in prompts if p not in self._prefixes])
        prefixes = [self._prefixes[tuple(r.prompt_tokens)] for r in requests]
        rows: list[_Row | None] = [_Row(r) for r in requests]
        responses += self._advance(rows, torch.stack([p.logits for p in prefixes]))
        self._join(rows, prefixes)
        wanted = {tuple(r.prompt_tokens) for r in self._waiting}
        self._prefixes = {p: prefix for p, prefix in self._prefixes.items() if p in wanted}
        return responses

    def _prefill(self, prompts: list[tuple[int, ...]]) -> None:
        if not prompts:
            return
        length = max(map(len, prompts))
        ids = torch.zeros((len(prompts), length), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i, length - len(prompt) :] = torch.tensor(prompt)
            mask[i, length - len(prompt) :] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        cache = RowCache(self._num_layers)
        logits = self._forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache)
        for i, prompt in enumerate(prompts):
            self._prefixes[prompt] = _Prefix(cache, i, mask[i], logits[i])

    def _decode(self) -> list[Response]:
        ids = torch.tensor([[row.tokens[-1] if row else 0] for row in self._rows], device=self._device)  # (B, 1)
        positions = torch.tensor([[row.length - 1 if row else 0] for row in self._rows], device=self._device)
        self._mask = torch.cat([self._mask, self._mask.new_ones((len(self._rows), 1))], dim=1)
        responses = self._advance(self._rows, self._forward(ids, self._mask, positions, self._cache))
        # Taking rows out copies the cache, so it waits until an eighth of them has ended.
        if responses and self._rows.count(None) * 8 >= len(self._rows):
            self._join([], [])
        return responses

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]  # (B, V)

    def _advance(self, rows: list[_Row | None], logits: torch.Tensor) -> list[Response]:
        """Sample a token for every living row; replaces rows that end by None and returns their responses."""
        alive = [i for i, row in enumerate(rows) if row is not None]
        requests = [row.request for row in rows if row is not None]
        counts = np.array([len(row.tokens) for row in rows if row is not None], np.uint64)
        noise = uniforms(np.array([r.seed for r in requests], np.uint64), counts)
        if len(alive) < len(rows):
            logits = logits[torch.tensor(alive, device=logits.device)]
        tokens, logprobs = sample(
            logits,
            torch.tensor([r.temperature for r in requests], dtype=torch.float32, device=logits.device),
            torch.tensor([r.greedy for r in requests], device=logits.device),
            torch.from_numpy(noise).to(logits.device),
        )
        ended = []
        for i, token, logprob in zip(alive, tokens.tolist(), logprobs.tolist(), strict=True):
            row = rows[i]
            assert row is not None
            row.tokens.append(token)
            row.logprobs.append(logprob)
            extend_spans(row.spans, self._policy)
            reason = self._finish_reason(row)
            if reason is not None:
                ended.append(Response(row.request.id, row.tokens, reason, row.spans, row.logprobs))
                rows[i] = None
        return ended

    def _finish_reason(self, row: _Row) -> FinishReason | None:
        if row.tokens[-1] in self._eos or self._ends_with_stop(row):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(row.tokens) >= row.request.max_tokens else None

    def _ends_with_stop(self, row: _Row) -> bool:
        stop = row.request.stop
        if not stop:
            return False
        tail = self.decode(row.tokens[-(max(map(len, stop)) + _STOP_TAIL_TOKENS) :])
        return any(s in tail for s in stop)

    def _join(self, rows: list[_Row | None], prefixes: list[_Prefix]) -> None:
        """Living rows of the batch, and living new `rows` that begin with `prefixes`, become the batch."""
        parts: list[tuple[RowCache, torch.Tensor, torch.Tensor]] = []  # cache, its rows, what they see (n, T)
        keep = [i for i, row in enumerate(self._rows) if row is not None]
        if keep and self._cache is not None:
            index = torch.tensor(keep, device=self._device)
            parts.append((self._cache, index, self._mask[index]))
        living = [self._rows[i] for i in keep]
        started = [(row, prefix) for row, prefix in zip(rows, prefixes, strict=True) if row is not None]
        for cache in {id(p.cache): p.cache for _, p in started}.values():
            own = [(row, p) for row, p in started if p.cache is cache]
            index = torch.tensor([p.index for _, p in own], device=self._device)
            parts.append((cache, index, torch.stack([p.mask for _, p in own])))
            living += [row for row, _ in own]
        self._clear()
        if not parts:
            return
        # Columns that no row of a part sees any more are left out.
        skips = [int(sight.any(dim=0).to(torch.uint8).argmax()) for _, _, sight in parts]
        trimmed = [sight[:, skip:] for (_, _, sight), skip in zip(parts, skips, strict=True)]
        length = max(sight.shape[1] for sight in trimmed)
        self._mask = torch.cat([torch.nn.functional.pad(s, (length - s.shape[1], 0)) for s in trimmed])
        self._cache = RowCache.join([(c, i, skip) for (c, i, _), skip in zip(parts, skips, strict=True)])
        self._rows = living

    def _fits(self, request: Request) -> bool:
        length = len(request.prompt_tokens)
        return length > 0 and request.max_tokens > 0 and length + request.max_tokens <= self._max_model_len

    def _refusal(self, request: Request) -> Response:
        text = (
            f"{len(request.prompt_tokens)} prompt tokens and {request.max_tokens} for the response "
            f"do not fit maxModelLen {self._max_model_len}"
        )
        empty = [Span(0, self._policy.epoch, self._policy.version)]
        return Response(request.id, [], FinishReason.LENGTH, empty, None, error=text)
