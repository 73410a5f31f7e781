"""Competition mathematics: is the response's final expression equal to the gold one (math-verify)?

Parsing or comparing may run for ever or eat memory; the sandbox's limits stop it, so math-verify's own alarms are off.
"""

import logging

from math_verify import parse, verify

from tba.rewards import required_answer

_MATH_MARKS = ("$", "\\boxed", "\\(", "\\[")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about the alarms being off, once a process


def reward(prompt: str, response: str, answer: str | None) -> float:
    """Return 1.0 if the response's expression is mathematically equal to the answer's, else 0.0.

    An answer without LaTeX marks is read as one formula.

    Raises:
        ValueError: the answer is missing or cannot be parsed.
    """
    text = required_answer(answer).strip()
    marked = any(mark in text for mark in _MATH_MARKS)
    gold = parse(text if marked else f"${text}$", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not gold:
        raise ValueError(f"the answer is no mathematical expression: got {text[:80]!r}; check task.prompts.answerField")
    try:
        predicted = parse(response, parsing_timeout=None, raise_on_error=True)  # pyright: ignore[reportArgumentType]
        return float(verify(gold, predicted, timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:
        # The response, not the infrastructure: sympy raises any type on odd input. Dropping such samples would
        # shield text that breaks the parser from ever being penalised.
        return 0.0
