"""Materialised prompt sets: the bytes are the identity, ids are stable, tokens are what the model is given."""

import hashlib
import json

import numpy as np
import pytest
from support.memory_store import MemoryStore
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tba.contracts.config import Prompts
from tba.contracts.errors import CorruptObject, UserError
from tba.contracts.keys import prompts_key
from tba.prompts import load_prompt_set, materialize
from tba.store.protocol import NotFound

CHAT = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(*, chat: str | None = None, bos: bool = False, eos: bool = False) -> PreTrainedTokenizerFast:
    """One token a byte: <bos> 0, <eos> 1, byte b somewhere above."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<bos>": 0, "<eos>": 1} | {letter: i for i, letter in enumerate(letters, 2)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    pattern = " ".join(["<bos>"] * bos + ["$A"] + ["<eos>"] * eos)
    core.post_processor = processors.TemplateProcessing(single=pattern, special_tokens=[("<bos>", 0), ("<eos>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = chat
    return tokenizer


@pytest.fixture
def build(tmp_path):
    """materialize and load again, from rows."""

    def build(rows, tokenizer, *, max_prompt_tokens=1000, limit=None, **settings):
        (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
        config = Prompts(uri="file://p.jsonl", **settings)
        sha, data = materialize(config, tokenizer, base_dir=tmp_path, max_prompt_tokens=max_prompt_tokens, limit=limit)
        assert sha == hashlib.sha256(data).hexdigest()
        store = MemoryStore()
        store.put_once(prompts_key(sha), data)
        return load_prompt_set(store, prompts_key(sha))

    return build


def row(question, answer="a"):
    return {"question": question, "answer": answer}


def test_ids_are_rows_after_too_long_and_empty_prompts_were_dropped(build):
    prompts = build(
        [row("abc", "1"), row("too long"), row(""), row("de", None), row("abc", "1")],
        byte_tokenizer(),
        max_prompt_tokens=3,
    )
    assert prompts.texts == ["abc", "de", "abc"] and prompts.answers == ["1", None, "1"]
    assert prompts.offsets.tolist() == [0, 3, 5, 8] and prompts.tokens.dtype == np.int32
    assert (len(prompts), prompts.dropped_too_long, prompts.dropped_empty) == (3, 1, 1)
    assert prompts.prompt_tokens(1).tolist() == byte_tokenizer()("de")["input_ids"]
    with pytest.raises(IndexError, match="prompt id must be in"):
        prompts.prompt_tokens(3)


def test_a_limit_counts_usable_prompts(build):
    rows = [row("too long"), row("a"), row("b"), row("c")]
    assert build(rows, byte_tokenizer(), max_prompt_tokens=2, limit=2).texts == ["a", "b"]


def test_more_prompts_than_one_chunk_keep_their_order(build):
    prompts = build([row(f"{i}", i) for i in range(2500)], byte_tokenizer())
    assert prompts.texts == [str(i) for i in range(2500)] == prompts.answers
    assert prompts.prompt_tokens(2499).tolist() == byte_tokenizer()("2499")["input_ids"]


def test_equal_input_gives_equal_bytes_and_other_input_other_bytes(tmp_path):
    def digest(text, **settings):
        (tmp_path / "p.jsonl").write_text(json.dumps(row(text)))
        config = Prompts(uri="file://p.jsonl", **settings)
        return materialize(config, byte_tokenizer(), base_dir=tmp_path, max_prompt_tokens=99)[0]

    assert digest("x") == digest("x")
    assert len({digest("x"), digest("y"), digest("x", template="{prompt}!"), digest("x", answer_field=None)}) == 4


@pytest.mark.parametrize(
    ("chat", "settings", "rendered"),
    [
        (None, {}, "<bos>hi"),
        (None, {"template": "Q: {prompt} {{x}}"}, "<bos>Q: hi {x}"),
        (CHAT, {}, "<|user|>hi<eos><|assistant|>"),
        (CHAT, {"template": "Q: {prompt}"}, "<bos>Q: hi"),
        (CHAT, {"template": "Q: {prompt}", "chat_template": "on"}, "<|user|>Q: hi<eos><|assistant|>"),
        (CHAT, {"chat_template": "off"}, "<bos>hi"),
    ],
)
def test_the_model_is_given_what_template_and_chat_template_say(build, chat, settings, rendered):
    tokenizer = byte_tokenizer(chat=chat, bos=True)
    prompts = build([row("hi")], tokenizer, **settings)
    assert tokenizer.decode(prompts.prompt_tokens(0)) == rendered
    assert prompts.texts == ["hi"]


def test_chat_tokens_are_those_of_apply_chat_template(build):
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hé!"}]
    tokenizer = byte_tokenizer(chat=CHAT, bos=True)
    prompts = build([row(messages)], tokenizer)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert prompts.prompt_tokens(0).tolist() == expected
    assert prompts.texts == ["Hé!"]


def test_a_tokenizer_that_closes_texts_leaves_the_prompt_open(build):
    tokenizer = byte_tokenizer(bos=True, eos=True)
    assert tokenizer.decode(build([row("hi")], tokenizer).prompt_tokens(0)) == "<bos>hi"
    assert tokenizer.decode(build([row("hi<eos>")], byte_tokenizer()).prompt_tokens(0)) == "hi<eos>"


@pytest.mark.parametrize(
    ("question", "chat", "settings", "message"),
    [
        ("hello", None, {"max_prompt_tokens": 2}, "no usable prompt .* 1 longer than 2 tokens, 0 empty: raise"),
        ("", None, {}, "0 longer than 1000 tokens, 1 empty"),
        ("hi", None, {"chat_template": "on"}, "has no chat template: set it to off or auto"),
        ("hi", None, {"template": "{prompt} {other}"}, "prompts.template cannot be filled in"),
        ("hi", None, {"template": "{prompt} {"}, "write other braces twice"),
        ([{"role": "user", "content": "x"}], None, {}, "lists of chat messages"),
        ([{"role": "user", "content": "x"}], CHAT, {"chat_template": "off"}, "lists of chat messages"),
        ([{"role": "user", "content": "x"}], CHAT, {"template": "{prompt}", "chat_template": "on"}, "no prompts.templ"),
        ([{"role": "robot", "content": "x"}], CHAT, {}, r"refuses messages with roles \['robot'\]: no robots"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused_with_a_remedy(build, question, chat, settings, message):
    with pytest.raises(UserError, match=message):
        build([row(question)], byte_tokenizer(chat=chat), **settings)


def test_an_empty_source_is_refused(build):
    with pytest.raises(UserError, match="has no rows: write prompts into it"):
        build([], byte_tokenizer())


def test_changed_bytes_are_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps(row("hello")))
    sha, data = materialize(Prompts(uri="file://p.jsonl"), byte_tokenizer(), base_dir=tmp_path, max_prompt_tokens=9)
    store = MemoryStore()
    with pytest.raises(NotFound):
        load_prompt_set(store, prompts_key(sha))
    for bad in (data[:-1], data.replace(b"tba", b"tbb"), b""):
        store = MemoryStore()
        store.put_once(prompts_key(sha), bad)
        with pytest.raises(CorruptObject, match="the bytes were changed"):
            load_prompt_set(store, prompts_key(sha))


def test_a_foreign_file_under_its_own_hash_is_refused():
    store = MemoryStore()
    key = prompts_key(hashlib.sha256(b"ARROW1 foreign ARROW1").hexdigest())
    store.put_once(key, b"ARROW1 foreign ARROW1")
    with pytest.raises(CorruptObject, match="prompts/"):
        load_prompt_set(store, key)
