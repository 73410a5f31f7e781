"""Sources of prompts: every format gives the same rows; every fault names its row, what it got and the remedy."""

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory_store import MemoryStore

from tba.contracts.config import ConfigMapRef, Prompts
from tba.contracts.errors import StoreUnavailable, UserError
from tba.prompts import RawPrompt, read_prompts
from tba.prompts.read import iterate_prompts

GSM8K = Path(__file__).parents[3] / "examples" / "gsm8k"
ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}, {"question": "1+1?", "answer": "2"}]
EXPECTED = [RawPrompt(r["question"], r["answer"]) for r in ROWS]


def lines(rows) -> bytes:
    return "\n".join(json.dumps(r) for r in rows).encode()


def read(folder: Path, name: str, data: bytes, **settings) -> list[RawPrompt]:
    (folder / name).write_bytes(data)
    limit = settings.pop("limit", None)
    return read_prompts(Prompts(uri=f"file://{name}", **settings), base_dir=folder, limit=limit)


@pytest.mark.parametrize(("name", "count"), [("train", 7473), ("test", 1319)])
def test_every_row_of_gsm8k_is_read(name, count):
    prompts = read_prompts(Prompts(uri=f"file://{name}.jsonl.gz"), base_dir=GSM8K)
    assert len(prompts) == count
    assert all(p.text and "#### " in p.answer for p in prompts)


def test_json_lines_gzip_and_parquet_hold_the_same_rows(tmp_path):
    assert read(tmp_path, "a.jsonl", lines(ROWS) + b"\n\n") == EXPECTED
    assert read(tmp_path, "a.jsonl.gz", gzip.compress(lines(ROWS))) == EXPECTED
    assert read(tmp_path, "b.jsonl", gzip.compress(lines(ROWS))) == EXPECTED  # by content, not by name
    assert read(tmp_path, "c.json", b"\xef\xbb\xbf" + lines(ROWS)) == EXPECTED
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    assert read(tmp_path, "d.parquet", (tmp_path / "d.parquet").read_bytes()) == EXPECTED


def test_an_absolute_path_needs_no_base(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    assert read_prompts(Prompts(uri=f"file://{tmp_path}/a.jsonl"), base_dir=Path("/nowhere")) == EXPECTED


def test_a_limit_reads_no_further(tmp_path):
    assert read(tmp_path, "a.jsonl", lines(ROWS[:2]) + b"\nnot json", limit=2) == EXPECTED[:2]


def test_an_object_of_a_bucket_is_read_through_its_parent():
    store = MemoryStore()
    store.put_once("train.jsonl", lines(ROWS))
    opened = []

    def open_store(uri):
        opened.append(uri)
        return store

    config = Prompts(uri="s3://data/gsm8k/train.jsonl")
    assert read_prompts(config, base_dir=Path(), open_store=open_store) == EXPECTED
    assert opened == ["s3://data/gsm8k"]
    with pytest.raises(UserError, match="no such object"):
        read_prompts(Prompts(uri="s3://data/gsm8k/x.jsonl"), base_dir=Path(), open_store=open_store)
    with pytest.raises(UserError, match="must name one object"):
        read_prompts(Prompts(uri="s3://data"), base_dir=Path(), open_store=open_store)


def test_a_data_set_of_the_hub_is_read(tmp_path, monkeypatch):
    import datasets

    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_bytes(lines(ROWS))
    monkeypatch.chdir(tmp_path)  # a folder of that name is what load_dataset takes before it asks the hub
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert read_prompts(Prompts(uri="hf://org/name", split="test"), base_dir=tmp_path) == EXPECTED
    with pytest.raises(UserError, match="split 'train' cannot be loaded"):
        read_prompts(Prompts(uri="hf://org/name"), base_dir=tmp_path)
    with pytest.raises(UserError, match="hf://org/name"):
        read_prompts(Prompts(uri="hf://name"), base_dir=tmp_path)


def test_a_hub_out_of_reach_is_no_user_error(monkeypatch):
    import datasets

    def unreachable(*args, **kwargs):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(StoreUnavailable, match="offline"):
        read_prompts(Prompts(uri="hf://org/name"), base_dir=Path())


def test_chat_messages_are_kept_and_named_by_the_last_one(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi", "name": "x"}]
    (prompt,) = read(tmp_path, "a.jsonl", lines([{"question": messages, "answer": None}]))
    assert prompt.content == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert (prompt.text, prompt.answer) == ("Hi", None)


@pytest.mark.parametrize(
    ("answer", "text"),
    [(72, "72"), (0.5, "0.5"), (True, "true"), (["b", "a"], '["b", "a"]'), ({"b": 1, "a": "é"}, '{"a": "é", "b": 1}')],
)
def test_an_answer_becomes_text(tmp_path, answer, text):
    assert read(tmp_path, "a.jsonl", lines([{"question": "q", "answer": answer}]))[0].answer == text


@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.none() | st.integers()), max_size=5))
def test_any_text_survives(tmp_path_factory, pairs):
    rows = [{"question": q, "answer": a} for q, a in pairs]
    found = read(tmp_path_factory.mktemp("p"), "a.jsonl", lines(rows))
    assert found == [RawPrompt(q, None if a is None else str(a)) for q, a in pairs]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lines([{"prompt": "q", "text": "a"}]), "line 1 .* no column 'question'; its columns are: prompt, text. Set"),
        (lines([ROWS[0], {"question": "q"}]), "line 2 .* no column 'answer'; .* or set it to null"),
        (b"\n\n" + lines([{"question": 7}]), "line 3 of file://a.jsonl"),
        (lines([{"question": 7, "answer": "a"}]), "neither text nor a list of messages"),
        (lines([{"question": [], "answer": "a"}]), "neither text nor a list of messages"),
        (lines([{"question": [{"role": "user"}], "answer": "a"}]), "neither text nor a list of messages"),
        (b'{"question": "\\ud800", "answer": "a"}', "not valid Unicode"),
        (lines([ROWS[0]]) + b"\n{oops", "line 2 is not JSON"),
        (b"[1]", "line 1 holds a list"),
        (b"\xff\xfe", "line 1 is not JSON"),
        (gzip.compress(lines(ROWS), mtime=0)[:-9], "damaged gzip"),  # the bytes are in the name of the test
    ],
)
def test_a_bad_row_is_named(tmp_path, data, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, "a.jsonl", data)


def test_a_bad_row_of_a_parquet_file_is_named_by_its_number(tmp_path):
    rows = [*ROWS * 500, {"question": "q", "answer": "a"}, {"question": None, "answer": "a"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="row 1502 of file://a.parquet is neither text"):
        read(tmp_path, "a.parquet", (tmp_path / "a.parquet").read_bytes())


def test_only_of_a_relative_path_is_told_where_it_starts(tmp_path):
    with pytest.raises(UserError, match="a relative path starts at the folder of the job file"):
        read_prompts(Prompts(uri="file://missing.jsonl"), base_dir=tmp_path)
    with pytest.raises(UserError, match=f"no file {tmp_path}/missing.jsonl: check the path"):
        read_prompts(Prompts(uri=f"file://{tmp_path}/missing.jsonl"), base_dir=tmp_path)


def test_a_file_that_is_not_parquet_is_named(tmp_path):
    with pytest.raises(UserError, match="not a readable Parquet"):
        read(tmp_path, "a.parquet", b"PAR1 or not")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Prompts(uri="file://missing.jsonl"), "no file"),
        (Prompts(uri="file://."), "no file"),
        (Prompts(uri="pvc://claim/x.jsonl"), "pvc:// exists in a cluster only"),
        (
            Prompts(config_map_ref=ConfigMapRef(name="a", key="b")),
            "ConfigMaps exist in a cluster only.*set prompts.uri",
        ),
    ],
)
def test_a_source_that_cannot_be_read_here_is_refused(tmp_path, config, message):
    with pytest.raises(UserError, match=message):
        read_prompts(config, base_dir=tmp_path)


@pytest.mark.parametrize(("key", "pack"), [("train.jsonl", None), ("train.jsonl.gz", gzip.compress)])
def test_prompts_of_a_config_map_are_read_where_the_cluster_mounts_them(tmp_path, monkeypatch, key, pack):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / key).write_bytes((pack or bytes)(lines(ROWS)))
    monkeypatch.setenv("TBA_CONFIG_MAPS_DIR", str(tmp_path))
    config = Prompts(config_map_ref=ConfigMapRef(name="data", key=key))
    assert len(read_prompts(config, base_dir=tmp_path)) == len(ROWS)


def test_a_bad_row_of_a_config_map_is_named_by_map_and_key(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{oops")
    monkeypatch.setenv("TBA_CONFIG_MAPS_DIR", str(tmp_path))
    config = Prompts(config_map_ref=ConfigMapRef(name="data", key="train.jsonl"))
    with pytest.raises(UserError, match="configMapRef data/train.jsonl line 1 is not JSON"):
        read_prompts(config, base_dir=tmp_path)


def test_prompts_of_a_volume_claim_are_read_where_the_cluster_mounts_it(tmp_path, monkeypatch):
    (tmp_path / "claim" / "gsm8k").mkdir(parents=True)
    (tmp_path / "claim" / "gsm8k" / "train.jsonl").write_bytes(lines(ROWS))
    monkeypatch.setenv("TBA_PVC_DIR", str(tmp_path))
    found = read_prompts(Prompts(uri="pvc://claim/gsm8k/train.jsonl"), base_dir=tmp_path)
    assert len(found) == len(ROWS)


def test_a_data_set_of_the_hub_is_asked_for_with_the_token_that_was_given(tmp_path, monkeypatch):
    asked = {}
    hub = ModuleType("datasets")
    hub.load_dataset = lambda *names, **options: asked.update(options, names=names) or ROWS  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    config = Prompts(uri="hf://org/name@v1/main")
    found = list(iterate_prompts(config, base_dir=tmp_path, token="secret"))
    assert len(found) == len(ROWS)
    assert asked == {"names": ("org/name", "main"), "split": "train", "revision": "v1", "token": "secret"}


def test_an_unknown_file_type_is_refused(tmp_path):
    with pytest.raises(UserError, match="name it .jsonl"):
        read(tmp_path, "a.csv", b"question,answer")
