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
from tba.contracts.records import CheckpointManifest, IngestState, Lineage, RunRecord
from tba.models import load_model, weight_tensors
from tba.snapshots import publish_snapshot
from tba.snapshots.encode import Base, encode_delta
from tba.snapshots.publish import publish_delta
from tba.store import open_store
from tba.trainer.checkpoint import TrainerState, write_checkpoint


@pytest.fixture
def run_uri(tmp_path):
    """Version 0 with assets, then version 2 as a delta, of a tiny model whose weights differ by a known shift."""
    folder = save_tiny(tmp_path / "base", tied=True)
    loaded = load_model(Model(uri=f"file://{folder}", dtype="float32"), base_dir=tmp_path)
    store = open_store(f"file://{tmp_path}/store")
    first, second = keys.WeightsKey(0, 1, "0" * 32), keys.WeightsKey(2, 1, "1" * 32)
    tensors = weight_tensors(loaded.model)
    anchor = publish_snapshot(store, first, tensors, assets=loaded.assets, parent=None, evaluation=None)
    shifted = {n: t + 0.5 if t.dtype.is_floating_point else t for n, t in tensors.items()}
    delta = encode_delta(Base(first.path, anchor, tensors), shifted, max_bytes=float("inf"))
    assert delta is not None
    publish_delta(store, second, delta, parent=first.path, evaluation=None)
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


@pytest.fixture
def checkpoint(run_uri, tmp_path):
    """A checkpoint of step 1, whose snapshot is not there: weights shifted by a third, which bfloat16 cannot hold."""
    tensors = weight_tensors(load_model(Model(uri=f"file://{tmp_path}/base"), base_dir=tmp_path).model)
    shifted = {n: t + 1 / 3 if t.dtype.is_floating_point else t for n, t in tensors.items()}
    manifest = CheckpointManifest(
        epoch=1, step=1, nonce="2" * 32, parent=None, files=[], ingest=IngestState(), lineage=Lineage(),
        ingest_log_seq=0, metrics_log_seq=0, wall_seconds=1.0,
    )  # fmt: skip
    store = open_store(run_uri)
    write_checkpoint(store, manifest, TrainerState({"master": shifted, "optimizer": {}}, {}))
    store.close()
    return shifted


def set_dtype(run_uri, dtype):
    store = open_store(run_uri)
    record = RunRecord.model_validate_json(store.get(keys.RUN).data)
    model = record.config.model.model_copy(update={"dtype": dtype})
    store.delete([keys.RUN])
    config = record.config.model_copy(update={"model": model})
    store.put_once(keys.RUN, record.model_copy(update={"config": config}).to_json())
    store.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_without_a_snapshot_is_exported_from_its_checkpoint_in_the_dtype_of_the_run(
    run_uri, checkpoint, dtype, tmp_path, capsys
):
    set_dtype(run_uri, dtype)
    code, out, err = run(capsys, "export", run_uri, "--step", "1", "-o", str(tmp_path / "out"))
    assert code == 0, err
    assert "wrote version 1 (epoch 1, " in out and "from its checkpoint" in out
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, checkpoint[name].to(getattr(torch, dtype))), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("1+1=")["input_ids"] == [1, 10, 1, 11]


def test_a_version_that_is_not_there_names_those_that_are(run_uri, checkpoint, tmp_path, capsys):
    code, _, err = run(capsys, "export", run_uri, "--step", "3", "-o", str(tmp_path / "out"))
    assert code == 64
    assert "no snapshot of version 3" in err
    assert "there are [0, 2], and checkpoints of steps [1]" in err


def test_weights_that_a_later_trainer_rolled_back_are_exported_for_no_step(run_uri, checkpoint, tmp_path, capsys):
    store = open_store(run_uri)
    before = store.get(keys.LATEST).etag
    of_step_1 = keys.CheckpointKey(1, 1, "2" * 32).path
    store.cas(keys.LATEST, latest(epoch=2, version=1, step=1, manifest=None, checkpoint=of_step_1).to_json(), before)
    store.close()
    code, _, err = run(capsys, "export", run_uri, "--step", "2", "-o", str(tmp_path / "out"))
    assert code == 64
    assert "no snapshot of version 2" in err and "checkpoints of steps [1]" in err
    assert run(capsys, "export", run_uri, "--step", "1", "-o", str(tmp_path / "out"))[0] == 0


def test_a_damaged_snapshot_is_told_without_a_traceback(run_uri, tmp_path, capsys):
    store = open_store(run_uri)
    key = f"{keys.WeightsKey(2, 1, '1' * 32).prefix}delta-00000.safetensors"
    data = bytearray(store.get(key).data)
    data[-1] ^= 1
    store.delete([key])
    store.put_once(key, bytes(data))
    store.close()
    code, _, err = run(capsys, "export", run_uri, "-o", str(tmp_path / "out"))
    assert (code, err.count("error: "), "Traceback" in err) == (1, 1, False)
    assert key in err


def test_an_export_never_mixes_with_what_is_there(run_uri, tmp_path, capsys):
    (tmp_path / "file").touch()
    for taken in ("base", "file"):
        assert run(capsys, "export", run_uri, "-o", str(tmp_path / taken))[0] == 64


def test_an_export_to_where_nothing_can_be_made_is_refused_without_a_traceback(run_uri, capsys):
    code, _, err = run(capsys, "export", run_uri, "-o", "/proc/x")
    assert (code, err.count("\n")) == (64, 1)
    assert err.startswith("error: --output /proc/x cannot be written (no such file or directory): name a path")


def test_inspect_lists_both_snapshots_newest_first(run_uri, capsys):
    rows = json.loads(run(capsys, "inspect", "snapshots", run_uri, "--json")[1])
    assert [r["version"] for r in rows] == [2, 0]
    assert [r["assets"] > 0 for r in rows] == [False, True]
    assert [(r["encoding"], r["depth"]) for r in rows] == [("delta", 1), ("full", 0)]


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


def test_a_model_directory_is_computed_in_float32_on_a_cpu_unless_told_otherwise(
    run_uri, prompts, tmp_path, capsys, monkeypatch
):
    used = []
    monkeypatch.setattr("tba.cli.evaluate.evaluate", lambda _s, _p, task, **_: used.append(task.model.dtype))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    common = ["--prompts", str(prompts), "--reward", "arithmetic", "--max-tokens", "4"]
    for target, chosen in ((str(tmp_path / "base"), []), (str(tmp_path / "base"), ["--dtype", "bfloat16"]),
                           (run_uri, []), (run_uri, ["--dtype", "bfloat16"])):  # fmt: skip
        run(capsys, "eval", target, *common, *chosen)
    assert used == ["float32", "bfloat16", "float32", "bfloat16"]


def test_prompts_with_columns_of_other_names_are_read_once_the_command_line_names_them(
    run_uri, prompts, tmp_path, capsys
):
    prompts.write_text(prompts.read_text().replace("question", "problem").replace("answer", "gold"))
    common = ["eval", str(tmp_path / "base"), "--prompts", str(prompts), "--reward", "arithmetic", "--max-tokens", "4"]
    code, _, err = run(capsys, *common)
    assert (code, "no column 'question'" in err, "--prompt-field" in err) == (64, True, True)
    code, _, err = run(capsys, *common, "--prompt-field", "problem")
    assert (code, "no column 'answer'" in err, "--answer-field" in err) == (64, True, True)
    code, out, err = run(capsys, *common, "--prompt-field", "problem", "--answer-field", "gold", "--json")
    assert code == 0, err
    assert json.loads(out)["failed"] == 0


@pytest.mark.parametrize(
    ("given", "lacking"),
    [
        ([], "pass --prompts FILE and --reward NAME\n"),
        (["--prompts", "test.jsonl"], "pass --reward NAME\n"),
        (["--reward", "arithmetic"], "pass --prompts FILE\n"),
    ],
)
def test_of_a_model_directory_only_what_is_lacking_is_asked_for(run_uri, tmp_path, capsys, given, lacking):
    code, _, err = run(capsys, "eval", str(tmp_path / "base"), *given)
    assert code == 64 and err.endswith(lacking)


def test_columns_without_a_file_of_prompts_are_refused(run_uri, capsys):
    code, _, err = run(capsys, "eval", run_uri, "--prompt-field", "problem", "--max-tokens", "4")
    assert (code, "pass --prompts FILE" in err) == (64, True)


def test_a_model_directory_has_no_steps(run_uri, tmp_path, prompts, capsys):
    given = ["--prompts", str(prompts), "--reward", "arithmetic", "--max-tokens", "4"]
    code, _, err = run(capsys, "eval", str(tmp_path / "base"), *given, "--step", "3")
    assert code == 64 and "--step names weights of a run" in err


def test_samples_imply_sampling_and_greedy_takes_one(run_uri, prompts, capsys):
    common = [run_uri, "--prompts", str(prompts), "--max-tokens", "4", "--limit", "2"]
    code, out, err = run(capsys, "eval", *common, "--samples", "3", "--json")
    assert code == 0, err
    assert (json.loads(out)["sampling"], json.loads(out)["samples"], json.loads(out)["numPrompts"]) == ("sample", 3, 2)
    code, _, err = run(capsys, "eval", *common, "--samples", "3", "--sampling", "greedy")
    assert code == 64
    assert "--samples must be 1 with greedy sampling, got 3" in err


def test_without_any_reward_there_is_no_score_but_the_reason(run_uri, prompts, capsys):
    given = ["--prompts", str(prompts), "--answer-field", "", "--reward", "arithmetic", "--max-tokens", "4"]
    code, out, err = run(capsys, "eval", run_uri, *given, "--limit", "2", "--json")
    assert (code, out) == (64, "")
    assert "none of 2 responses could be scored, so there is no score: ValueError: this reward needs an answer" in err


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
