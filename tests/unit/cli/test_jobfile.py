import pytest
import yaml
from support.jobs import smallest

from tba.cli.jobfile import absolute_uri, load_job
from tba.contracts.errors import UserError


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(smallest()))
    return path


def refusal(path, *overrides):
    with pytest.raises(UserError) as caught:
        load_job(path, list(overrides))
    return str(caught.value)


def test_an_override_is_yaml_and_spec_is_implied(job_file):
    job = load_job(
        job_file,
        ["objective.learningRate=1e-5", "spec.searcher.engine.type=fake", "task.reward.parameters.a.b=[1, 2]",
         "metadata.name=other", "objective.total_steps=4"],
    )  # fmt: skip
    assert job.spec.objective.learning_rate == 1e-5
    assert job.spec.searcher.engine.type == "fake"
    assert job.spec.task.reward.parameters == {"a": {"b": [1, 2]}}
    assert (job.metadata.name, job.spec.objective.total_steps) == ("other", 4)


def test_parameters_of_a_reward_are_at_once_what_its_processes_will_get(job_file):
    job = load_job(job_file, ["task.reward.parameters={since: 2026-01-31, weights: {1: 0.5}}"])
    assert job.spec.task.reward.parameters == {"since": "2026-01-31", "weights": {"1": 0.5}}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("objective.lr=1", "no field 'lr' in spec.objective; known: type, temperature, beta"),
        ("objctive.beta=1", "did you mean objective?"),
        ("objective.bta=1", "did you mean objective.beta?"),
        ("objective.beta.q=1", "objective.beta has no fields below it"),
        ("objective.beta", "--set must be path=value, got 'objective.beta'"),
        ("objective.beta=[", "--set objective.beta, line 1, column 2: not valid YAML"),
        ("objective.beta=-1", "spec.objective.beta: must be > 0, got -1"),
    ],
)
def test_a_wrong_override_says_what_got_and_the_remedy(job_file, override, told):
    assert told in refusal(job_file, override)


def test_a_syntax_error_names_file_and_line(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("apiVersion: tba.dev/v1alpha1\nkind: TBAJob\nmetadata: {name: a\nspec:\n")
    assert refusal(path).startswith(f"{path}, line 4, column 5: not valid YAML")


def test_a_key_that_stands_twice_is_an_error(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("kind: TBAJob\nspec: {}\nkind: TBAJob\n")
    assert "line 3" in refusal(path)
    assert "key 'kind' stands here and in line 1" in refusal(path)


def test_a_mapping_that_takes_in_another_may_say_some_of_it_anew(tmp_path):
    path = tmp_path / "job.yaml"
    roles = "  trainer: &role\n    image: a\n    command: [x]\n  searcher:\n    <<: *role\n    image: b\n"
    path.write_text(yaml.safe_dump(smallest()) + roles)
    searcher = load_job(path).spec.searcher
    assert (searcher.image, searcher.command) == ("b", ["x"])


@pytest.mark.parametrize("text", ["", "- a\n", "just words\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert "must be a mapping" in refusal(path)


def test_yaml_can_make_no_objects(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("spec: !!python/object/apply:os.system ['true']\n")
    assert "not valid YAML" in refusal(path)


def test_a_missing_file_is_told(tmp_path):
    assert "cannot be read: No such file" in refusal(tmp_path / "none.yaml")


def test_relative_files_are_relative_to_the_job_file(tmp_path):
    data = smallest(model={"uri": "file://models/base"})
    data["spec"]["task"]["prompts"] = {"uri": "file://train.jsonl"}
    data["spec"]["task"]["evaluation"] = {"prompts": {"uri": "file://../test.jsonl"}}
    data["spec"]["storage"] = {"uri": "file://second"}
    data["spec"]["forkFrom"] = {"uri": "file://first", "step": 3}
    path = tmp_path / "jobs" / "job.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(data))
    spec = load_job(path).spec
    assert spec.model.uri == f"file://{tmp_path}/jobs/models/base"
    assert spec.task.prompts.uri == f"file://{tmp_path}/jobs/train.jsonl"
    assert spec.task.evaluation.prompts.uri == f"file://{tmp_path}/test.jsonl"
    assert spec.storage.uri == f"file://{tmp_path}/jobs/second"
    assert spec.fork_from.uri == f"file://{tmp_path}/jobs/first"


@pytest.mark.parametrize("uri", [None, "hf://a/b", "s3://b/x", "file:///already/absolute"])
def test_other_uris_stay(tmp_path, uri):
    assert absolute_uri(uri, tmp_path) == uri
