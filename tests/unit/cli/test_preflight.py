"""`tba run --dry-run` meets what the trainer would refuse in its first minute."""

import gzip
import json
import shutil

import pytest
import yaml
from support.jobs import smallest
from support.tiny_models import save_tiny

from tba.cli import main
from tba.store import RetryPolicy, open_store


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "m", tied=True)


@pytest.fixture
def dry_run(tmp_path, tiny, capsys):
    """Dry-run a job over a tiny model and two prompts, after overrides; returns code, stdout, stderr."""
    shutil.copytree(tiny, tmp_path / "model")
    write(tmp_path / "train.jsonl", [{"question": "1+2=", "answer": "3"}, {"question": "4+4=", "answer": "8"}])
    job = smallest(
        model={"uri": "file://model", "maxModelLen": 16, "dtype": "float32"},
        task={
            "prompts": {"uri": "file://train.jsonl"},
            "reward": {"name": "arithmetic"},
            "sampling": {"maxTokens": 4},
        },
        objective={"promptsPerBatch": 2},
    )
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))

    def run(*overrides, options=()):
        given = [part for override in overrides for part in ("--set", override)]
        with pytest.raises(SystemExit) as ended:
            main(["run", str(tmp_path / "job.yaml"), "--dry-run", "--run-dir", str(tmp_path / "run"), *given, *options])
        told = capsys.readouterr()
        return ended.value.code, told.out, told.err

    return run


def write(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_a_sound_job_says_what_was_looked_at_and_what_was_not(dry_run, tmp_path):
    code, out, _ = dry_run()
    assert code == 0
    assert f"checked    model.uri file://{tmp_path}/model: configuration and tokenizer" in out
    assert f"checked    task.prompts file://{tmp_path}/train.jsonl: 2 prompts, 4 tokens the first" in out
    assert "unchecked  weights: the run reads them" in out
    assert not (tmp_path / "run").exists()
    document = json.loads(dry_run(options=["--json"])[1])
    assert len(document["checked"]) == 2 and document["job"]["spec"]["model"]["maxModelLen"] == 16


def test_a_wrong_column_is_told_with_those_that_are_there(dry_run):
    code, _, err = dry_run("task.prompts.promptField=prompt")
    assert code == 64 and "has no column 'prompt'; its columns are: answer, question" in err


@pytest.mark.parametrize("field", ["task.prompts", "task.evaluation.prompts"])
@pytest.mark.parametrize("name", ["none.jsonl", "none.jsonl.gz"])
def test_an_empty_file_is_told(dry_run, tmp_path, field, name):
    empty = write(tmp_path / name, [])
    code, _, err = dry_run(f"{field}={{uri: 'file://{empty}'}}")
    assert code == 64 and f"file://{empty} has no rows" in err


def test_prompts_that_are_all_too_long_and_fewer_than_a_batch_are_told(dry_run):
    assert "no usable prompt" in dry_run("model.maxModelLen=6", "task.sampling.maxTokens=4")[2]
    assert "(P) must be <= the number of prompts, got 3 > 2" in dry_run("objective.promptsPerBatch=3")[2]


def test_a_template_that_cannot_be_filled_in_is_told(dry_run):
    assert "prompts.template cannot be filled in" in dry_run("task.prompts.template='{prompt} {text}'")[2]


def test_a_folder_without_a_configuration_or_without_weights_is_told(dry_run, tmp_path):
    (tmp_path / "model" / "model.safetensors").unlink()
    code, _, err = dry_run()
    assert code == 64 and "has no *.safetensors weights that load (there are none): convert it" in err
    (tmp_path / "model" / "config.json").unlink()
    code, _, err = dry_run()
    assert code == 64 and "has no config.json: name a directory in Hugging Face format" in err


@pytest.mark.parametrize(
    ("kind", "message"),
    [("vit", "no causal language model that transformers knows, got model type 'vit'"), ("nonesuch", "does not know")],
)
def test_a_model_that_cannot_be_trained_is_told(dry_run, tmp_path, kind, message):
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": kind, "architectures": None}))
    code, _, err = dry_run()
    assert code == 64 and message in err


def test_adapters_on_modules_that_are_not_there_are_told(dry_run):
    code, _, err = dry_run("model.lora={rank: 2, targetModules: [query]}", "objective.reference.type=Fixed")
    assert code == 64 and "no module is named ['query']: choose among" in err


def test_a_model_of_the_hub_that_cannot_be_reached_is_said_not_to_be_checked(dry_run, monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    code, out, _ = dry_run("model.uri=hf://a/b")
    assert code == 0
    assert (
        "unchecked  model: model.uri hf://a/b could not be reached" in out
        and "unchecked  task.prompts: no tokenizer" in out
    )


def test_a_data_set_of_the_hub_is_not_downloaded_for_a_look(dry_run):
    code, out, _ = dry_run("task.prompts.uri=hf://a/b")
    assert code == 0 and "unchecked  task.prompts.uri hf://a/b: the run downloads it whole" in out


def test_objects_are_read_through_the_jobs_storage_if_they_are_small(dry_run, tmp_path, monkeypatch):
    folder = tmp_path / "bucket"
    monkeypatch.setattr("tba.cli.preflight.open_address", lambda target: open_store(f"file://{folder}"))
    store = open_store(f"file://{folder}")
    store.put_once("train.jsonl", (tmp_path / "train.jsonl").read_bytes())
    assert "task.prompts s3://b/train.jsonl: 2 prompts" in dry_run("task.prompts.uri=s3://b/train.jsonl")[1]
    code, _, err = dry_run("task.prompts.uri=s3://b/other.jsonl")
    assert code == 64 and "s3://b/other.jsonl: no such object" in err
    monkeypatch.setattr("tba.cli.preflight._CHEAP_BYTES", 10)
    assert "it is there, and 0 MB are not read twice" in dry_run("task.prompts.uri=s3://b/train.jsonl")[1]


def test_storage_that_this_machine_cannot_reach_is_no_fault_of_the_job(dry_run, monkeypatch):
    monkeypatch.setattr("tba.cli.target.ATTENDED", RetryPolicy(budget_seconds=0.1))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    code, out, _ = dry_run("task.prompts.uri=s3://b/train.jsonl")
    assert code == 0 and "unchecked  task.prompts.uri s3://b/train.jsonl: storage did not serve" in out
    code, out, _ = dry_run("task.prompts.uri=s3://b/train.jsonl", options=["--storage", "embedded"])
    assert code == 0 and "s3://b/train.jsonl: the run starts that server" in out
