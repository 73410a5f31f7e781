"""A job with a Kueue queue, through the plan."""

import pytest
from support.job_world import NAME, NAMESPACE, STATEFUL_SET, World, job_ref

from tba_operator.kueue import API_VERSION
from tba_operator.world import Ref

WORKLOAD = Ref(API_VERSION, "Workload", NAMESPACE, f"{NAME}-tba")


def queued(**spec):
    world = World.of(labels={"kueue.x-k8s.io/queue-name": "gpus"}, **spec)
    world.kueue = True
    return world


def admit(world, searchers, flavor=None):
    conditions = [
        {"type": kind, "status": "True", "reason": kind, "message": "", "lastTransitionTime": "2027-01-15T08:00:00Z"}
        for kind in ("QuotaReserved", "Admitted")
    ]
    given = {"flavors": {"cpu": flavor}} if flavor is not None else {}
    assigned = [{"name": "trainer", "count": 1, **given}, {"name": "searcher", "count": searchers, **given}]
    admission = {"clusterQueue": "lab", "podSetAssignments": assigned}
    world.objects[WORKLOAD]["status"] = {"conditions": conditions, "admission": admission}


def evict(world):
    world.objects[WORKLOAD]["status"]["conditions"].append(
        {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "by another"}
    )


def admitted(searchers=2, **spec):
    world = queued(**spec)
    world.settle()
    admit(world, searchers)
    return world.settle()


def placed(**spec):
    """A running job on the nodes of a flavor."""
    world = queued(**spec)
    world.flavors = {"spot": flavor(pool="a")}
    world.settle()
    admit(world, 2, flavor="spot")
    return world.settle()


def flavor(**labels):
    return {"spec": {"nodeLabels": labels}}


def selectors(world):
    """Node selectors of the searchers and of the newest trainer Job."""
    templates = [world.objects[ref]["spec"]["template"] for ref in (STATEFUL_SET, job_ref(world.jobs()[-1]))]
    return [template["spec"].get("nodeSelector") for template in templates]


def test_an_edited_flavor_moves_no_pod_that_runs():
    world = placed(searcher={"replicas": 2})
    world.flavors = {"spot": flavor(pool="b")}
    found = world.plan()
    assert not (found.apply or found.scale or found.delete)


def test_an_edited_flavor_is_where_the_pods_of_the_next_admission_go():
    world = placed(searcher={"replicas": 2})
    assert selectors(world) == [{"pool": "a"}, {"pool": "a"}]
    world.change(None, suspend=True)
    world.settle()
    world.flavors = {"spot": flavor(pool="b")}
    world.change(None, suspend=False)
    world.settle()
    admit(world, 2, flavor="spot")
    world.settle()
    assert selectors(world) == [{"pool": "b"}, {"pool": "b"}] and not world.plan().apply


def test_a_flavor_that_is_gone_stops_no_pod_but_none_is_made():
    world = placed(searcher={"replicas": 2})
    world.flavors = {}
    world.change("searcher", replicas=3, image="mine:2")
    world.change("trainer", image="mine:2")
    world.settle()
    assert world.condition("Admitted") == ("True", "Admitted") and world.phase == "Running"
    assert "no ResourceFlavor spot: create it" in world.message("Admitted")
    assert len(world.of_role("searcher")) == 2 and world.jobs() == [1]
    world.remove_job(1)
    world.settle()
    assert world.jobs() == [], "where its pod would go is unknown"
    world.flavors = {"spot": flavor(pool="a")}
    world.settle(rounds=60)
    assert world.phase == "Running" and world.status.searcher.updated_replicas == 2


def test_fewer_searchers_need_no_flavor():
    world = placed(searcher={"replicas": 2})
    world.flavors = {}
    world.change("searcher", replicas=1)
    world.settle()
    assert len(world.of_role("searcher")) == 1


def test_a_job_that_has_not_started_waits_for_its_flavor_and_no_deadline_runs():
    world = queued().settle()
    admit(world, 2, flavor="spot")
    world.settle()
    assert world.condition("Admitted") == ("False", "Waiting") and world.status.start_time is None
    assert not world.pods and world.jobs() == []


def test_a_queued_job_has_a_workload_and_no_pods():
    world = queued(searcher={"replicas": 2}).settle()
    assert WORKLOAD in world.objects and not world.pods and world.jobs() == []
    assert world.condition("Admitted") == ("False", "Waiting") and world.phase == "Queued"
    assert world.status.start_time is None, "no deadline runs while it waits"
    assert world.is_quiet()


def test_what_is_taken_out_of_a_waiting_job_is_taken_out_of_its_workload():
    world = queued(searcher={"replicas": 2, "resources": {"requests": {"cpu": 1, "memory": "9Ti"}}}).settle()
    world.change("searcher", resources={"requests": {"cpu": 1}})
    world.settle()
    _, searcher = world.objects[WORKLOAD]["spec"]["podSets"]
    assert searcher["template"]["spec"]["containers"][0]["resources"]["requests"] == {"cpu": 1}
    assert world.is_quiet()


def test_a_fraction_of_a_processor_is_asked_for_as_text_which_is_all_that_kueues_schema_takes():
    requests = {"cpu": 0.5, "memory": "1Gi", "nvidia.com/gpu": 1.0}
    sidecar = {"name": "side", "image": "i", "resources": {"limits": {"cpu": 0.25}}}
    template = {"spec": {"containers": [sidecar]}}
    world = queued(searcher={"resources": {"requests": requests}, "podTemplate": template}).settle()
    _, searcher = world.objects[WORKLOAD]["spec"]["podSets"]
    own, other = searcher["template"]["spec"]["containers"]
    assert own["resources"]["requests"] == {"cpu": "0.5", "memory": "1Gi", "nvidia.com/gpu": 1}
    assert other["resources"] == {"limits": {"cpu": "0.25"}}
    assert world.is_quiet()


def test_an_admitted_job_runs():
    world = admitted(searcher={"replicas": 2})
    assert world.condition("Admitted")[0] == "True" and world.phase == "Running"
    assert len(world.of_role("searcher")) == 2


def test_searchers_are_clamped_to_what_was_admitted_with_a_reason():
    world = admitted(searchers=2, searcher={"replicas": 5})
    assert world.objects[STATEFUL_SET]["spec"]["replicas"] == 2
    assert world.condition("SearchersReady") == ("True", "ScaleClamped")
    assert "admitted 2 searchers, 5 are wanted" in world.message("SearchersReady")
    assert world.condition("Degraded")[0] == "False"
    assert [reason for reason, _ in world.events].count("ScaleClamped") == 1


def test_an_evicted_job_gives_its_quota_back_when_no_pod_is_left():
    world = admitted()
    evict(world)
    world.reconcile()
    found = world.plan()
    assert world.jobs() == [] and found.replace_status == (), "pods still end"
    assert world.condition("Admitted") == ("False", "Evicted")
    world.pass_time(5)
    world.controllers()
    world.kubelets()
    world.pass_time(5)
    world.kubelets()
    (given_back,) = world.plan().replace_status
    reserved = next(c for c in given_back["status"]["conditions"] if c["type"] == "QuotaReserved")
    assert not world.of_role("trainer") and reserved["status"] == "False"
    world.objects[WORKLOAD] = given_back
    admit(world, 2)
    world.settle()
    assert world.jobs() == [2] and world.phase == "Running"


def test_suspend_releases_the_workload_when_the_pods_are_gone():
    world = admitted()
    world.change(None, suspend=True)
    world.reconcile()
    assert WORKLOAD in world.objects
    world.settle()
    assert WORKLOAD not in world.objects and world.condition("Suspended")[0] == "True" and not world.pods


def test_the_workload_of_a_finished_job_is_told_so_when_its_pods_are_gone():
    world = admitted()
    world.end(world.trainer, 0)
    for _ in range(10):
        world.reconcile()
        world.controllers()
        world.kubelets()
        world.pass_time(2)
    (told,) = world.plan().replace_status
    told_of = [reason for reason, _ in world.events]
    assert told_of.count("Completed") == 1 and "Finished" not in told_of
    assert any(c["type"] == "Finished" and c["status"] == "True" for c in told["status"]["conditions"])


def test_a_queue_without_kueue_waits_and_says_what_to_do():
    world = queued()
    world.kueue = False
    world.settle()
    assert world.condition("Admitted") == ("False", "Waiting") and not world.pods
    assert "install it, or remove the queue label" in world.message("Admitted")


def test_a_priority_class_that_does_not_exist_is_told_and_no_workload_made():
    world = queued(runPolicy={"priorityClassName": "urgent"}).settle()
    assert WORKLOAD not in world.objects and "got urgent" in world.message("Admitted")


@pytest.mark.parametrize("labels", [{}, {"kueue.x-k8s.io/queue-name": ""}])
def test_a_job_without_a_queue_has_no_admitted_condition(labels):
    world = World.of(labels=labels)
    world.kueue = True
    world.settle()
    assert world.status.condition("Admitted") is None and WORKLOAD not in world.objects
