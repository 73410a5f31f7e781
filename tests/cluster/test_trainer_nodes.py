"""A trainer of two pods on two nodes. One run, in the order of this file: each test leaves it as the next finds it."""

import pytest
from support.cluster_run import ClusterRun
from support.kube_cluster import until

APART = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"tba.dev/role": "trainer"}}}
        ]
    }
}
TRAINER = {"nodes": 2, "podTemplate": {"spec": {"affinity": APART}}}
INDEX = "batch.kubernetes.io/job-completion-index"
KILL_RANKS = """
import contextlib, os, pathlib
for environ in pathlib.Path("/proc").glob("[0-9]*/environ"):
    with contextlib.suppress(OSError):  # the sandbox's process is somebody else's
        if b"TBA_RANK_STORE=" in environ.read_bytes():
            os.kill(int(environ.parent.name), 9)
"""


@pytest.fixture(scope="module")
def run(stack, base, shared_namespace) -> ClusterRun:
    """One searcher, in the middle of training."""
    stack.secret(shared_namespace)
    running = ClusterRun(stack, shared_namespace)
    running.apply(trainer=TRAINER, searcher={"replicas": 1})
    running.reaches(5)
    return running


def node(run: ClusterRun, rank: int) -> dict:
    """The newest trainer pod of a node rank."""
    pods = [pod for pod in run.pods("trainer") if pod["metadata"]["labels"][INDEX] == str(rank)]
    return max(pods, key=lambda pod: pod["metadata"]["creationTimestamp"])


def test_both_pods_train_on_nodes_of_their_own_and_rank_0s_is_the_trainer(run):
    first, second = node(run, 0), node(run, 1)
    assert first["spec"]["nodeName"] != second["spec"]["nodeName"]
    assert len(run.ready_pods("trainer")) == 2
    assert run.job["status"]["trainer"]["podName"] == first["metadata"]["name"]
    assert '"event": "node_joined"' in run.kubectl("logs", first["metadata"]["name"])


def test_a_deleted_pod_of_another_node_ends_both_with_a_checkpoint_that_is_not_held_against_the_job(run):
    before, epoch = run.uids("trainer"), run.latest().epoch
    run.kubectl("delete", "pod", node(run, 1)["metadata"]["name"], "--wait=false")
    resumed = run.resumed_at(epoch + 1)
    assert resumed >= 5
    run.becomes("TrainerReady", seconds=180)
    assert node(run, 0)["metadata"]["uid"] not in before and node(run, 1)["metadata"]["uid"] not in before
    status = run.job["status"]["trainer"]
    assert (status["attempt"], status.get("failures", 0)) == (1, 0)
    run.goes_on()


@pytest.mark.faults  # Kubernetes waits up to 80 seconds before it replaces the pods
def test_a_killed_rank_of_another_node_counts_once_and_the_run_goes_on(run):
    epoch = run.latest().epoch
    run.kubectl("exec", node(run, 1)["metadata"]["name"], "--", "python", "-c", KILL_RANKS)
    until("the failure is counted", lambda: run.job["status"]["trainer"].get("failures", 0) == 1, seconds=120)
    assert "trainer rank 1 ended with SIGKILL" in run.job["status"]["trainer"]["lastMessage"]
    run.resumed_at(epoch + 1)
    run.becomes("TrainerReady", seconds=180)
    run.goes_on()
    assert run.job["status"]["trainer"]["failures"] == 1


def test_one_node_goes_on_from_the_checkpoint_of_two(run):
    run.patch(suspend=True)
    run.becomes("Suspended")
    at = run.checkpoint().step
    run.patch(trainer={"nodes": 1, "podTemplate": None})
    run.patch(suspend=False)
    run.becomes("TrainerReady", seconds=180)
    assert len(run.pods("trainer")) == 1
    assert run.resumed_at(run.latest().epoch) == at
    run.delete()


def test_a_run_of_two_nodes_completes_and_leaves_no_trainer(run):
    short = ClusterRun(run.stack, run.namespace, "short")
    short.apply(steps=12, trainer=TRAINER, searcher={"replicas": 1})
    short.becomes("Complete", seconds=300)
    until("no trainer runs", lambda: all(p["status"]["phase"] != "Running" for p in short.pods("trainer")), seconds=60)
    short.delete()
