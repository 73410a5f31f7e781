"""Responses on their way through the reward pool: equal answers of one work are scored once; results come in order of
their end."""

import os
import queue
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import count

from tba import trace
from tba.contracts.config import LiveConfig
from tba.rewards.sandbox import RewardCall, RewardPool, RewardResult
from tba.searcher.engines.engine import Response
from tba.searcher.work import Work

Scored = tuple[Work, int, Response, RewardResult]
"""A work, the number of a response in it, that response and its reward."""

_MAX_WORKERS = 8
"""Unless the job says so: more would compute no faster, and each holds its imports in memory."""


class Rewarding:
    """For the loop's thread; the pool's threads only put results into a queue."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._scored: queue.SimpleQueue[Scored] = queue.SimpleQueue()
        self._shared: dict[tuple[int, int, str], Future[RewardResult]] = {}
        self._followed: tuple[tuple[float, int], int | None] | None = None
        self._numbers = count()
        self.unscored = 0
        """Responses whose reward is awaited."""

    def submit(self, work: Work, index: int, response: Response, text: str) -> None:
        """Have response `index` of a work scored; `text` is its answer."""
        prompt = work.prompt_id(index)
        # A reward depends on prompt, text and answer alone: equal responses of a visit are scored once.
        key = (id(work), prompt, text)
        future = self._shared.get(key)
        if future is None:
            future = self._pool.submit(RewardCall(work.prompts.texts[prompt], text, work.prompts.answers[prompt]))
            self._shared[key] = future
            number = next(self._numbers)
            trace.began("reward", number)
            future.add_done_callback(lambda _: trace.ended("reward", number))
        self.unscored += 1
        future.add_done_callback(lambda f: self._scored.put((work, index, response, f.result())))

    def settled(self) -> Iterator[Scored]:
        """What has been scored since the last call."""
        while True:
            try:
                scored = self._scored.get_nowait()
            except queue.Empty:
                return
            self.unscored -= 1
            yield scored

    def forget(self, work: Work) -> None:
        """A work is complete: nothing of it will be scored again."""
        self._shared = {k: f for k, f in self._shared.items() if k[0] != id(work)}

    def follow(self, live: LiveConfig) -> None:
        """Hand changed limits and numbers of the live settings to the pool."""
        limits, workers = (live.reward_timeout_seconds, live.reward_memory_bytes), live.reward_workers
        if self._followed is not None and limits != self._followed[0]:
            self._pool.set_limits(*limits)
        if self._followed is not None and workers != self._followed[1]:
            self._pool.resize(num_workers(workers))
        self._followed = (limits, workers)


def num_workers(wanted: int | None) -> int:
    """Reward processes of a searcher, by `task.reward.workers`."""
    return wanted or max(1, min(_MAX_WORKERS, len(os.sched_getaffinity(0)) // 2))
