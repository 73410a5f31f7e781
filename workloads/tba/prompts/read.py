"""Raw prompts of a source: the prompt column as text or chat messages, the answer as text."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tba.contracts.config import Prompts
from tba.contracts.errors import UserError
from tba.prompts.sources import OpenStore, Row, columns_of, name_of, rows
from tba.store import open_store as default_open_store

Message = dict[str, str]

# What an error tells to set: in a job, and on the command line of an evaluation.
_PROMPT_FIELD = "prompts.promptField (of tba eval: --prompt-field)"
_ANSWER_FIELD = "prompts.answerField (of tba eval: --answer-field)"


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """One row of the source."""

    content: str | list[Message]  # as in the source: text, or messages with role and content
    answer: str | None  # None if there is no answer column

    @property
    def text(self) -> str:
        """What rewards and reports call the prompt: the text, or the content of the last message."""
        return self.content if isinstance(self.content, str) else self.content[-1]["content"]


def read_prompts(
    config: Prompts, *, base_dir: Path, limit: int | None = None, open_store: OpenStore = default_open_store
) -> list[RawPrompt]:
    """The first `limit` prompts in the order of the source; duplicates are kept.

    `base_dir` is where a relative file:// path starts; `open_store` opens the parent of an s3:// object.
    Raises: UserError for a missing source, column or value; StoreUnavailable.
    """
    return list(islice(iterate_prompts(config, base_dir=base_dir, open_store=open_store), limit))


def iterate_prompts(
    config: Prompts, *, base_dir: Path, open_store: OpenStore = default_open_store, token: str | None = None
) -> Iterator[RawPrompt]:
    """`read_prompts`, one at a time."""
    for place, row in rows(config, base_dir=base_dir, open_store=open_store, token=token):
        where = f"{place} of {name_of(config)}"
        content = _content(_field(row, _PROMPT_FIELD, config.prompt_field, where), where)
        answer = None
        if config.answer_field is not None:
            remedy = ", or set it to null (there: '') if the reward needs no answer"
            answer = _answer(_field(row, _ANSWER_FIELD, config.answer_field, where, remedy), where)
        yield RawPrompt(content, answer)


def _field(row: Row, setting: str, name: str, where: str, remedy: str = "") -> Any:
    if name not in row:
        raise UserError(
            f"{where} has no column {name!r}; its columns are: {columns_of(row)}. Set {setting} to one of them{remedy}"
        )
    return row[name]


def _content(value: Any, where: str) -> str | list[Message]:
    if isinstance(value, str):
        return _encodable(value, where)
    if isinstance(value, list) and value and all(_is_message(m) for m in value):
        return [{"role": m["role"], "content": _encodable(m["content"], where)} for m in value]
    raise UserError(
        f"{where} is neither text nor a list of messages with role and content, got {type(value).__name__} "
        f"{str(value)[:80]!r}: fix the row or set {_PROMPT_FIELD}"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(k), str) for k in ("role", "content"))


def _answer(value: Any, where: str) -> str | None:
    """Answers are text for every reward: numbers and structures as JSON."""
    if value is None or isinstance(value, str):
        return None if value is None else _encodable(value, where)
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    except TypeError as error:  # Parquet knows dates, decimals, bytes, ...
        raise UserError(f"{where} has an answer of type {type(value).__name__}: store it as text") from error


def _encodable(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise UserError(f"{where} is not valid Unicode: {error}: fix the row") from error
    return text
