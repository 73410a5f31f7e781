"""What tests of every engine share: weights, requests, and the probabilities that transformers gives to responses."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from tba.contracts.records import PolicyId
from tba.lora import merged
from tba.models import build_model, load_weights
from tba.searcher.engines.engine import Engine, Request, Response

PROMPTS = [[0, 7, 10, 4, 5, 11], [1, 2, 3], [9, 9, 10, 9, 9, 10, 1, 1, 11]]
MAX_TOKENS = 32


@dataclass
class Manifest:
    """What an engine reads of a SnapshotManifest."""

    policy: PolicyId
    base: str | None = None
    scale: float | None = None


@dataclass
class Weights:
    """What an engine reads of a Snapshot."""

    manifest: Manifest
    tensors: dict[str, Tensor]
    assets: dict[str, bytes] = field(default_factory=dict)
    key: str = "weights/manifest.json"
    adapter: dict[str, Tensor] | None = None

    def merged(self) -> "Weights":
        if self.adapter is None:
            return self
        tensors = merged(self.tensors, self.adapter, scale=self.manifest.scale or 0.0)
        return Weights(self.manifest, tensors, self.assets, self.key)


def request(
    i: int, *, prompt=None, max_tokens=MAX_TOKENS, greedy=False, seed=None, stop=(), temperature=1.0
) -> Request:
    """Of one of `PROMPTS` in turn and a seed of its own, unless told."""
    tokens = PROMPTS[i % len(PROMPTS)] if prompt is None else prompt
    return Request(i, tokens, max_tokens, temperature, greedy, 2**62 + i if seed is None else seed, stop)


def run(engine: Engine, requests: Iterable[Request] = ()) -> dict[int, Response]:
    """Submit and step until nothing is in flight; responses by request."""
    for each in requests:
        engine.submit(each)
    done: dict[int, Response] = {}
    while engine.in_flight:
        done |= {response.id: response for response in engine.step()}
    return done


def model_of(weights: Weights) -> nn.Module:
    """The model of transformers with these weights, float32, without an adapter."""
    model, _ = build_model(weights.assets, dtype=torch.float32, device="cpu")
    load_weights(model, weights.tensors)
    return model


@torch.no_grad()
def response_logprobs(
    parts: Sequence[tuple[nn.Module, int]], prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """Of a response whose tokens were sampled by each part's model in turn, over the keys of those before: (n,)."""
    cache, fed, made, found = DynamicCache(), 0, 0, []
    ids = [*prompt, *tokens]
    for model, count in parts:
        end = len(prompt) + made + count - 1  # the last token of a part is first seen by the next model
        logits = model(torch.tensor([ids[fed:end]]), past_key_values=cache).logits[0, -count:]
        wanted = torch.tensor(tokens[made : made + count])
        found.append(torch.log_softmax(logits / temperature, -1).gather(1, wanted[:, None])[:, 0])
        fed, made = end, made + count
    return torch.cat(found)


def full_logprobs(weights: Weights, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
    """The same of a response that these weights alone sampled."""
    return response_logprobs([(model_of(weights), len(tokens))], prompt, tokens, temperature)
