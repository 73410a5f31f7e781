import json

import pytest
from support.raw_pods import CREATED_SECONDS, condition, raw_pod, terminated, waiting

from tba_operator.podstate import NO_EXIT_CODE, belongs_to, has_role, pod_of


def test_a_running_trainer_is_read():
    pod = pod_of(
        raw_pod(container={"restartCount": 2}, conditions=[condition("Ready")], status={"podIP": "10.0.0.7"}),
    )
    assert (pod.name, pod.uid, pod.role, pod.attempt) == ("gsm8k-trainer-0", "uid-gsm8k-trainer-0", "trainer", 1)
    assert pod.ready and not pod.over
    assert (pod.ip, pod.node, pod.created) == ("10.0.0.7", "node-1", CREATED_SECONDS)


def test_a_pod_that_was_just_created_has_neither_node_nor_ip_nor_state():
    raw = raw_pod(node=None)
    del raw["status"]
    pod = pod_of(raw)
    assert (pod.phase, pod.node, pod.ip, pod.ready, pod.waiting_reason, pod.ended) == (
        "Pending",
        None,
        None,
        False,
        None,
        None,
    )


def test_the_schedulers_message_and_its_moment_are_kept():
    said = condition(
        "PodScheduled",
        "False",
        reason="Unschedulable",
        message="0/3 nodes",
        lastTransitionTime="2027-01-15T08:00:05Z",
    )
    pod = pod_of(raw_pod(phase="Pending", node=None, conditions=[said]))
    assert (pod.unschedulable, pod.unschedulable_since) == ("0/3 nodes", CREATED_SECONDS + 5)


def test_a_pod_behind_a_scheduling_gate_is_not_unschedulable():
    said = condition("PodScheduled", "False", reason="SchedulingGated", message="gated")
    assert pod_of(raw_pod(phase="Pending", node=None, conditions=[said])).unschedulable is None


def test_the_deletion_deadline_is_the_timestamp_itself():
    pod = pod_of(raw_pod(deletionTimestamp="2027-01-15T08:10:00Z", deletionGracePeriodSeconds=600))
    assert pod.deletion_deadline == CREATED_SECONDS + 600


def test_preemption_is_seen():
    assert pod_of(raw_pod(conditions=[condition("DisruptionTarget", reason="PreemptionByScheduler")])).disrupted


def test_the_waiting_reason_is_of_the_roles_container_first():
    side = {"name": "side", **waiting("ErrImagePull", "side")}
    pod = pod_of(raw_pod(phase="Pending", container=waiting("ImagePullBackOff", "own"), others=[side]))
    assert (pod.waiting_reason, pod.waiting_message) == ("ImagePullBackOff", "own")


def test_a_failing_init_container_or_sidecar_explains_a_container_that_waits_for_it():
    init = {"name": "fetch", **waiting("CrashLoopBackOff", "back-off 10s")}
    pod = pod_of(raw_pod(phase="Pending", container=waiting("PodInitializing"), init=[init]))
    assert (pod.waiting_reason, pod.waiting_message) == ("CrashLoopBackOff", "init container fetch: back-off 10s")
    side = {"name": "proxy", **waiting("ImagePullBackOff")}
    pod = pod_of(raw_pod(phase="Pending", container={"state": {"running": {}}}, others=[side]))
    assert (pod.waiting_reason, pod.waiting_message) == ("ImagePullBackOff", "container proxy")


def test_ordinary_waiting_is_told_when_nothing_worse_is():
    assert (
        pod_of(raw_pod(phase="Pending", container=waiting("ContainerCreating"))).waiting_reason == "ContainerCreating"
    )


def test_the_last_words_of_a_process_are_read():
    words = json.dumps({"exitCode": 64, "message": "model.uri: not found", "progress": None})
    ended = pod_of(raw_pod(phase="Failed", container=terminated(64, message=words))).ended
    assert ended is not None and ended.termination is not None
    assert (ended.exit_code, ended.message) == (64, "model.uri: not found")


def test_without_last_words_the_end_of_the_log_speaks():
    ended = pod_of(raw_pod(phase="Failed", container=terminated(137, "OOMKilled", "log tail\n"))).ended
    assert ended is not None and ended.termination is None
    assert (ended.reason, ended.message) == ("OOMKilled", "log tail")


def test_the_end_of_a_container_that_runs_again_is_no_end_of_its_pod():
    pod = pod_of(raw_pod("searcher", container={"state": {"running": {}}, **terminated(1, when="lastState")}))
    assert pod.ended is None
    assert pod.last_ended is not None and pod.last_ended.exit_code == 1


def test_a_container_between_two_runs_has_just_ended():
    both = {**terminated(2), **terminated(1, when="lastState")}
    last = pod_of(raw_pod("searcher", container=both)).last_ended
    assert last is not None and last.exit_code == 2


def test_an_evicted_pod_without_container_status_tells_the_kubelets_reason():
    ended = pod_of(raw_pod(phase="Failed", status={"reason": "Evicted", "message": "low on memory"})).ended
    assert ended is not None
    assert (ended.exit_code, ended.reason, ended.message) == (NO_EXIT_CODE, "Evicted", "low on memory")


def test_a_pod_that_failed_in_an_init_container_says_which():
    init = [{"name": "done", **terminated(0, "Completed")}, {"name": "fetch", **terminated(1, message="no such host")}]
    ended = pod_of(raw_pod(phase="Failed", container=waiting("PodInitializing"), init=init)).ended
    assert ended is not None
    assert (ended.exit_code, ended.message) == (NO_EXIT_CODE, "init container fetch: no such host")


def test_an_init_container_that_fails_again_and_again_is_the_last_end():
    init = {"name": "fetch", "ready": False, **waiting("CrashLoopBackOff"), **terminated(7, when="lastState")}
    last = pod_of(raw_pod("searcher", phase="Pending", container=waiting("PodInitializing"), init=[init])).last_ended
    assert last is not None and last.message == "init container fetch: exit code 7"


def test_a_pod_without_a_role_is_none_of_ours():
    assert not has_role(raw_pod(labels={"tba.dev/role": "proxy"}))
    assert not has_role({"metadata": {"name": "x"}})
    assert has_role(raw_pod()) and has_role(raw_pod("searcher"))


def test_a_pod_belongs_to_the_workload_that_controls_it():
    assert belongs_to(pod_of(raw_pod()), "gsm8k") and belongs_to(pod_of(raw_pod("searcher")), "gsm8k")
    assert not belongs_to(pod_of(raw_pod(labels={"tba.dev/attempt": "x"})), "gsm8k")
    owner = {"kind": "Job", "name": "gsm8k-trainer-2", "uid": "x", "controller": True}
    assert not belongs_to(pod_of(raw_pod(ownerReferences=[owner])), "gsm8k")
    assert not belongs_to(
        pod_of(raw_pod(ownerReferences=[owner | {"name": "gsm8k-trainer-1", "controller": False}])), "gsm8k"
    )


def test_an_attempt_that_is_no_number_is_none():
    assert pod_of(raw_pod(labels={"tba.dev/attempt": "x"})).attempt is None


@pytest.mark.parametrize(("labels", "rank"), [({}, 0), ({"batch.kubernetes.io/job-completion-index": "3"}, 3)])
def test_the_node_rank_is_the_completion_index(labels, rank):
    assert pod_of(raw_pod(labels=labels)).node_rank == rank
