"""Text found by a regular expression: does it equal the answer?"""

import re

from tba.rewards import required_answer

_MODES = ("search", "fullmatch")


def reward(
    prompt: str, response: str, answer: str | None, *, pattern: str, group: int | str = 0, mode: str = "search"
) -> float:
    """Return 1.0 if `group` of the match in the response equals the answer (outer white space ignored), else 0.0.

    `search` takes the first match anywhere, `fullmatch` needs the whole response to match.

    Raises:
        ValueError: the answer is missing.
    """
    gold = required_answer(answer).strip()
    compiled = re.compile(pattern)  # cached by re
    match = compiled.search(response) if mode == "search" else compiled.fullmatch(response)
    found = match[group] if match else None
    return float(found is not None and found.strip() == gold)


def check_parameters(*, pattern: str, group: int | str = 0, mode: str = "search") -> None:
    """Refuse a bad pattern, an absent group and an unknown mode when the reward is loaded."""
    if mode not in _MODES:
        raise ValueError(f"mode must be one of {', '.join(_MODES)}")
    if not isinstance(pattern, str):
        raise ValueError("pattern must be text")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern is no regular expression: {error}") from error
    if group not in (*range(compiled.groups + 1), *compiled.groupindex):
        raise ValueError(f"pattern has no group {group!r}: it has {compiled.groups} and {sorted(compiled.groupindex)}")
