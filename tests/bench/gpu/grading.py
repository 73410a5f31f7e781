"""The reward in arms without a searcher, called as a searcher calls it.

    computes (`count`)      in place: threads would only take turns
    waits (`count-slow`)    equal answers to a prompt once, and as many calls at a time as one searcher has processes
                            (`task.reward.workers`), shared by all of an arm's processes, at least one each

Arms of the product (5 to 9) call it through their searchers' processes: several searchers have several times as many,
so for 5 searchers that are to have 80 in all, name 16 there and 80 for the arms beside them. Arms 1 and 2 hand each
response over as it ends, beside generation. TRL calls its reward function when a whole batch is there (arm 3), or with
one group at a time beside generation (arm 4).
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from tba.contracts.config import Reward
from tba.rewards import RewardFunction, load, lookup
from tba.rewards.sandbox import reward_source

BUILT_IN = "gsm8k"
SLOW = "bench.gpu.slow_reward:reward"
Call = tuple[str, str, str | None]
"""Prompt, response, answer."""


def slow_settings(seconds: float) -> list[str]:
    """Settings of a job whose reward waits."""
    return [f"task.reward={{entrypoint: '{SLOW}', parameters: {{seconds: {seconds}}}}}"]


def judge(reward: Reward) -> RewardFunction:
    """What held-out responses are scored by, off every clock: the same reward without the wait."""
    return lookup(reward.name or BUILT_IN)


def calls_at_once(cores: int) -> int:
    """Calls that one searcher of the product has at a time, unless its job says so (tba.searcher.rewarding)."""
    return max(1, min(8, cores // 2))


class Graders:
    """One of `processes` that score for an arm. For one thread."""

    def __init__(self, reward: Reward, *, processes: int = 1) -> None:
        """Raises: UserError if the reward cannot be loaded."""
        source = reward_source(reward, None)
        self._function: RewardFunction = partial(load(source).function, **source.parameters)
        self.calls = max(1, (reward.workers or calls_at_once(len(os.sched_getaffinity(0)))) // processes)
        self._pool = ThreadPoolExecutor(self.calls) if reward.entrypoint == SLOW else None
        self._asked: dict[Call, Future[float]] = {}

    def submit(self, prompt: str, response: str, answer: str | None) -> Callable[[], float]:
        """Ask; what is returned waits for the reward."""
        call = (prompt, response, answer)
        if self._pool is None:
            return partial(float, self._function(*call))
        if call not in self._asked:
            self._asked[call] = self._pool.submit(self._function, *call)
        return self._asked[call].result

    def score(self, calls: Sequence[Call]) -> list[float]:
        """Rewards of a batch that is whole, in order."""
        waiting = [self.submit(*call) for call in calls]
        rewards = [wait() for wait in waiting]
        self.forget()
        return rewards

    def forget(self) -> None:
        """A batch is done: its answers will be asked about again in the next."""
        self._asked.clear()
