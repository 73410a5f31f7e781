"""Drives an engine as the searcher's loop does: visits of S requests while there is room, never a batch barrier.

room? submit a visit ─► engine.step() ─► responses: decode, hand to the reward pool ─► swap due? load between steps
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tba.rewards.sandbox import RewardCall, RewardPool
from tba.searcher.engines import Engine, Request, Response
from tba.searcher.work import request_seed
from tba.snapshots import Snapshot


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and what its reward is told."""

    tokens: list[int]
    text: str = ""
    answer: str | None = None


@dataclass(slots=True)
class Fed:
    """What came back."""

    responses: list[Response] = field(default_factory=list)
    seconds: float = 0.0
    load_seconds: list[float] = field(default_factory=list)
    """Of each swap: nothing was generated meanwhile."""

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return sum(len(r.tokens) for r in self.responses)

    @property
    def tokens_per_second(self) -> float:
        """From the first request to the last response."""
        return self.tokens / self.seconds


class Swaps:
    """New weights every `seconds`, also across several feeds: one may be shorter than that."""

    def __init__(self, make: Callable[[int], Snapshot], seconds: float) -> None:
        self._make = make
        self._seconds = seconds
        self._count = 0
        self._due = time.perf_counter() + seconds

    def load_if_due(self, engine: Engine) -> float | None:
        """Seconds that it took, or None if it is not time."""
        now = time.perf_counter()
        if now < self._due:
            return None
        self._count += 1
        engine.load(self._make(self._count))
        took = time.perf_counter() - now
        self._due = now + self._seconds
        return took


def requests(
    questions: Sequence[Question], *, samples: int, max_tokens: int, temperature: float = 1.0, seed: int = 0
) -> Iterator[Request]:
    """S requests a question, numbered from 0, in the order of the questions."""
    for i, question in enumerate(questions):
        for j in range(samples):
            yield Request(
                id=i * samples + j,
                prompt_tokens=question.tokens,
                max_tokens=max_tokens,
                temperature=temperature,
                greedy=False,
                seed=request_seed(seed, i, j),
            )


def drive(
    engine: Engine,
    wanted: Iterator[Request],
    *,
    questions: Sequence[Question],
    samples: int,
    pool: RewardPool | None = None,
    swaps: Swaps | None = None,
) -> Fed:
    """Until all of `wanted` are answered."""
    fed = Fed()
    more = True
    started = time.perf_counter()
    while more or engine.in_flight:
        while more and engine.in_flight < engine.capacity:
            request = next(wanted, None)
            if request is None:
                more = False
            else:
                engine.submit(request)
        for response in engine.step():
            fed.responses.append(response)
            text = engine.decode(response.tokens)
            if pool is not None:
                question = questions[response.id // samples]
                pool.submit(RewardCall(question.text, text, question.answer))
        if swaps is not None and engine.in_flight and (took := swaps.load_if_due(engine)) is not None:
            fed.load_seconds.append(took)
    fed.seconds = time.perf_counter() - started
    return fed


def count_questions(tokenizer: Any, task: str, count: int, *, stream: str = "bench") -> list[Question]:
    """Items of the task `count` in the model's chat template."""
    from bench.gpu.places import count_task

    made = count_task()
    found = []
    for i in range(count):
        item = made.make_item(task, stream, i)
        messages = [{"role": "user", "content": item.question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        found.append(Question(list(tokens), item.question, item.answer))
    return found
