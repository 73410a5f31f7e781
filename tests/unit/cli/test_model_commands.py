"""export and eval with a tiny model published to a local store."""

import json

import pytest
import torch
from support.synthetic_run import latest, run_record
from support.tiny_models import save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.cli import main
from tba.cli.evaluate import summarise
from tba.contracts import keys
from tba.contracts.config import Model
from tba.models import load_model, weight_tensors
from tba.snapshots import publish_snapshot
from tba.store import open_store


@pytest.fixture
def run_uri(tmp_path):
    """Version 0 with assets, then version 2 without, of a tiny model whose weights differ by a known shift."""
    folder = save_tiny(tmp_path / "base", tied=True)
    loaded = load_model(Model(uri=f"file://{folder}", dtype="float32"), base_dir=tmp_path)
    store = open_store(f"file://{tmp_path}/store")
    first, second = keys.WeightsKey(0, 1, "0" * 32), keys.WeightsKey(2, 1, "1" * 32)
    tensors = weight_tensors(loaded.model)
    publish_snapshot(store, first, tensors, assets=loaded.assets, parent=None, evaluation=None)
    shifted = {n: t + 0.5 if t.dtype.is_floating_point else t for n, t in tensors.items()}
    publish_snapshot(store, second, shifted, assets={}, parent=first.path, evaluation=None)
    record = run_record()
    config = record.config.model_copy(
        update={"model": Model(uri=f"file://{folder}", dtype="float32", max_model_len=32)},
    )
    store.put_once(keys.RUN, record.model_copy(update={"config": config}).to_json())
    store.cas(keys.LATEST, latest(version=2, step=2, manifest=second.path).to_json(), None)
    store.close()
    return f"file://{tmp_path}/store"


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(4)))
    return path


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


@pytest.mark.parametrize(("version", "shift"), [("0", 0.0), ("2", 0.5), (None, 0.5)])
def test_an_exported_directory_loads_in_transformers_with_the_weights_of_its_version(
    run_uri, tmp_path, capsys, version, shift
):
    chosen = ["--step", version] if version else []
    code, _, err = run(capsys, "export", run_uri, *chosen, "-o", str(tmp_path / "out"))
    assert code == 0, err
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    for (name, got), want in zip(exported.named_parameters(), base.parameters(), strict=True):
        torch.testing.assert_close(got, want + shift, msg=name)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("1+1=")["input_ids"] == [1, 10, 1, 11]


def test_a_version_that_is_not_there_names_those_that_are(run_uri, tmp_path, capsys):
    code, _, err = run(capsys, "export", run_uri, "--step", "1", "-o", str(tmp_path / "out"))
    assert code == 64
    assert "no snapshot of version 1" in err
    assert "[0, 2]" in err


def test_an_export_never_mixes_with_what_is_there(run_uri, tmp_path, capsys):
    assert run(capsys, "export", run_uri, "-o", str(tmp_path / "base"))[0] == 64


def test_inspect_lists_both_snapshots_newest_first(run_uri, capsys):
    rows = json.loads(run(capsys, "inspect", "snapshots", run_uri, "--json")[1])
    assert [r["version"] for r in rows] == [2, 0]
    assert [r["assets"] > 0 for r in rows] == [False, True]


def test_a_run_and_its_exported_directory_get_the_same_score(run_uri, prompts, tmp_path, capsys):
    common = ["--prompts", str(prompts), "--reward", "arithmetic", "--max-tokens", "4", "--json"]
    code, out, err = run(capsys, "eval", run_uri, *common)
    assert code == 0, err
    of_run = json.loads(out)
    assert (of_run["version"], of_run["numPrompts"], of_run["sampling"], of_run["failed"]) == (2, 4, "greedy", 0)
    run(capsys, "export", run_uri, "-o", str(tmp_path / "out"))
    code, out, err = run(capsys, "eval", str(tmp_path / "out"), *common)
    assert code == 0, err
    of_directory = json.loads(out)
    assert of_directory["version"] is None
    assert {k: v for k, v in of_directory.items() if k != "version"} == {
        k: v for k, v in of_run.items() if k != "version"
    }


def test_samples_imply_sampling_and_greedy_takes_one(run_uri, prompts, capsys):
    common = [run_uri, "--prompts", str(prompts), "--max-tokens", "4", "--limit", "2"]
    code, out, err = run(capsys, "eval", *common, "--samples", "3", "--json")
    assert code == 0, err
    assert (json.loads(out)["sampling"], json.loads(out)["samples"], json.loads(out)["numPrompts"]) == ("sample", 3, 2)
    code, _, err = run(capsys, "eval", *common, "--samples", "3", "--sampling", "greedy")
    assert code == 64
    assert "--samples must be 1 with greedy sampling, got 3" in err


def test_a_run_without_evaluation_prompts_asks_for_some(run_uri, capsys):
    code, _, err = run(capsys, "eval", run_uri, "--max-tokens", "4")
    assert code == 64
    assert "pass --prompts FILE" in err


def test_scores_by_hand():
    result = summarise([[1, 0], [1, 1], [0, 0], []], version=3, samples=2, sampling="sample", num_tokens=[1] * 8)
    assert result.pass_at_1 == pytest.approx(0.5)
    assert result.pass_at_k == pytest.approx(2 / 3)
    assert result.standard_error == pytest.approx(0.5 / 3**0.5)
    assert (result.num_prompts, result.failed) == (3, 2)
