"""The order in which one searcher visits prompts. No searcher owns a prompt: each walks its own permutation."""

import hashlib
from typing import Self

import numpy as np


class PromptWalk:
    """Endless prompt ids: every pass visits each id once, in an order of its own.

    The order follows from (seed, incarnation) alone, so that searchers need no coordination and a run can be retold.
    """

    def __init__(self, num_prompts: int, seed: int, incarnation: str) -> None:
        """Raises: ValueError if there is no prompt or the seed is negative."""
        if num_prompts < 1 or seed < 0:
            raise ValueError(f"num_prompts must be >= 1 and seed >= 0, got {num_prompts} and {seed}")
        self._num_prompts = num_prompts
        digest = hashlib.sha256(incarnation.encode()).digest()
        self._rng = np.random.Generator(np.random.PCG64([seed, int.from_bytes(digest, "little")]))
        self._order = self._rng.permutation(num_prompts)
        self._next = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        if self._next == self._num_prompts:
            self._order = self._rng.permutation(self._num_prompts)
            self._next = 0
        self._next += 1
        return int(self._order[self._next - 1])
