"""The task `count`: how often does a word appear in a list? Items of a stream depend on (task, stream, index) alone.

Chosen as a benchmark for the tail of its response lengths: lists are mostly short and sometimes long, and a worked
answer has a line for each word. Pure; standard library only.
"""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

WORDS = (  # noqa: SIM905 (a quoted word a line says no more)
    "apple bread chair cloud coin corn desk dog door drum eagle fish forest garden glass gold hand horse house "
    "island jacket king lake lamp leaf lemon milk moon mountain night ocean paper queen river road rose ship "
    "silver snow star stone table tiger water window"
).split()
_POOL = 3
"""Different words in a list; the counted one is among them."""
_FEWEST = 4


@dataclass(frozen=True, slots=True)
class Variant:
    """How long lists and answers get."""

    mean_more: float
    """Words beyond `_FEWEST`: exponential with this mean; 0: none."""
    most: int
    """Words of a list."""
    max_tokens: int
    """Limit of a response in the benchmark."""


VARIANTS = {
    "count": Variant(6.0, 30, 256),
    "count-long": Variant(12.0, 80, 512),
    "count-short": Variant(0.0, _FEWEST, 64),
}
"""`count-short` has next to no tail: there a synchronous loop loses nothing by waiting for its last response."""


@dataclass(frozen=True, slots=True)
class Item:
    """A question and its answer."""

    question: str
    worked: str
    """The running tally, a line a word, then `Answer: n`."""
    answer: str


def make_item(task: str, stream: str, index: int) -> Item:
    """Item `index` of a stream. Raises: KeyError for an unknown task."""
    variant = VARIANTS[task]
    rng = random.Random(f"{task}/{stream}/{index}")  # a string seeds through SHA-512: the same on every machine
    more = int(rng.expovariate(1 / variant.mean_more)) if variant.mean_more else 0
    size = min(variant.most, _FEWEST + more)
    pool = rng.sample(WORDS, _POOL)
    wanted, words = pool[0], [rng.choice(pool) for _ in range(size)]
    tally, lines = 0, []
    for word in words:
        tally += word == wanted
        lines.append(f"{word} {tally}")
    question = f'How many times does the word "{wanted}" appear in this list? {", ".join(words)}\n'
    return Item(question + 'End with "Answer:" and the result.', "\n".join([*lines, f"Answer: {tally}"]), str(tally))


def write_prompts(path: Path, items: Iterable[Item]) -> None:
    """One `{"question", "answer"}` a line."""
    path.write_text("".join(json.dumps({"question": i.question, "answer": i.answer}) + "\n" for i in items))
