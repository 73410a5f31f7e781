"""Grade-school mathematics: does the response's number equal the gold answer's?"""

import math
import re

from tba.rewards import required_answer

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_MARKED = re.compile(rf"####\s*\$?\s*({_NUMBER.pattern})")
_MODES = ("last_number", "strict")


def reward(prompt: str, response: str, answer: str | None, *, mode: str = "last_number") -> float:
    """Return 1.0 if the response's number equals the answer's as a float, else 0.0.

    `last_number`: the last number anywhere, commas removed; no format reward. `strict`: the number directly after the
    last `####`. The gold number is the marked one if there is one, else the last.

    Raises:
        ValueError: the answer is missing or holds no finite number.

    Source: arXiv 2503.18929 and its code (regular expression over ints, decimals and exponents, commas stripped).
        Ours also reads a decimal with an exponent (1.5e3) as one number, theirs as its exponent.
    """
    text = required_answer(answer)
    gold = marked_number(text)
    if gold is None:
        gold = last_number(text)
    if gold is None or not math.isfinite(gold):
        raise ValueError(f"the answer holds no finite number: got {text[:80]!r}; check task.prompts.answerField")
    predicted = last_number(response) if mode == "last_number" else marked_number(response)
    return float(predicted == gold)


def last_number(text: str) -> float | None:
    """Return the last number of `text`, commas removed first; None if there is none."""
    found = _NUMBER.findall(text.replace(",", ""))
    return float(found[-1]) if found else None


def marked_number(text: str) -> float | None:
    """Return the number directly after the last `####`; None if there is none."""
    _, marker, rest = text.replace(",", "").rpartition("####")
    match = _MARKED.match(marker + rest) if marker else None
    return float(match[1]) if match else None


def check_parameters(*, mode: str = "last_number") -> None:
    """Refuse an unknown mode when the reward is loaded."""
    if mode not in _MODES:
        raise ValueError(f"mode must be one of {', '.join(_MODES)}")
