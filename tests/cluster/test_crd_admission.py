"""The CustomResourceDefinition on a real API server: every case of every rule, defaults, columns, /scale, typos."""

import json
import re
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import yaml
from support.crd_cases import job_with, named, spec, tries
from support.kube_cluster import until

ROOT = Path(__file__).parents[2]
CRD_NAME = "tbajobs.tba.dev"
CRD = ROOT / "crds" / f"{CRD_NAME}.yaml"


def kubectl(kubeconfig, *arguments, data=None, text=None):
    """kubectl with its output as text; `text` goes in as it is, `data` as JSON."""
    return subprocess.run(
        ["kubectl", f"--kubeconfig={kubeconfig}", *arguments],
        input=text if data is None else json.dumps(data),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="module")
def api(kubeconfig):
    """kubectl in a namespace of this module, with the CRD installed; a chart that comes later finds no CRD."""
    bare = partial(kubectl, kubeconfig)
    was_there = bare("get", "crd", CRD_NAME).returncode == 0
    installed = bare("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    assert installed.returncode == 0, installed.stderr
    # `kubectl wait` would end with an error while a CRD that has just been made has no conditions at all.
    until("the CRD is served", lambda: bare("get", "tbajobs", "-A").returncode == 0, seconds=30)
    namespace = f"crd-{time.time_ns() % 10**9}"
    assert bare("create", "namespace", namespace).returncode == 0
    yield partial(kubectl, kubeconfig, f"--namespace={namespace}")
    bare("delete", "namespace", namespace, "--wait=false")
    if not was_there:
        bare("delete", "crd", CRD_NAME)


@pytest.fixture
def store(api):
    """Creates a job and removes it afterwards; gives it as stored."""
    names = []

    def create(data):
        done = api("create", "-o", "json", "-f", "-", data=data)
        assert done.returncode == 0, done.stderr
        names.append(data["metadata"]["name"])
        return json.loads(done.stdout)

    yield create
    for name in names:
        api("delete", "tbajob", name)


def try_new(api, data):
    return api("create", "--dry-run=server", "-o", "json", "-f", "-", data=data)


def refusal(api, *patches):
    done = try_new(api, job_with(*patches))
    assert done.returncode != 0, done.stdout
    return done.stderr


def accepted(api, *patches):
    done = try_new(api, job_with(*patches))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("job", "told"), [(j, t) for _, stored, j, t in tries() if stored is None], ids=lambda v: str(v)[-60:]
)
def test_a_new_job_is_accepted_or_told_why_not(api, job, told):
    done = try_new(api, job)
    assert (done.returncode == 0) is (told is None), done.stderr
    assert (told or "") in done.stderr


@pytest.mark.parametrize(
    ("stored", "job", "told"), [(s, j, t) for _, s, j, t in tries() if s is not None], ids=lambda v: str(v)[-60:]
)
def test_a_change_is_accepted_or_told_why_not(api, store, stored, job, told):
    version = store(stored)["metadata"]["resourceVersion"]
    changed = job | {"metadata": job["metadata"] | {"resourceVersion": version}}
    done = api("replace", "--dry-run=server", "-f", "-", data=changed)
    assert (done.returncode == 0) is (told is None), done.stderr
    assert (told or "") in done.stderr


def test_the_stored_job_has_every_default(api):
    stored = accepted(api)["spec"]
    assert (stored["suspend"], stored["managedBy"]) == (False, "tba.dev/tbajob-controller")
    assert stored["objective"]["responsesPerPrompt"] == 20
    assert stored["objective"]["optimizer"]["maxGradNorm"] == "auto"
    assert stored["searcher"]["replicas"] == 1
    assert stored["storage"]["checkpoints"]["everySteps"] == 50
    assert "lora" not in stored["model"]


def test_an_explicit_null_means_no_limit_and_no_default(api):
    data = job_with()
    data["spec"] |= {"buffer": {"maxReplayRatio": None}, "objective": {"optimizer": {"maxGradNorm": None}}}
    data["spec"]["model"] |= {"revision": None}
    done = try_new(api, data)
    assert done.returncode == 0, done.stderr
    stored = json.loads(done.stdout)["spec"]
    assert stored["buffer"]["maxReplayRatio"] is None
    assert stored["objective"]["optimizer"]["maxGradNorm"] is None
    assert "revision" not in stored["model"]


@pytest.mark.parametrize(
    ("patch", "field"),
    [
        (spec(objective={"responsePerPrompt": 8}), "spec.objective.responsePerPrompt"),
        (spec(sercher={"replicas": 3}), "spec.sercher"),
        (spec(trainer={"resources": {"limit": {"cpu": 1}}}), "spec.trainer.resources.limit"),
        (spec(objective={"parameters": {"ratioAlhpa": 1}}), "spec.objective.parameters.ratioAlhpa"),
        (spec(searcher={"podTemplate": {"metadata": {"lables": {}}}}), "spec.searcher.podTemplate.metadata.lables"),
    ],
)
def test_a_misspelt_field_is_named(api, patch, field):
    assert f'unknown field "{field}"' in refusal(api, patch)


@pytest.mark.parametrize(
    ("patch", "told"),
    [
        (spec(objective={"beta": -1}), "spec.objective.beta in body should be greater than 0"),
        (spec(objective={"responsesPerPrompt": 1}), "spec.objective.responsesPerPrompt in body should be greater"),
        (spec(objective={"totalSteps": 1.5}), "spec.objective.totalSteps"),
        (spec(objective={"parameters": {"ratioAlpha": 2}}), "spec.objective.parameters.ratioAlpha"),
        (spec(objective={"optimizer": {"betas": [0.9, 1]}}), "spec.objective.optimizer.betas[1]"),
        (spec(objective={"optimizer": {"betas": [0.9]}}), "spec.objective.optimizer.betas"),
        (spec(objective={"optimizer": {"maxGradNorm": -1}}), "spec.objective.optimizer.maxGradNorm"),
        (spec(objective={"optimizer": {"maxGradNorm": "much"}}), "spec.objective.optimizer.maxGradNorm"),
        (spec(objective={"optimizer": {"maxGradNorm": True}}), "spec.objective.optimizer.maxGradNorm"),
        (spec(searcher={"engine": {"type": "vlm"}}), 'supported values: "vllm", "transformers", "fake"'),
        (spec(searcher={"replicas": 5000}), "spec.searcher.replicas in body should be less than or equal to 4096"),
        (spec(storage={"uri": "gs://b"}), "spec.storage.uri in body should match '^(s3|file)://.+'"),
        (spec(managedBy="someone"), 'supported values: "tba.dev/tbajob-controller"'),
        (spec(trainer={"colocatedSearcher": {"enabled": "yes"}}), 'supported values: "auto", "true", "false"'),
        (spec(trainer={"resources": {"limits": {"cpu": "many"}}}), "spec.trainer.resources.limits.cpu"),
        (spec(trainer={"resources": {"limits": {"cpu": -1}}}), "spec.trainer.resources.limits.cpu"),
        (spec(trainer={"env": [{"value": "1"}]}), "spec.trainer.env[0].name: Required value"),
        (spec(trainer={"env": [{"name": "A"}, {"name": "A"}]}), "spec.trainer.env[1]: Duplicate value"),
        (spec(runPolicy={"failureRules": [{"action": "Cry", "onExitCodes": [1]}]}), "failureRules[0].action"),
        (spec(runPolicy={"failureRules": [{"action": "Count", "onExitCodes": [256]}]}), "onExitCodes[0]"),
        (spec(model=None), "spec.model: Required value"),
    ],
    ids=lambda v: str(v)[-60:],
)
def test_a_wrong_value_is_refused_with_its_field(api, patch, told):
    assert told in refusal(api, patch)


@pytest.mark.parametrize("cpu", [2, 0.5, "500m", "1e3", "16Gi"])
def test_quantities_are_written_as_in_a_pod(api, cpu):
    stored = accepted(api, spec(trainer={"resources": {"limits": {"cpu": cpu}}}))
    assert stored["spec"]["trainer"]["resources"]["limits"] == {"cpu": cpu}


def test_pod_specs_environment_and_parameters_keep_every_field(api):
    trainer = {
        "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "envFrom": [{"secretRef": {"name": "a"}}],
        "podTemplate": {"metadata": {"labels": {"a": "b"}}, "spec": {"tolerations": [{"key": "gpu"}]}},
    }
    parameters = {"weights": {"deep": [1, "two", {"three": 3.5}]}}
    stored = accepted(api, spec(trainer=trainer, task={"reward": {"parameters": parameters}}))["spec"]
    assert {k: stored["trainer"][k] for k in ("env", "envFrom")} == {k: trainer[k] for k in ("env", "envFrom")}
    assert stored["trainer"]["podTemplate"] == trainer["podTemplate"]
    assert stored["task"]["reward"]["parameters"] == parameters


def test_a_generated_name_is_judged_once_it_is_made(api):
    short, long = job_with(), job_with()
    short["metadata"], long["metadata"] = {"generateName": "a-"}, {"generateName": "a" * 39 + "-"}
    assert try_new(api, short).returncode == 0
    assert "at most 40 characters" in try_new(api, long).stderr


def jobs_of_the_examples():
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        for document in re.split(r"^---$", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            if "kind: TBAJob" in document:
                yield pytest.param(document, id=path.name)


@pytest.mark.parametrize("example", list(jobs_of_the_examples()))
def test_an_example_is_accepted_as_it_is_written(api, example):
    done = api("create", "--dry-run=server", "-o", "json", "-f", "-", text=example)
    assert done.returncode == 0, done.stderr
    # kubectl reads 1e-4 as a number, PyYAML as text.
    written = yaml.safe_load(example)["spec"].get("objective", {}).get("learningRate")
    assert json.loads(done.stdout)["spec"]["objective"].get("learningRate") == (written and float(written))


def test_kubectl_scale_changes_the_searchers_alone(api, store):
    before = store(job_with(named("scaled")))
    assert api("scale", "tbajob/scaled", "--replicas=7").returncode == 0
    after = json.loads(api("get", "tbajob", "scaled", "-o", "json").stdout)
    assert after["spec"] == before["spec"] | {"searcher": before["spec"]["searcher"] | {"replicas": 7}}
    too_many = api("scale", "tbajob/scaled", "--replicas=5000")
    assert "4096" in too_many.stderr


def test_status_is_written_apart_and_shows_in_the_columns(api, store):
    store(job_with(named("shown")))
    status = {
        "phase": "Running",
        "conditions": [
            {"type": "Degraded", "status": "True", "reason": "OOMKilled", "lastTransitionTime": "2026-11-28T00:00:00Z"}
        ],
        "searcher": {"replicas": 3, "readyReplicas": 2, "desiredReplicas": 3, "selector": "tba.dev/job-name=shown"},
        "progress": {
            "step": 12,
            "totalSteps": 700,
            "reward": 0.25,
            "stalenessMean": 3.5,
            "trainerIdlePercent": 12.5,
            "evalScore": 0.75,
        },
    }
    patched = api(
        "patch", "tbajob", "shown", "--subresource=status", "--type=merge", "-p", json.dumps({"status": status})
    )
    assert patched.returncode == 0, patched.stderr
    head, row = (line.split() for line in api("get", "tbaj", "shown", "-o", "wide").stdout.splitlines())
    shown = dict(zip(head, row, strict=True))
    assert shown.pop("AGE")
    assert shown == {
        "NAME": "shown",
        "PHASE": "Running",
        "STEP": "12",
        "OF": "700",
        "REWARD": "0.25",
        "READY": "2",
        "DESIRED": "3",
        "STALENESS": "3.5",
        "IDLE%": "12.5",
        "REASON": "OOMKilled",
        "EVAL": "0.75",
    }
    scale = json.loads(api("get", "tbajob", "shown", "--subresource=scale", "-o", "json").stdout)
    assert scale["status"] == {"replicas": 3, "selector": "tba.dev/job-name=shown"}
    assert json.loads(api("get", "tbajob", "shown", "-o", "json").stdout)["metadata"]["generation"] == 1


def test_jobs_can_be_selected_by_who_manages_them(api, store):
    store(job_with(named("ours")))
    store(job_with(named("theirs"), spec(managedBy="kueue.x-k8s.io/multikueue")))
    found = api("get", "tba", "-o", "name", "--field-selector", "spec.managedBy=kueue.x-k8s.io/multikueue")
    assert found.stdout.split() == ["tbajob.tba.dev/theirs"]


def test_kubectl_explain_tells_what_a_field_means(api):
    text = api("explain", "tbajob.spec.sync").stdout
    assert "How weights travel to searchers" in text
    assert "intervalSteps" in text
