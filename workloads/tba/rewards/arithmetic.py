"""Integer arithmetic: is the response exactly the expected integer?"""

import re

from tba.rewards import required_answer

_INTEGER = re.compile(r"-?\d+", re.ASCII)


def reward(prompt: str, response: str, answer: str | None) -> float:
    """Return 1.0 if the response is the answer's text (outer white space ignored), else 0.0.

    Raises:
        ValueError: the answer is missing or no integer.
    """
    gold = required_answer(answer).strip()
    if not _INTEGER.fullmatch(gold):
        raise ValueError(f"the answer is no integer: got {gold[:80]!r}; check task.prompts.answerField")
    return float(response.strip() == gold)
