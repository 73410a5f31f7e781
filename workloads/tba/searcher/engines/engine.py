"""What a searcher needs of an engine. `step()` is driven by one thread; between two steps weights may be swapped."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tba.contracts.records import FinishReason, PolicyId, Span

if TYPE_CHECKING:
    from tba.snapshots import Snapshot


@dataclass(frozen=True, slots=True)
class Request:
    """One response wanted."""

    id: int
    prompt_tokens: Sequence[int]
    max_tokens: int  # of the response, end-of-sequence included
    temperature: float
    greedy: bool
    seed: int  # 0..2**63-1; with the prompt and the weights it determines the response up to float noise
    stop: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Response:
    """One response made. `spans` cover `tokens` in order, or name the policy by one span of 0 tokens if none came."""

    id: int
    tokens: list[int]  # as sampled, end-of-sequence included
    finish_reason: FinishReason
    spans: list[Span]
    logprobs: list[float] | None  # natural log of log_softmax(logits / temperature), one a token
    reward: float | None = None  # fake engine only: then nothing else scores it
    error: str | None = None  # why there is no (whole) response; it must not be scored


class Engine(Protocol):
    """Generates responses, several at a time."""

    needs_weights: bool
    """Whether `load` wants tensors, or only to know which policy it is."""
    takes_adapters: bool
    """Whether `load` wants adapters beside their base, or merged. May become false with the first `load`, which then
    merges for itself."""

    @property
    def capacity(self) -> int:
        """Responses it wants in flight. 0 before the first `load`."""
        ...

    @property
    def in_flight(self) -> int:
        """Submitted and not yet returned."""
        ...

    def load(self, snapshot: "Snapshot") -> None:
        """Swap weights. Tokens sampled from now on, also of responses in flight, carry the new policy's span.

        Raises: CorruptObject if the snapshot does not fit the model; the old weights stay.
        """
        ...

    def submit(self, request: Request) -> None:
        """Queue a request. Raises: RuntimeError before the first `load`."""
        ...

    def step(self) -> list[Response]:
        """Do one piece of work, and return the responses that it finished. Nothing in flight: returns at once."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of response tokens, without special tokens."""
        ...

    def sleep(self, *, free_memory: bool) -> None:
        """Leave the device to another process until `wake`; nothing but `decode`, `abort` and `close` in between.

        Work under way has ended when this returns. Requests in flight are kept, with every token they have; with
        `free_memory` weights and cached keys leave the device, as far as the engine can do that.
        """
        ...

    def wake(self) -> None:
        """Go on from `sleep`."""
        ...

    def abort(self) -> None:
        """Forget all requests."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


def extend_spans(spans: list[Span], policy: PolicyId) -> None:
    """Count one more token sampled by `policy`, in place."""
    if spans and (spans[-1].epoch, spans[-1].version) == policy:
        spans[-1] = spans[-1]._replace(num_tokens=spans[-1].num_tokens + 1)
    else:
        spans.append(Span(1, policy.epoch, policy.version))
