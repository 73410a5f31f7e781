"""Several engines of one card as one, each in a process of its own, for a synchronous loop.

    submit ─► dealt out in turn ─► N processes, each with its engine ─► step: whatever any of them has finished
    load ─► one copy of the weights in shared memory ─► all of them, at the same time

A step of a small model costs an engine more Python than GPU, so one engine leaves most of a card idle; an asynchronous
run puts more searchers on it, and its peer must be allowed the same.
"""

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from bench.gpu.weights import in_memory_snapshot

from tba.contracts import config
from tba.searcher.engines import Request, Response, build
from tba.searcher.engines.vllm_weights import SharedTensors, SharedWeights
from tba.snapshots import Snapshot

_WAIT_SECONDS = 0.05
_CACHE_BYTES = 3 * 2**30
"""Of each: vLLM would count what the others hold as its own."""


class ManyEngines:
    """What `SyncLoop` needs of an engine. Weights change only while nothing is in flight."""

    needs_weights = True
    takes_adapters = False

    def __init__(self, settings: config.Engine, model: config.Model, *, number: int, tokenizer: Any) -> None:
        """`number` engines share the places of `settings`."""
        self.capacity = 0
        self._tokenizer = tokenizer
        self._shared = SharedWeights()
        self._assigned: list[int] = [0] * number  # requests that each has
        self._outgoing: list[list[Request]] = [[] for _ in range(number)]
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._children: list[Any] = []
        for _ in range(number):
            ours, theirs = context.Pipe()
            child = context.Process(target=serve, args=(theirs, part_of(settings, number), model), daemon=True)
            child.start()
            theirs.close()  # so that the end of the child ends our reading
            self._ends.append(ours)
            self._children.append(child)

    @property
    def in_flight(self) -> int:
        """Of all of them."""
        return sum(self._assigned)

    def load(self, snapshot: Snapshot) -> None:
        """Returns when all have the weights. Raises: EOFError if one has ended."""
        if self.in_flight:
            raise RuntimeError(f"{self.in_flight} responses are in flight")
        source = self._shared.put(snapshot.tensors)
        for end in self._ends:
            end.send((source, snapshot.assets, snapshot.manifest.version))
        self.capacity = sum(end.recv() for end in self._ends)

    def submit(self, request: Request) -> None:
        """To the one that has the fewest."""
        index = self._assigned.index(min(self._assigned))
        self._assigned[index] += 1
        self._outgoing[index].append(request)

    def step(self) -> list[Response]:
        """Responses that came meanwhile, perhaps none. Raises: EOFError if one has ended."""
        for end, requests in zip(self._ends, self._outgoing, strict=True):
            if requests:
                end.send(requests)
                requests.clear()
        if not self.in_flight:
            return []
        found: list[Response] = []
        for end in wait(self._ends, _WAIT_SECONDS):
            assert isinstance(end, Connection)
            responses = end.recv()
            self._assigned[self._ends.index(end)] -= len(responses)
            found += responses
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Text, without special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def close(self) -> None:
        """End them."""
        for end in self._ends:
            end.close()
        for child in self._children:
            child.join(20.0)
            child.kill()
        self._shared.close()


def part_of(settings: config.Engine, number: int) -> config.Engine:
    """One engine's share of the places, and of the memory where its size matters."""
    changes: dict[str, Any] = {}
    if settings.max_num_seqs is not None:
        changes["max_num_seqs"] = -(-settings.max_num_seqs // number)
    if settings.type == "vllm":
        changes["extra_args"] = {"kv_cache_memory_bytes": _CACHE_BYTES, **settings.extra_args}
    return settings.model_copy(update=changes)


def serve(parent: Connection, settings: config.Engine, model: config.Model) -> None:
    """A child: weights and requests in, responses out, until the parent closes its end."""
    engine = build(settings, model=model)
    try:
        while True:
            while not engine.in_flight or parent.poll():
                message = parent.recv()
                if isinstance(message, list):
                    for request in message:
                        engine.submit(request)
                else:
                    source, assets, version = message
                    assert isinstance(source, SharedTensors)
                    engine.load(in_memory_snapshot(source.tensors(), assets, version))
                    parent.send(engine.capacity)
            if done := engine.step():
                parent.send(done)
    except (EOFError, BrokenPipeError):
        engine.close()
