"""Scores an engine's weights on held-out prompts, sampled as in training. Never on a run's clock."""

from collections.abc import Sequence
from typing import Protocol

from tba.contracts.config import RunConfig
from tba.prompts import PromptSet
from tba.rewards import RewardFunction
from tba.searcher.engines import Request, Response
from tba.searcher.work import make_request, request_seed


class Generates(Protocol):
    """Of an engine, what asking and being answered takes."""

    @property
    def capacity(self) -> int: ...  # noqa: D102 (as Engine has it)

    @property
    def in_flight(self) -> int: ...  # noqa: D102

    def submit(self, request: Request) -> None: ...  # noqa: D102

    def step(self) -> list[Response]: ...  # noqa: D102

    def decode(self, tokens: Sequence[int]) -> str: ...  # noqa: D102


def score(
    engine: Generates, prompts: PromptSet, reward: RewardFunction, config: RunConfig, *, first: int = 0, every: int = 1
) -> tuple[float, int]:
    """(summed reward, responses): one response to each prompt `first`, `first + every`, ...; the same seeds always."""
    sampling = config.task.sampling
    chosen = range(first, len(prompts), every)
    total, waiting = 0.0, list(chosen)
    while waiting or engine.in_flight:
        while waiting and engine.in_flight < engine.capacity:
            prompt = waiting.pop()
            engine.submit(
                make_request(
                    prompt,
                    prompts.prompt_tokens(prompt).tolist(),
                    max_tokens=sampling.max_tokens,
                    max_model_len=config.model.max_model_len,
                    temperature=sampling.temperature,
                    greedy=False,
                    seed=request_seed(0, "held-out", prompt),
                    stop=sampling.stop,
                )
            )
        for response in engine.step():
            text = engine.decode(response.tokens)
            total += reward(prompts.texts[response.id], text, prompts.answers[response.id])
    return total, len(chosen)
