"""Prompt sets as objects: tokens, text and answer of every prompt, named by the sha256 of the bytes.

The trainer materialises a set once at the start of a run; searchers and rewards only ever see the object, so that a
prompt id means the same to everybody. Ids are row numbers after too long and empty prompts were dropped.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow as pa

from tba.arrow import read_single_batch, write_single_batch
from tba.contracts.config import Prompts
from tba.contracts.errors import CorruptObject, UserError
from tba.contracts.keys import prompts_key
from tba.prompts.read import Message, RawPrompt, iterate_prompts
from tba.prompts.sources import OpenStore, name_of
from tba.store import ObjectStore
from tba.store import open_store as default_open_store

if TYPE_CHECKING:  # heavy, and the tokenizer is handed in
    from transformers import PreTrainedTokenizerBase

SCHEMA = pa.schema(
    [
        pa.field("text", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=True),
        pa.field("tokens", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
    ]
)
_TOO_LONG, _EMPTY = b"tba.dropped_too_long", b"tba.dropped_empty"
_CHUNK = 1024  # prompts tokenized at a time


@dataclass(frozen=True, slots=True, eq=False)
class PromptSet:
    """A materialised prompt set; the prompt id is the position."""

    texts: list[str]  # as in the source, without template: what rewards and reports call the prompt
    answers: list[str | None]
    tokens: np.ndarray  # (T,) int32: what the model is given, of all prompts
    offsets: np.ndarray  # (n + 1,) int64: prompt i is tokens[offsets[i]:offsets[i + 1]]
    dropped_too_long: int
    dropped_empty: int

    def __len__(self) -> int:
        return len(self.texts)

    def prompt_tokens(self, i: int) -> np.ndarray:
        """Token ids of prompt `i`, (length,) int32, read-only."""
        if not 0 <= i < len(self):
            raise IndexError(f"prompt id must be in 0..{len(self) - 1}, got {i}")
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]


@dataclass(frozen=True, slots=True)
class Usable:
    """Prompts of a source that can be trained on, in its order."""

    kept: list[tuple[RawPrompt, list[int]]]
    """Each with its token ids."""
    too_long: int
    empty: int
    """How many of each kind were dropped on the way."""


def materialize(
    config: Prompts,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    base_dir: Path,
    max_prompt_tokens: int,
    limit: int | None = None,
    open_store: OpenStore = default_open_store,
    token: str | None = None,
) -> tuple[str, bytes]:
    """The sha256 and bytes of the prompt set (store at `keys.prompts_key(sha256)`): its first `limit` usable prompts.

    Equal input gives equal bytes. Arguments and errors are those of `usable_prompts`.
    """
    usable = usable_prompts(
        config,
        tokenizer,
        base_dir=base_dir,
        max_prompt_tokens=max_prompt_tokens,
        limit=limit,
        open_store=open_store,
        token=token,
    )
    data = _encode(usable)
    return hashlib.sha256(data).hexdigest(), data


def usable_prompts(
    config: Prompts,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    base_dir: Path,
    max_prompt_tokens: int,
    limit: int | None = None,
    open_store: OpenStore = default_open_store,
    token: str | None = None,
) -> Usable:
    """The first `limit` usable prompts; reads little more than these.

    Prompts of more than `max_prompt_tokens` tokens, or none, are dropped and counted. `token` is for hf://; null takes
    the environment's.

    Raises: UserError if no row is there or left, or a row, template or chat template does not fit; StoreUnavailable.
    """
    render = _Renderer(config, tokenizer)
    source = iterate_prompts(config, base_dir=base_dir, open_store=open_store, token=token)
    kept: list[tuple[RawPrompt, list[int]]] = []
    too_long = empty = 0
    for prompt, tokens in _tokenized(source, render):
        if len(kept) == limit:
            break
        too_long += len(tokens) > max_prompt_tokens
        empty += not tokens
        if 0 < len(tokens) <= max_prompt_tokens:
            kept.append((prompt, tokens))
    if not kept and not too_long and not empty:
        raise UserError(f"{name_of(config)} has no rows: write prompts into it, or name another source")
    if not kept:
        raise UserError(
            f"no usable prompt in {name_of(config)}: {too_long} longer than {max_prompt_tokens} tokens, {empty} empty: "
            "raise model.maxModelLen, lower task.sampling.maxTokens, or check the data"
        )
    return Usable(kept, too_long, empty)


def load_prompt_set(store: ObjectStore, key: str) -> PromptSet:
    """Read and verify a prompt set. Raises: NotFound; CorruptObject; StoreUnavailable."""
    data = store.get(key).data
    found = prompts_key(hashlib.sha256(data).hexdigest())
    if found != key:
        raise CorruptObject(f"{key}: its {len(data)} bytes hash to {found}: the bytes were changed")
    file = read_single_batch(data, SCHEMA, key)
    try:
        texts, answers = file.columns["text"].strings(), file.columns["answer"].strings()
        too_long, empty = (int(file.metadata.get(name, b"0")) for name in (_TOO_LONG, _EMPTY))
    except ValueError as error:
        raise CorruptObject(f"{key}: {error}") from error
    tokens, offsets = file.columns["tokens"].lists()
    flat = tokens.numpy()
    if file.num_rows == 0 or (np.diff(offsets) < 1).any() or (flat < 0).any():
        raise CorruptObject(f"{key}: {file.num_rows} prompts, of which one has no or negative tokens")
    return PromptSet(cast(list[str], texts), answers, flat, offsets, too_long, empty)


def _encode(usable: Usable) -> bytes:
    columns = [
        pa.array([p.text for p, _ in usable.kept], pa.string()),
        pa.array([p.answer for p, _ in usable.kept], pa.string()),
        pa.array([tokens for _, tokens in usable.kept], SCHEMA.field("tokens").type),
    ]
    metadata = {_TOO_LONG: str(usable.too_long).encode(), _EMPTY: str(usable.empty).encode()}
    return write_single_batch(SCHEMA.with_metadata(metadata), columns)


def _tokenized(source: Iterator[RawPrompt], render: "_Renderer") -> Iterator[tuple[RawPrompt, list[int]]]:
    while chunk := list(islice(source, _CHUNK)):
        yield from zip(chunk, render.tokens(chunk), strict=True)


class _Renderer:
    """From raw prompts to token ids: template, chat template, tokenizer, in this order."""

    def __init__(self, config: Prompts, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._template = config.template
        has_chat = bool(tokenizer.chat_template)
        self._chat = config.chat_template == "on" or (
            config.chat_template == "auto" and has_chat and config.template is None
        )
        if self._chat and not has_chat:
            raise UserError("prompts.chatTemplate is on, but the tokenizer has no chat template: set it to off or auto")
        self._fill("", "prompts.template")  # a fault of the template is none of the first row

    def tokens(self, prompts: list[RawPrompt]) -> list[list[int]]:
        """Token ids of each prompt."""
        if not prompts:
            return []
        texts = [self._text(p) for p in prompts]
        # A chat template writes its own special tokens; plain text gets the tokenizer's (such as BOS).
        ids = self._tokenizer(texts, add_special_tokens=not self._chat, verbose=False)["input_ids"]
        return [self._open(text, list(row)) for text, row in zip(texts, cast(list[list[int]], ids), strict=True)]

    def _text(self, prompt: RawPrompt) -> str:
        content = prompt.content
        if isinstance(content, str):
            content = self._fill(content, f"prompt {content[:40]!r}")
            return self._apply([{"role": "user", "content": content}]) if self._chat else content
        if self._template is not None or not self._chat:
            raise UserError(
                "prompts are lists of chat messages, which need a tokenizer with a chat template, "
                "prompts.chatTemplate auto or on, and no prompts.template"
            )
        return self._apply(content)

    def _fill(self, text: str, where: str) -> str:
        if self._template is None:
            return text
        try:
            return self._template.format(prompt=text)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise UserError(
                f"{where}: prompts.template cannot be filled in ({type(error).__name__}: {error}): "
                "only {prompt} is replaced, write other braces twice"
            ) from error

    def _apply(self, messages: list[Message]) -> str:
        from jinja2.exceptions import TemplateError  # comes with the tokenizer

        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except (TemplateError, ValueError, TypeError) as error:
            roles = [m["role"] for m in messages]
            raise UserError(f"the chat template refuses messages with roles {roles}: {error}: fix the rows") from error
        return cast(str, text)

    def _open(self, text: str, ids: list[int]) -> list[int]:
        """Without the end-of-sequence token that some tokenizers close every text with: it could not be continued."""
        eos = self._tokenizer.eos_token
        closed = not self._chat and len(ids) > 1 and ids[-1] == self._tokenizer.eos_token_id
        return ids[:-1] if closed and not text.endswith(str(eos)) else ids
