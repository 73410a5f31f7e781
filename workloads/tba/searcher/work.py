"""Units of work: a visit (S responses to a prompt) or an evaluation block, filled in one response at a time."""

import hashlib
from dataclasses import dataclass, field
from typing import Protocol

from tba.contracts.records import Outcome, Trajectory
from tba.evaluation import EvalBlock, EvalResponse
from tba.prompts import PromptSet
from tba.searcher.engines.engine import Request, Response


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of a response's scoring."""

    outcome: Outcome
    reward: float | None


class Work(Protocol):
    """What the loop asks of either kind. Responses are numbered 0..size-1."""

    prompts: PromptSet

    def prompt_id(self, index: int) -> int:
        """Prompt of a response."""
        ...

    def settle(self, index: int, response: Response, result: Settled) -> None:
        """Fill in one response."""
        ...

    @property
    def done(self) -> bool:
        """Whether all are filled in."""
        ...


@dataclass(slots=True)
class Visit:
    """S responses to one occurrence of a prompt: eligible for training only as a whole."""

    number: int
    prompt: int
    size: int
    prompts: PromptSet
    temperature: float
    rows: dict[int, Trajectory] = field(default_factory=dict)
    created_at: float = 0.0

    def prompt_id(self, index: int) -> int:
        """The same for all."""
        return self.prompt

    def settle(self, index: int, response: Response, result: Settled) -> None:
        """Make the trajectory."""
        self.rows[index] = Trajectory(
            prompt_id=self.prompt,
            visit=self.number,
            visit_size=self.size,
            prompt_tokens=self.prompts.prompt_tokens(self.prompt).tolist(),
            response_tokens=response.tokens,
            outcome=result.outcome,
            reward=result.reward,
            finish_reason=response.finish_reason,
            spans=response.spans,
            temperature=self.temperature,
            created_at=self.created_at,
            sampler_logprobs=response.logprobs if response.tokens else None,
        )

    @property
    def done(self) -> bool:
        """Whether all S are there."""
        return len(self.rows) == self.size

    def trajectories(self) -> list[Trajectory]:
        """In the order of their requests, which does not depend on their lengths."""
        return [self.rows[i] for i in sorted(self.rows)]


@dataclass(slots=True)
class EvalWork:
    """One block of an evaluation."""

    block: int
    first_prompt: int
    num_prompts: int
    samples: int
    prompts: PromptSet
    rows: dict[int, EvalResponse] = field(default_factory=dict)

    def prompt_id(self, index: int) -> int:
        """Responses of a prompt are neighbours."""
        return self.first_prompt + index // self.samples

    def settle(self, index: int, response: Response, result: Settled) -> None:
        """Make the row."""
        tokens = tuple(response.tokens)
        self.rows[index] = EvalResponse(
            self.prompt_id(index), index % self.samples, result.outcome, result.reward, len(tokens), tokens
        )

    @property
    def size(self) -> int:
        """Responses of the block."""
        return self.num_prompts * self.samples

    @property
    def done(self) -> bool:
        """Whether all are there."""
        return len(self.rows) == self.size

    def result(self) -> EvalBlock:
        """What goes to the bucket."""
        return EvalBlock(tuple(self.rows[i] for i in sorted(self.rows)))


def request_seed(seed: int, *identity: str | int) -> int:
    """63 bits from the run's seed and what the response is; equal input gives an equal response up to float noise."""
    text = ":".join(str(part) for part in (seed, *identity))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def make_request(
    request_id: int, tokens: list[int], *, max_tokens: int, max_model_len: int, temperature: float, greedy: bool,
    seed: int, stop: list[str],
) -> Request:  # fmt: skip
    """A request whose response fits the model's length."""
    room = max_model_len - len(tokens)
    return Request(request_id, tokens, min(max_tokens, room), temperature, greedy, seed, tuple(stop))
