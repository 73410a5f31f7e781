"""Scores an engine's weights on held-out prompts, sampled as in training. Never on a run's clock."""

from tba.contracts.config import RunConfig
from tba.prompts import PromptSet
from tba.rewards import RewardFunction
from tba.searcher.engines import Engine
from tba.searcher.work import make_request, request_seed


def score(
    engine: Engine, prompts: PromptSet, reward: RewardFunction, config: RunConfig, *, first: int = 0, every: int = 1
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
