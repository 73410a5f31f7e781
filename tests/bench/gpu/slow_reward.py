"""The reward of `count-slow`: that of `count` as a remote grader gives it, whose answer takes its time."""

import time

from tba.rewards import gsm8k


def reward(prompt: str, response: str, answer: str | None, *, seconds: float = 0.2) -> float:
    """1.0 or 0.0 after `seconds`, in which nothing is computed here."""
    time.sleep(seconds)
    return gsm8k.reward(prompt, response, answer)
