"""The life of a job: changes, pause, removal and return. One run, in the order of this file: each test leaves it as the
next one finds it."""

import pytest
from support.cluster_run import ClusterRun
from support.kube_cluster import ClusterError, until
from support.tba_stack import WORKLOAD_IMAGE

MISSING = "docker.io/tba/no-such-image:1"


@pytest.fixture(scope="module")
def run(stack, base, shared_namespace) -> ClusterRun:
    """Two searchers, in the middle of training."""
    stack.secret(shared_namespace)
    running = ClusterRun(stack, shared_namespace)
    running.apply()
    running.becomes("SearchersReady", seconds=240)
    running.reaches(5)
    return running


def test_a_change_of_the_trainer_is_refused_while_it_runs(run):
    with pytest.raises(ClusterError, match="suspend: true first"):
        run.patch(trainer={"image": "docker.io/tba/workload:other"})


def test_another_sync_interval_reaches_the_run_and_rolls_no_pod(run):
    pods = run.uids()
    assert len(pods) == 3
    run.patch(sync={"intervalSteps": 7})

    def is_taken() -> bool:
        newest = run.versions()[-2:]
        return len(newest) == 2 and newest[1] - newest[0] == 7

    until("snapshots 7 steps apart", is_taken, seconds=180)
    assert run.uids() == pods


def test_a_searcher_image_that_does_not_exist_stops_one_searcher_until_it_is_reverted(run):
    before = run.uids("searcher")
    run.patch(searcher={"image": MISSING, "imagePullPolicy": "Never"})
    message = run.becomes("Degraded", reason="ImagePullFailed")
    assert MISSING in message
    assert len(run.ready_pods("searcher")) == 1
    assert run.condition("SearchersReady")["status"] == "True"
    run.goes_on()
    run.patch(searcher={"image": None, "imagePullPolicy": None})
    until("two ready searchers", lambda: len(run.ready_pods("searcher")) == 2, seconds=120)
    run.becomes("Degraded", "False")
    assert {p["spec"]["containers"][0]["image"] for p in run.pods("searcher")} == {WORKLOAD_IMAGE}
    assert len(run.uids("searcher") & before) == 1


def test_suspend_writes_a_checkpoint_and_leaves_no_pod(run):
    run.patch(suspend=True)
    run.becomes("Suspended")
    until("the ended pods are removed", lambda: not run.pods(), seconds=30)
    assert run.job["status"]["phase"] == "Suspended"
    latest = run.latest()
    assert run.checkpoint().step == latest.step >= run.step() > 0


def test_the_trainer_may_change_while_suspended_and_resumes_from_the_checkpoint(run):
    at = run.checkpoint().step
    run.patch(trainer={"resources": {"requests": {"cpu": "150m"}}})
    run.patch(suspend=False)
    run.becomes("TrainerReady", seconds=180)
    assert run.condition("Suspended")["reason"] == "NotSuspended"
    assert run.job["status"]["trainer"]["attempt"] == 2
    (trainer,) = run.pods("trainer")
    assert trainer["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "150m"
    assert run.resumed_at(2) == at


def test_a_deleted_job_leaves_its_bucket_and_goes_on_when_applied_again(run):
    before = run.step()
    run.delete()
    left = run.checkpoint().step
    assert left >= before
    run.apply()
    assert run.resumed_at(3) == left
    assert run.job["status"]["trainer"]["attempt"] == 1
    run.delete()


def test_a_fork_is_a_run_of_its_own_and_outlives_its_job(run):
    origin = run.checkpoint()
    fork = ClusterRun(run.stack, run.namespace, "fork")
    policy = {"ttlSecondsAfterFinished": 8}
    fork.apply(steps=3, forkFrom={"uri": run.uri, "step": origin.step}, searcher={"replicas": 1}, runPolicy=policy)
    fork.becomes("Complete", seconds=240)
    until("the job is gone", fork.is_gone, seconds=60)
    record, parent = fork.record(), run.record()
    assert record.run_id != parent.run_id
    assert record.forked_from is not None and record.forked_from.run_id == parent.run_id
    assert fork.latest().step == 3


def test_storage_delete_removes_the_run(run):
    assert run.objects() > 0
    run.stack.tba("storage", "delete", run.uri, "--yes")
    assert run.objects() == 0


def test_a_trainer_without_memory_is_named_and_then_fails_the_job(stack, base, shared_namespace):
    stack.secret(shared_namespace)
    job = ClusterRun(stack, shared_namespace, "starved")
    memory = {"requests": {"cpu": "100m", "memory": "48Mi"}, "limits": {"memory": "48Mi"}}
    # The first end is not held against it, so that Degraded can be seen before Failed.
    job.apply(trainer={"resources": memory}, searcher={"replicas": 0}, runPolicy={"backoffLimit": 1})
    assert "trainer.resources.limits.memory" in job.becomes("Degraded", reason="OOMKilled")
    assert "OOMKilled" in job.becomes("Failed", reason="BackoffLimitExceeded")
    job.delete()
