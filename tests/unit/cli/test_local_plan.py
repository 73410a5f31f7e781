from dataclasses import replace

import pytest
import yaml
from support.jobs import smallest

from tba.cli.local_plan import check_files, num_cores, plan
from tba.cli.local_run import lock_directory
from tba.contracts.errors import UserError


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(smallest(searcher={"replicas": 3})))
    return path


def make(job_file, **changes):
    values = {
        "overrides": [], "searchers": None, "storage": "local", "run_dir": job_file.parent / "run",
        "can_run_vllm": lambda: False,
    }  # fmt: skip
    return plan(job_file, **(values | changes))


def test_a_run_uses_a_local_directory_and_says_so(job_file):
    planned = make(job_file)
    assert planned.storage.uri == f"file://{job_file.parent}/run/store"
    assert planned.job.spec.storage.uri == planned.storage.uri
    assert "s3://b/run" in planned.describe()


def test_without_a_gpu_vllm_becomes_transformers_and_says_so(job_file):
    planned = make(job_file)
    assert planned.job.spec.searcher.engine.type == "transformers"
    assert "transformers is taken instead" in planned.describe()
    assert make(job_file, can_run_vllm=lambda: True).job.spec.searcher.engine.type == "vllm"


def test_the_job_decides_the_number_of_searchers_unless_told(job_file):
    assert make(job_file).searchers == 3
    assert make(job_file, searchers=1).searchers == 1


@pytest.mark.parametrize(
    ("storage", "uri"),
    [("job", "s3://b/run"), ("embedded", "s3://tba/gsm8k"), ("s3://c/d", "s3://c/d"), ("file:///x/y", "file:///x/y")],
)
def test_storage_is_chosen_by_one_word_or_a_uri(job_file, storage, uri):
    planned = make(job_file, storage=storage)
    assert planned.storage.uri == uri
    assert planned.job.spec.storage.uri == uri
    assert planned.embedded == (storage == "embedded")


def test_any_other_storage_is_refused(job_file):
    with pytest.raises(UserError, match="--storage must be local, job, embedded"):
        make(job_file, storage="ftp://x")


def test_a_folder_without_its_scheme_is_told_with_it_even_where_something_else_is_wrong_too(job_file):
    with pytest.raises(UserError, match=r"got '/a/store': a folder is file:///a/store$"):
        make(job_file, storage="/a/store", fresh=True)


@pytest.mark.parametrize("storage", ["job", "s3://other/x", "file:///a/store"])
def test_nothing_but_local_runs_is_begun_afresh(job_file, storage):
    with pytest.raises(UserError, match=f"--fresh deletes local runs only, got --storage {storage}: use"):
        make(job_file, storage=storage, fresh=True)


def test_each_process_is_a_program_of_its_own_with_its_share_of_cores(job_file):
    planned = make(job_file)
    trainer, searchers = planned.programs(port=1234, environment={"X": "1"})
    assert list(trainer.argv)[1:4] == ["-m", "tba", "trainer"]
    assert [s.name for s in searchers] == ["searcher-0", "searcher-1", "searcher-2"]
    assert trainer.env["X"] == "1"
    assert 1 <= int(trainer.env["OMP_NUM_THREADS"]) <= max(1, num_cores() // 4)


def test_a_job_of_several_gpus_trains_with_as_many_processes_here(job_file):
    argv = {n: make(job_file, overrides=[f"trainer.gpusPerNode={n}"]).programs(port=1, environment={})[0].argv
            for n in (0, 1, 3)}  # fmt: skip
    assert argv[3][argv[3].index("--ranks") + 1] == "3"
    assert "--ranks" not in [*argv[0], *argv[1]]
    assert "1 trainer of 3 ranks" in make(job_file, overrides=["trainer.gpusPerNode=3"]).describe()


def test_processes_write_timelines_only_if_asked(job_file, tmp_path):
    planned = make(job_file)
    trainer, searchers = planned.programs(port=1, environment={})
    assert "TBA_TRACE" not in trainer.env
    trainer, searchers = replace(planned, trace=tmp_path).programs(port=1, environment={})
    assert {p.env["TBA_TRACE"] for p in (trainer, *searchers)} == {str(tmp_path)}


def test_each_process_knows_its_grace_and_a_searchers_successor_finds_its_shards(job_file):
    planned = make(job_file, overrides=["searcher.terminationGracePeriodSeconds=60"])
    trainer, (searcher, *_) = planned.programs(port=1, environment={})
    assert " --grace-seconds 600" in " ".join(trainer.argv)
    assert f" --grace-seconds 45.0 --spool-dir {planned.directory}/spool --name" in " ".join(searcher.argv)
    assert searcher.grace_seconds == 60


@pytest.mark.parametrize(
    ("reward", "message"),
    [("{name: gsm9k}", "no such reward. Built in: arithmetic"), ("{configMapRef: {name: a, key: b.py}}", "a/b.py")],
)
def test_a_reward_that_does_not_exist_is_told_before_anything_starts(job_file, reward, message):
    with pytest.raises(UserError, match=message):
        make(job_file, overrides=[f"task.reward={reward}"])


@pytest.mark.parametrize(
    ("reward", "message"),
    [("{entrypoint: no_such_module:reward}", "no module"), ("{name: arithmetic, parameters: {foo: 1}}", "foo")],
)
def test_a_reward_that_cannot_be_loaded_is_told_before_anything_starts(job_file, reward, message):
    planned = make(job_file, overrides=[f"task.reward={reward}"])
    with pytest.raises(UserError, match=message):
        planned.check_reward()
    make(job_file, overrides=[f"task.reward={reward}"], searchers=0).check_reward()


@pytest.mark.parametrize("field", ["task.prompts", "task.evaluation.prompts"])
def test_prompts_of_a_config_map_are_told_to_need_a_cluster_before_anything_starts(job_file, field, monkeypatch):
    monkeypatch.delenv("TBA_CONFIG_MAPS_DIR", raising=False)
    with pytest.raises(UserError, match=f"spec.{field}.configMapRef a/b.jsonl: ConfigMaps exist in a cluster only"):
        make(job_file, overrides=[f"{field}={{configMapRef: {{name: a, key: b.jsonl}}}}"])


def test_a_run_directory_that_cannot_be_made_is_the_users_to_correct(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="name another --run-dir"), lock_directory(tmp_path / "file" / "run"):
        pass


def test_a_run_without_searchers_says_whom_it_waits_for(job_file):
    assert f"tba searcher --storage file://{job_file.parent}/run/store" in make(job_file, searchers=0).describe()
    assert "waits" not in make(job_file, searchers=1).describe()


def test_a_trainer_with_a_searcher_of_its_own_waits_for_nobody_and_needs_the_reward(job_file):
    own = "trainer.colocatedSearcher.enabled=true"
    planned = make(job_file, overrides=[own], searchers=0)
    assert "1 trainer with a searcher, 0 searchers" in planned.describe() and "waits" not in planned.describe()
    trainer, _ = planned.programs(port=1, environment={})
    assert trainer.env["TBA_COLOCATED_LOG"] == str(planned.directory / "logs" / "trainer-colocated.log")
    assert trainer.env["TBA_SPOOL_DIR"] == str(planned.directory / "spool"), "its successor finds its shards"
    unbounded = [own, "buffer.maxReplayRatio=null"]
    with pytest.raises(UserError, match="it never would again: set them"):
        make(job_file, overrides=unbounded, searchers=0)
    make(job_file, overrides=unbounded, searchers=1)
    make(job_file, overrides=[*unbounded, "buffer.maxPolicyLag=4", "buffer.maxReplayLag=9"], searchers=0)
    with pytest.raises(UserError, match="no module"):
        make(job_file, overrides=[own, "task.reward={entrypoint: no_such_module:reward}"], searchers=0).check_reward()


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("task.prompts.uri=file:///nowhere/train.jsonl", "spec.task.prompts.uri"),
        ("model.uri=file:///nowhere/model", "spec.model.uri"),
        ("task.evaluation.prompts.uri=file:///nowhere/test.jsonl", "spec.task.evaluation.prompts.uri"),
    ],
)
def test_a_missing_file_is_told_before_anything_starts(job_file, override, field):
    with pytest.raises(UserError, match=rf"{field}: no such file or directory, got file:///nowhere"):
        make(job_file, overrides=[override])


def refuses(job_file, override, **changes):
    with pytest.raises(UserError, match=r"no such file or directory, .*; only a run .* can do without it$"):
        make(job_file, overrides=[override], **changes)


@pytest.mark.parametrize(
    ("override", "begun", "saved"),
    [
        ("task.prompts.uri=file:///nowhere/train.jsonl", True, False),
        ("task.evaluation.prompts.uri=file:///nowhere/test.jsonl", True, False),
        ("model.uri=file:///nowhere/model", True, True),
    ],
)
def test_a_run_is_asked_for_files_only_as_long_as_it_reads_them(job_file, override, begun, saved):
    job = make(job_file, overrides=[override], storage="file:///elsewhere").job  # where a run may be
    check_files(job, begun=begun, saved=saved)
    with pytest.raises(UserError, match=r"no such file or directory, .*; only a run .* can do without it$"):
        check_files(job, begun=begun and saved)


def test_a_fork_needs_no_model_of_its_own(job_file):
    check_files(make(job_file, overrides=["forkFrom={uri: s3://b/first, step: 3}", "model.uri=file:///nowhere/m"]).job)


def test_only_a_directory_that_has_been_run_in_can_do_without_files_and_not_if_it_is_cleared(job_file):
    override = "task.prompts.uri=file:///nowhere/train.jsonl"
    for storage in ("local", "embedded"):
        refuses(job_file, override, storage=storage)
    (job_file.parent / "run").mkdir()
    (job_file.parent / "run" / "storage.json").touch()
    assert make(job_file, overrides=[override]).storage.uri.endswith("/run/store")
    refuses(job_file, override, fresh=True)


def test_a_claim_of_a_cluster_cannot_be_used_here(job_file):
    with pytest.raises(UserError, match="exists in a cluster only"):
        make(job_file, overrides=["model.uri=pvc://claim/model"])


def test_two_runs_cannot_share_a_directory(tmp_path):
    refused = pytest.raises(UserError, match=r"in use by another `tba run` \(pid \d+\)")
    with lock_directory(tmp_path), refused, lock_directory(tmp_path):
        pass
    with lock_directory(tmp_path):
        pass


def test_each_process_sees_its_own_gpus_and_sharing_is_told(job_file):
    planned = make(job_file, gpus=["0", "1"], can_run_vllm=lambda: True)
    trainer, searchers = planned.programs(port=1, environment={})
    assert [p.env["CUDA_VISIBLE_DEVICES"] for p in (trainer, *searchers)] == ["0", "1", "1", "1"]
    said = planned.describe()
    assert "GPUs       trainer 0, searcher-0 1" in said and "kv_cache_memory_bytes" in said
    fixed = ["searcher.engine.extraArgs.kv_cache_memory_bytes=3221225472"]
    assert "kv_cache" not in make(job_file, gpus=["0", "1"], can_run_vllm=lambda: True, overrides=fixed).describe()
    trainer, _ = make(job_file, gpus=[]).programs(port=1, environment={})
    assert "CUDA_VISIBLE_DEVICES" not in trainer.env
