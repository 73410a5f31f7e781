"""The Workload, its admission, and what the controller writes back. What Kueue really does: tests/cluster."""

import pytest

from tba_operator import kueue
from tba_operator.api import parse_job
from tba_operator.inputs import Placement

NOW = 1_800_000_000.0
THEN, LATER = "2027-01-01T00:00:00Z", "2027-01-15T08:00:00Z"
TRAINER = {
    "metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}, "name": "no"},
    "spec": {"containers": [{"name": "trainer", "resources": {"requests": {"cpu": "2"}}}]},
}
SEARCHER = {"spec": {"containers": [{"name": "searcher", "resources": {"requests": {"cpu": "1"}}}]}}


def job(*, labels=None, status=None, **searcher):
    return parse_job(
        {
            "apiVersion": "tba.dev/v1alpha1",
            "kind": "TBAJob",
            "metadata": {
                "name": "run",
                "namespace": "ns",
                "uid": "u1",
                "labels": {"kueue.x-k8s.io/queue-name": "team", **(labels or {})},
            },
            "spec": {
                "model": {"uri": "hf://org/model"},
                "task": {"prompts": {"uri": "s3://b/p.jsonl"}, "reward": {"name": "fake"}},
                "storage": {"uri": "s3://b/run"},
                "searcher": {"replicas": 4, **searcher},
            },
            "status": status or {},
        }
    )


def condition(kind, status="True", reason="Because", message="of that", since=THEN):
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": since}


RESERVED, ADMITTED = condition("QuotaReserved"), condition("Admitted")
EVICTED = condition("Evicted", reason="Preempted", message="for a more important one")


def assigned(count=4, **flavors):
    sets = [
        {"name": "trainer", "count": 1, "flavors": {"cpu": "plain", **flavors}},
        {"name": "searcher", "count": count, "flavors": {"cpu": "plain", "nvidia.com/gpu": "spot"}},
    ]
    return {"clusterQueue": "gpus", "podSetAssignments": sets}


def read(*conditions, admission=None, active=True, **status):
    """A Workload as the API server holds it."""
    made = kueue.workload(job(), TRAINER, SEARCHER, 4)
    return made | {
        "metadata": {**made["metadata"], "uid": "w1", "generation": 3, "resourceVersion": "77"},
        "spec": {**made["spec"], "active": active},
        "status": {"conditions": list(conditions)} | ({"admission": admission} if admission else {}) | status,
    }


FLAVORS = {
    "plain": {"spec": {"nodeLabels": {"pool": "plain"}, "tolerations": [{"key": "x", "operator": "Exists"}]}},
    "spot": {"spec": {"nodeLabels": {"price": "low"}, "tolerations": [{"key": "x", "operator": "Exists"}]}},
}


# ── the Workload ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_workload_has_one_trainer_and_the_searchers_in_the_queue_of_the_label():
    made = kueue.workload(job(), TRAINER, SEARCHER, 4)
    assert made["metadata"]["name"] == "run-tba"
    assert made["metadata"]["ownerReferences"][0] | {"blockOwnerDeletion": True} == {
        "apiVersion": "tba.dev/v1alpha1",
        "kind": "TBAJob",
        "name": "run",
        "uid": "u1",
        "controller": True,
        "blockOwnerDeletion": True,
    }
    assert made["spec"]["queueName"] == "team"
    assert [(s["name"], s["count"], s.get("minCount")) for s in made["spec"]["podSets"]] == [
        ("trainer", 1, None),
        ("searcher", 4, 1),
    ]
    assert made["spec"]["podSets"][0]["template"]["metadata"] == {"labels": {"a": "b"}, "annotations": {"c": "d"}}


@pytest.mark.parametrize(("least", "count", "expected"), [(0, 4, 1), (3, 4, 3), (9, 4, 4), (1, 0, None)])
def test_fewer_searchers_may_be_admitted_but_not_fewer_than_min_available(least, count, expected):
    made = kueue.workload(job(minAvailable=least), TRAINER, SEARCHER, count)
    assert made["spec"]["podSets"][1].get("minCount") == expected


def test_quota_is_asked_for_the_most_searchers_that_there_may_be():
    grows = {"mode": "Managed", "maxReplicas": 16}
    assert kueue.wanted_searchers(job()) == 4
    assert kueue.wanted_searchers(job(autoscaling=grows)) == 16
    assert kueue.wanted_searchers(job(autoscaling={"mode": "External"})) == 4
    assert kueue.wanted_searchers(job(autoscaling={"mode": "Static", "maxReplicas": 16})) == 4


def test_a_workload_with_reserved_quota_keeps_its_spec():
    found = read(RESERVED, ADMITTED, admission=assigned())
    made = kueue.workload(job(labels={"kueue.x-k8s.io/queue-name": "other"}), SEARCHER, TRAINER, 9, current=found)
    assert made["spec"] == {name: value for name, value in found["spec"].items() if name != "active"}


def test_a_workload_with_reserved_quota_keeps_the_hash_of_its_spec_alone_among_annotations():
    """Left out, it would be taken away by the next apply."""
    asked = kueue.workload(job(), TRAINER, SEARCHER, 4)["metadata"]["annotations"]
    found = read(RESERVED, ADMITTED, admission=assigned())
    found["metadata"]["annotations"] = asked | {"somebody.example/note": "theirs"}
    assert kueue.workload(job(), TRAINER, SEARCHER, 9, current=found)["metadata"]["annotations"] == asked


def test_a_waiting_workload_follows_the_job():
    made = kueue.workload(job(), TRAINER, SEARCHER, 9, current=read(condition("QuotaReserved", "False")))
    assert made["spec"]["podSets"][1]["count"] == 9


def test_the_priority_of_the_label_goes_before_that_of_the_pods():
    both = job(labels={"kueue.x-k8s.io/priority-class": "high"})
    named = kueue.priority_class(both)
    assert (named.kind, named.name) == ("WorkloadPriorityClass", "high")
    found = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "WorkloadPriorityClass", "metadata": {"name": "high"}}
    made = kueue.workload(both, TRAINER, SEARCHER, 4, priority_class=found | {"value": 100})
    assert made["spec"]["priority"] == 100
    assert made["spec"]["priorityClassRef"] == {
        "group": "kueue.x-k8s.io",
        "kind": "WorkloadPriorityClass",
        "name": "high",
    }


def test_a_priority_class_that_is_not_there_is_refused_by_name():
    lost = job(labels={"kueue.x-k8s.io/priority-class": "hihg"})
    told = kueue.refusal(lost, None, {})
    assert told is not None
    assert "WorkloadPriorityClass" in told
    assert "hihg" in told
    assert kueue.refusal(lost, {"value": 1}, {}) is None
    assert kueue.refusal(job(), None, {}) is None


def test_a_priority_class_that_may_not_be_read_is_told_with_the_missing_right():
    lost = job(labels={"kueue.x-k8s.io/priority-class": "high"})
    told = kueue.refusal(lost, None, {kueue.priority_class(lost): "cannot get resource workloadpriorityclasses"})
    assert told is not None and told.startswith("cannot get resource workloadpriorityclasses. Grant")


# ── its admission ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_admitted_tells_where_each_role_goes_and_how_many():
    found = kueue.admission(read(RESERVED, ADMITTED, admission=assigned(count=3)), FLAVORS)
    assert found.state == "Admitted"
    tolerations = ({"key": "x", "operator": "Exists"},)
    assert found.trainer == Placement({"pool": "plain"}, tolerations, ("plain",))
    assert found.searcher == Placement({"pool": "plain", "price": "low"}, tolerations, ("plain", "spot"))
    assert found.searcher_count == 3


def test_a_flavor_that_is_not_there_admits_nobody():
    found = kueue.admission(read(RESERVED, ADMITTED, admission=assigned()), {"plain": FLAVORS["plain"]})
    assert found.state == "Waiting"
    assert "spot" in found.message


def test_a_flavor_that_may_not_be_read_admits_nobody_and_names_the_missing_right():
    denied = {kueue.flavor("spot"): "cannot get resource resourceflavors"}
    workload = read(RESERVED, ADMITTED, admission=assigned())
    found = kueue.admission(workload, {"plain": FLAVORS["plain"]}, denied)
    assert found.state == "Waiting" and "cannot get resource resourceflavors. Grant" in found.message
    assert kueue.admission(workload, FLAVORS, denied).state == "Admitted", "known from before"


def test_a_job_that_runs_stays_admitted_when_a_flavor_is_gone_or_may_not_be_read_any_more():
    workload, known = read(RESERVED, ADMITTED, admission=assigned(count=3)), {"plain": FLAVORS["plain"]}
    for denied, told in (
        ({}, "there is no ResourceFlavor spot: create it"),
        ({kueue.flavor("spot"): "cannot get it"}, "where to is unknown: cannot get it. Grant"),
    ):
        found = kueue.admission(workload, known, denied, started=True)
        assert (found.state, found.searcher_count, found.trainer, found.searcher) == ("Admitted", 3, None, None)
        assert found.unplaced is not None and told in found.unplaced
        assert f"pods that run go on, but none can be made: {found.unplaced}" in found.message
    assert kueue.admission(workload, FLAVORS, started=True).unplaced is None


def test_flavors_to_read_are_those_assigned():
    assert kueue.flavor_names(None) == ()
    assert kueue.flavor_names(read()) == ()
    assert kueue.flavor_names(read(RESERVED, admission=assigned(memory="big"))) == ("big", "plain", "spot")


def test_what_admission_checks_add_is_part_of_the_placement():
    update = {"name": "searcher", "nodeSelector": {"block": "7"}, "tolerations": [{"key": "y", "operator": "Exists"}]}
    checks = [{"name": "provision", "state": "Ready", "podSetUpdates": [update]}]
    found = kueue.admission(read(RESERVED, ADMITTED, admission=assigned(), admissionChecks=checks), FLAVORS)
    assert found.searcher is not None
    assert found.trainer is not None
    assert found.searcher.node_selector["block"] == "7"
    assert {"key": "y", "operator": "Exists"} in found.searcher.tolerations
    assert "block" not in found.trainer.node_selector
    told = ({name: value for name, value in update.items() if name != "name"},)
    assert found.searcher.updates == told and found.trainer.updates == ()


def test_waiting_says_what_kueue_says():
    told = "couldn't assign flavors to pod set trainer: insufficient unused quota"
    found = kueue.admission(read(condition("QuotaReserved", "False", "Pending", told)))
    assert (found.state, found.message) == ("Waiting", told)


def test_a_workload_that_kueue_has_not_seen_asks_for_its_queue():
    assert "ns/team" in kueue.admission(read()).message
    assert kueue.admission(None).state == "Waiting"


def test_reserved_quota_is_no_admission_while_checks_are_open():
    checks = [{"name": "provision", "state": "Pending", "message": "nodes are coming"}]
    found = kueue.admission(read(RESERVED, admission=assigned(), admissionChecks=checks), FLAVORS)
    assert found.state == "Waiting"
    assert "provision (nodes are coming)" in found.message


def test_evicted_goes_before_admitted():
    found = kueue.admission(read(RESERVED, ADMITTED, EVICTED, admission=assigned()), FLAVORS)
    assert (found.state, found.message) == ("Evicted", "Preempted: for a more important one")


def test_a_deactivated_workload_is_evicted():
    found = kueue.admission(read(RESERVED, ADMITTED, admission=assigned(), active=False), FLAVORS)
    assert found.state == "Evicted"
    assert "active" in found.message


def test_a_workload_that_is_being_deleted_admits_nobody():
    found = read(RESERVED, ADMITTED, admission=assigned())
    found["metadata"]["deletionTimestamp"] = THEN
    assert kueue.admission(found, FLAVORS).state == "Evicted"


def test_growth_beyond_what_was_admitted_is_clamped_with_a_reason():
    found = kueue.admission(read(RESERVED, ADMITTED, admission=assigned(count=3)), FLAVORS)
    count, reason = kueue.clamp(5, found)
    assert count == 3
    assert reason is not None
    assert "admitted 3" in reason
    assert kueue.clamp(2, found) == (2, None)
    assert kueue.clamp(5, None) == (5, None)


# ── what its owner owes it ───────────────────────────────────────────────────────────────────────────────────────────

COMPLETE = {"conditions": [condition("Complete", reason="Done", message="step 700 of 700")]}


def settled(found, *, owner=None, pods_left=False, ready=False):
    return kueue.settled(owner or job(), found, pods_left=pods_left, ready=ready, now=NOW)


def conditions(written):
    return {c["type"]: c for c in written["status"]["conditions"]}


def test_an_evicted_workload_keeps_its_quota_until_no_pod_is_left():
    found = read(RESERVED, ADMITTED, EVICTED, admission=assigned())
    assert settled(found, pods_left=True) is None
    written = settled(found)
    assert "admission" not in written["status"]
    assert {k: c["status"] for k, c in conditions(written).items()} == {
        "QuotaReserved": "False",
        "Admitted": "False",
        "Evicted": "True",
        "Requeued": "True",
    }
    assert conditions(written)["QuotaReserved"]["lastTransitionTime"] == LATER
    assert conditions(written)["Evicted"]["lastTransitionTime"] == THEN
    assert conditions(written)["QuotaReserved"]["observedGeneration"] == 3


def test_the_write_is_refused_if_kueue_was_faster():
    written = settled(read(RESERVED, ADMITTED, EVICTED, admission=assigned()))
    assert written["metadata"]["resourceVersion"] == "77"


def test_a_stopped_queue_requeues_its_workloads_itself():
    stopped = condition("Evicted", reason="ClusterQueueStopped")
    written = settled(read(RESERVED, ADMITTED, stopped, admission=assigned()))
    assert conditions(written)["Requeued"]["status"] == "False"


def test_quota_is_given_back_once():
    written = settled(read(RESERVED, ADMITTED, EVICTED, admission=assigned()))
    assert settled(written) is None
    assert kueue.admission(written).state == "Waiting"


def test_readiness_is_told_once_and_stays():
    found = read(RESERVED, ADMITTED, admission=assigned())
    assert settled(found, pods_left=True) is None
    written = settled(found, pods_left=True, ready=True)
    assert conditions(written)["PodsReady"]["status"] == "True"
    assert settled(written, pods_left=True, ready=True) is None
    assert settled(written, pods_left=True, ready=False) is None


def test_readiness_ends_with_the_admission():
    found = read(RESERVED, ADMITTED, condition("PodsReady"), EVICTED, admission=assigned())
    assert conditions(settled(found))["PodsReady"]["status"] == "False"


def test_open_checks_are_said_when_quota_is_given_back():
    checks = [{"name": "provision", "state": "Pending"}]
    written = settled(read(RESERVED, ADMITTED, EVICTED, admission=assigned(), admissionChecks=checks))
    assert conditions(written)["Admitted"]["reason"] == "NoReservationUnsatisfiedChecks"


@pytest.mark.parametrize(("end", "reason"), [("Complete", "Succeeded"), ("Failed", "Failed")])
def test_the_end_is_reported_when_no_pod_holds_resources(end, reason):
    over = job(status={"conditions": [condition(end, message="so it was")]})
    found = read(RESERVED, ADMITTED, admission=assigned())
    assert settled(found, owner=over, pods_left=True) is None
    written = settled(found, owner=over)
    assert conditions(written)["Finished"]["reason"] == reason
    assert conditions(written)["Finished"]["message"] == "so it was"
    assert written["status"]["admission"] == assigned()
    assert settled(written, owner=over) is None


def test_a_job_that_goes_on_is_not_finished():
    assert kueue.finished_condition(job()) is None
    assert kueue.finished_condition(job(status=COMPLETE)) is not None


def test_nothing_is_written_to_a_workload_that_goes_away():
    found = read(RESERVED, ADMITTED, EVICTED, admission=assigned())
    found["metadata"]["deletionTimestamp"] = THEN
    assert settled(found) is None
