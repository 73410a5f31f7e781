"""The table against what the code asks for: nothing missing, nothing too much."""

import asyncio
from pathlib import Path

import pytest
import yaml
from support.controlled import Controlled
from support.kube_fake import FakeKube
from support.raw_pods import condition, raw_pod
from support.simulated_time import now, run

from tba_operator import handlers, rbac
from tba_operator.api import PRIORITY_LABEL, QUEUE_LABEL, format_time
from tba_operator.lease import Election
from tba_operator.world import Ref

CHART = Path(__file__).parents[3] / "charts" / "tba-operator" / "files" / "rbac-rules.yaml"
JOB = Ref("tba.dev/v1alpha1", "TBAJob", "default", "gsm8k")
TRAINER = Ref("batch/v1", "Job", "default", "gsm8k-trainer-1")
WORKLOAD = Ref("kueue.x-k8s.io/v1beta2", "Workload", "default", "gsm8k-tba")

Triple = tuple[str, str, str]


def asked_of(api: FakeKube) -> set[Triple]:
    return {(access.group, access.resource, access.verb) for access in api.accesses}


def a_life_from_creation_to_expiry() -> set[Triple]:
    world = Controlled()
    key = world.create(searcher={"replicas": 3}, runPolicy={"ttlSecondsAfterFinished": 60, "cleanupPolicy": "All"})
    world.settle(key)
    world.now += 60
    world.settle(key)  # pods are missing: events say why
    world.api.edit(JOB, spec={"searcher": {"replicas": 2, "podDisruptionBudget": False}})
    world.settle(key)
    deadline = format_time(world.now - 3600)
    world.api.put(raw_pod("searcher", "gsm8k-searcher-0", deletionTimestamp=deadline, deletionGracePeriodSeconds=0))
    world.settle(key)
    world.api.edit(TRAINER, status={"conditions": [{"type": "Complete", "status": "True"}]})
    world.settle(key)
    world.now += 61
    world.reconcile(key)
    assert JOB not in world.api and world.api.events
    return asked_of(world.api)


def a_cluster_without_network_policies() -> set[Triple]:
    world = Controlled()
    key = world.create()
    world.settle(key)
    Controlled(world.api, network_policy=False).settle(key)
    assert world.api.of_kind("NetworkPolicy") == []
    return asked_of(world.api)


def a_life_in_a_queue() -> set[Triple]:
    world = Controlled(FakeKube(kueue=True))
    key = world.create(metadata={"labels": {QUEUE_LABEL: "team", PRIORITY_LABEL: "high"}})
    world.api.put({"apiVersion": WORKLOAD.api_version, "kind": "WorkloadPriorityClass", "metadata": {"name": "high"}})
    world.api.put({"apiVersion": WORKLOAD.api_version, "kind": "ResourceFlavor", "metadata": {"name": "spot"}})
    world.settle(key)
    sets = [{"name": name, "count": 1, "flavors": {"cpu": "spot"}} for name in ("trainer", "searcher")]
    admitted = [condition(kind) | {"reason": "Ok", "message": ""} for kind in ("QuotaReserved", "Admitted")]
    admission = {"clusterQueue": "all", "podSetAssignments": sets}
    world.api.edit(WORKLOAD, status={"admission": admission, "conditions": admitted})
    world.settle(key)
    evicted = condition("Evicted") | {"reason": "Preempted", "message": ""}
    world.api.edit(WORKLOAD, status={"conditions": [*admitted, evicted]})
    world.settle(key)
    world.api.edit(JOB, spec={"suspend": True})
    world.settle(key)
    assert WORKLOAD not in world.api
    return asked_of(world.api)


def a_priority_without_the_label_of_kueue() -> set[Triple]:
    world = Controlled(FakeKube(kueue=True))
    labels = {QUEUE_LABEL: "team"}
    world.reconcile(world.create(metadata={"labels": labels}, runPolicy={"priorityClassName": "high"}))
    return asked_of(world.api)


def an_election() -> set[Triple]:
    async def main() -> None:
        election = Election(api, namespace="tba-system", name="tba-operator", identity="a", wall=now)
        await election.run(lambda: asyncio.sleep(10))

    api = FakeKube(clock=lambda: 0.0)
    run(main())
    return asked_of(api)


def the_watches() -> set[Triple]:
    return {(kind.group, kind.plural, verb) for kind in handlers.kinds(kueue=True) for verb in ("list", "watch")}


STORIES = (
    a_life_from_creation_to_expiry,
    a_cluster_without_network_policies,
    a_life_in_a_queue,
    a_priority_without_the_label_of_kueue,
    an_election,
    the_watches,
)
NOT_ASKED_FOR_BY_US: set[Triple] = {("tba.dev", "tbajobs/finalizers", "update")}
"""Checked by the API server's plugin OwnerReferencesPermissionEnforcement, where it is on."""


def test_what_is_used_is_granted_and_what_is_granted_is_used():
    used = set().union(*(story() for story in STORIES))
    assert used - rbac.granted() == set()
    assert rbac.granted() - used == NOT_ASKED_FOR_BY_US


@pytest.mark.parametrize("resource", ["secrets", "pods/exec", "pods/proxy", "pods/log", "namespaces", "roles"])
def test_what_nobody_needs_is_not_granted(resource):
    assert not {triple for triple in rbac.granted() if triple[1] == resource}


def test_no_wildcard_is_granted():
    assert not {triple for triple in rbac.granted() if "*" in triple}


def test_jobs_are_not_made_and_their_spec_is_not_written():
    assert {verb for _, resource, verb in rbac.granted() if resource == "tbajobs"} == {"get", "list", "watch", "delete"}


def test_objects_without_a_namespace_are_for_the_cluster():
    cluster = {resource for rule in rbac.rules("cluster") for resource in rule["resources"]}
    assert cluster == {"nodes", "resourceflavors", "workloadpriorityclasses", "priorityclasses"}


def test_the_chart_has_the_table():
    assert yaml.safe_load(CHART.read_text()) == {
        place: rbac.rules(place) for place in ("namespaced", "cluster", "lease")
    }
