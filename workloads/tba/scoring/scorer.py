"""A causal language model as a source of log-probabilities; which layout and kernels serve it is decided once.

The choice is tested on a probe: rows laid out together must score as each does alone in the model's own forward pass.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tba.contracts.errors import UserError
from tba.scoring.attention import (
    NAME,
    Unpackable,
    attention_of,
    flash_reason,
    set_attention,
    use_packed_attention,
)
from tba.scoring.layout import Block, Layout, Rows, pack_rows
from tba.scoring.logprobs import Kernels, Transform, compiled_kernels, token_logprobs

PROBE_PROMPTS = (5, 5, 3, 1)
PROBE_RESPONSES = (4, 2, 5, 1)
"""Tokens of the probe's rows; the first two share their prompt."""
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""Of a log-probability, as a share of the spread of logits."""
_FLOOR = 1e-3


class Scorer:
    """Computes log-probabilities with one causal language model, in the dtype of its parameters.

    Raises: UserError if the model's logits are not a known function of its last hidden state.
    """

    def __init__(self, model: nn.Module, *, temperature: float, layout: Layout | None = None) -> None:
        """`layout`: null finds and tries the best; one given is taken as tried, with another scorer of the model."""
        self.model = model
        self.temperature = temperature
        self._decoder: nn.Module = model.get_decoder()  # type: ignore[operator]
        self._head: Any = model.get_output_embeddings()  # type: ignore[operator]
        self._transform = _final_transform(model.config, temperature)
        self._kernels = Kernels()
        self.refused: dict[Layout, str] = {}
        """Layouts that do not serve this model here, and why."""
        self.layout: Layout = layout or self._choose()
        if layout in ("varlen", "buckets"):
            use_packed_attention(model)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self._head.weight.dtype

    @property
    def shares_prompts(self) -> bool:
        """Whether rows of one prompt compute it once."""
        return self.layout != "padded"

    def compile_head(self) -> None:
        """Compile the passes over logits."""
        self._kernels = compiled_kernels()

    def pack(
        self,
        prompts: Sequence[np.ndarray],
        responses: Sequence[np.ndarray],
        *,
        device: torch.device | None = None,
    ) -> Rows:
        """Rows as this scorer takes them. Raises: ValueError if a prompt or a response is empty."""
        return pack_rows(prompts, responses, device or self.device, self.layout)

    def token_logprobs(self, rows: Rows) -> Tensor:
        """log softmax(logits / T) of each response token: (n,) float32. Differentiable when gradients are on."""
        hidden = [self._hidden(block).flatten(0, 1) for block in rows.blocks]
        return token_logprobs(
            hidden[0] if len(hidden) == 1 else torch.cat(hidden),  # (N, D)
            self._head.weight,
            getattr(self._head, "bias", None),
            rows.source,
            rows.target,
            transform=self._transform,
            kernels=self._kernels,
        )

    def sequence_logprobs(self, rows: Rows) -> Tensor:
        """Sums over the response tokens of each row: (B,) float32."""
        tokens = self.token_logprobs(rows)
        # A table instead of index_add: on a GPU that adds in any order, and a log-ratio of 0 must be 0.
        table = torch.zeros((rows.num_rows, rows.longest_response), dtype=tokens.dtype, device=tokens.device)
        return table.index_put((rows.row, rows.within), tokens).sum(1)

    def _hidden(self, block: Block) -> Tensor:  # (b, l) -> (b, l, D)
        further: dict[str, Any] = {}
        if block.packing is not None:
            further = {"position_ids": block.position_ids, "packing": block.packing}
        return self._decoder(input_ids=block.input_ids, use_cache=False, **further).last_hidden_state

    # -- the choice

    def _choose(self) -> Layout:
        original = attention_of(self.model)
        for layout in self._candidates():
            try:
                difference, allowed = self._difference(layout, original)
            except (Unpackable, RuntimeError, TypeError) as e:  # of models and kernels that do not know the layout
                if layout == "padded" or isinstance(e, torch.OutOfMemoryError):
                    raise
                self.refused[layout] = str(e)
                continue
            if difference <= allowed:
                return layout
            self.refused[layout] = f"scores differ from the model's own by {difference:.3g}"
        raise UserError(
            f"model {type(self.model).__name__} transforms its logits in a way this release does not know "
            f"({self.refused['padded']}): use a model whose logits are its output embedding of the last hidden state"
        )

    def _candidates(self) -> list[Layout]:
        text: Any = self.model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
        heads = getattr(text, "num_attention_heads", None)
        size = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
        reason = flash_reason(self.device, self.dtype, size)
        if reason is not None:
            self.refused["varlen"] = reason
            return ["buckets", "padded"]
        return ["varlen", "buckets", "padded"]

    def _difference(self, layout: Layout, original: str) -> tuple[float, float]:
        """(greatest difference of a probe's log-probability from the model's own, what rounding may cause).

        A model has two of its own: by the attention it came with, and by plain matrix products. In half precision they
        differ by whole nats for some models, and a kernel rounds like one of them.
        """
        prompts, responses = _probe(self._head.weight.shape[0])
        if layout != "padded":
            use_packed_attention(self.model)  # refuses before anything runs
        expected, spread, noise = [], 0.0, 0.0
        own = [name for name in (original, "eager") if name != NAME]  # another scorer may have packed the model before
        for name in own[:1] if layout == "padded" else dict.fromkeys(own):
            set_attention(self.model, name)
            logprobs, spread = self._one_by_one(prompts, responses)
            expected.append(logprobs)
            noise = (logprobs - expected[0]).abs().max().item()
        if layout != "padded":
            use_packed_attention(self.model)
        got = self.token_logprobs(pack_rows(prompts, responses, self.device, layout))
        if got.requires_grad:  # a kernel may lack its backward pass
            embedding: Any = self.model.get_input_embeddings()  # type: ignore[operator]
            torch.autograd.grad(got.sum(), embedding.weight, allow_unused=True)
        difference = min((got.detach() - logprobs).abs().max().item() for logprobs in expected)
        return difference, _FLOOR + max(_TOLERANCE[self.dtype] * spread, noise)

    @torch.no_grad()
    def _one_by_one(self, prompts: list[np.ndarray], responses: list[np.ndarray]) -> tuple[Tensor, float]:
        """The model's own log-probabilities, (n,) float32, and the spread of its logits."""
        logprobs, spread = [], 0.0
        for prompt, response in zip(prompts, responses, strict=True):
            ids = torch.from_numpy(np.concatenate([prompt, response]))[None].to(self.device)
            logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            spread = max(spread, (logits.amax(-1) - logits.amin(-1)).max().item())
            logprobs.append((logits / self.temperature).log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0])
        return torch.cat(logprobs), spread / self.temperature


def _probe(vocabulary: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Rows of which some share a prompt, of tokens that any vocabulary has."""
    prompts = [(np.arange(size, dtype=np.int64) * 7 + size) % vocabulary for size in PROBE_PROMPTS]
    responses = [(np.arange(size, dtype=np.int64) * 5 + i) % vocabulary for i, size in enumerate(PROBE_RESPONSES)]
    return prompts, responses


def _final_transform(config: Any, temperature: float) -> Transform:
    """What some families do to logits after the output embedding (Cohere, Granite, Gemma)."""
    multiply = getattr(config, "logit_scale", None) or 1.0
    divide = getattr(config, "logits_scaling", None) or 1.0
    return Transform(multiply / divide, getattr(config, "final_logit_softcapping", None), temperature)
