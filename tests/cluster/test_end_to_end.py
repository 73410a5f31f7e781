"""The main job as a user runs it: helm install, kubectl apply, kubectl get -w, Complete, a report from the bucket."""

import json
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean

import pytest
from support.audit import audit
from support.kube_cluster import SCRIPTS, until
from support.tba_stack import ROOT, WORKLOAD_IMAGE, condition, example, progress


def labels_of(archive: str) -> dict[str, str]:
    """Labels in the configuration of a docker archive."""
    with tarfile.open(SCRIPTS / ".images" / archive) as tar:
        manifest = json.load(tar.extractfile("manifest.json"))
        return json.load(tar.extractfile(manifest[0]["Config"]))["config"]["Labels"]


def test_the_images_are_of_this_repository():
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    for archive, title in (("operator.tar", "tba-operator"), ("workload.tar", "tba-trainer")):
        labels = labels_of(archive)
        assert labels["org.opencontainers.image.title"] == title
        assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
        assert len(labels["org.opencontainers.image.revision"]) == len(revision)


@pytest.mark.timeout(900)
def test_a_job_runs_from_apply_to_complete(stack, base, namespace, tmp_path):
    stack.secret(namespace)
    cluster = stack.cluster
    cluster.kubectl("-n", namespace, "apply", "-f", str(ROOT / "examples/arithmetic.yaml"))
    with (
        (tmp_path / "watch").open("w") as out,
        subprocess.Popen(
            [str(cluster.bin / "kubectl"), "-n", namespace, "get", "tbajob", "-w"], env=cluster.env, stdout=out
        ) as watch,
    ):
        try:
            stack.wait_condition(namespace, "arithmetic", "SearchersReady", seconds=240)
            pods = stack.pods(namespace)
            assert {p["spec"]["containers"][0]["image"] for p in pods} == {WORKLOAD_IMAGE}
            stack.wait_condition(namespace, "arithmetic", "Complete", seconds=540)
        finally:
            watch.terminate()
    seen = (tmp_path / "watch").read_text()
    print(seen)
    lines = [line.split() for line in seen.splitlines() if line.startswith("arithmetic") and len(line.split()) > 8]
    steps = [int(line[2]) for line in lines]
    rewards = [float(line[4]) for line in lines]
    assert steps == sorted(steps) and len(set(steps)) >= 4
    third = len(rewards) // 3  # a batch also holds replayed rows, so one alone says little
    assert fmean(rewards[-third:]) > fmean(rewards[:third]) + 0.05, rewards

    job = stack.job(namespace, "arithmetic")
    assert progress(job)["step"] == progress(job)["totalSteps"] == 150
    assert progress(job)["evalScore"] > 0.8
    assert condition(job, "Failed")["status"] == "False"
    until("the searchers are gone", lambda: not stack.pods(namespace, "searcher"), seconds=90)

    uri = job["spec"]["storage"]["uri"]
    report = tmp_path / "report.html"
    stack.tba("report", uri, "-o", str(report))
    page = report.read_text()
    assert page.count("<figure") >= 8, page[:2000]
    with stack.store(uri) as store:
        result = audit(store)
        assert result.ingested and result.doubled == set()


@pytest.mark.timeout(900)
def test_two_jobs_at_once_in_two_namespaces_both_complete(stack, base, namespace, second_namespace):
    jobs = {}
    for place in (namespace, second_namespace):
        stack.secret(place)
        manifest = example()
        manifest["spec"]["objective"]["totalSteps"] = 60
        manifest["spec"]["storage"]["uri"] = f"s3://tba/runs/{place}"
        stack.apply(place, manifest)
        jobs[place] = manifest
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(stack.wait_condition, place, "arithmetic", "Complete", seconds=700) for place in jobs]
        assert [end.result()["status"] for end in ends] == ["True", "True"]
    for place, manifest in jobs.items():
        with stack.store(manifest["spec"]["storage"]["uri"]) as store:
            found = json.loads(store.get("run.json").data)
            assert found["owner"] == f"{place}/arithmetic"
            assert audit(store).doubled == set()
