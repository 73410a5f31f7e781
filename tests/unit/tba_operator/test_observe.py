import asyncio
import weakref

import pytest
from support.jobs import smallest
from support.kube_fake import FakeKube
from support.raw_pods import CREATED, CREATED_SECONDS, raw_pod, waiting

from tba_operator.api import parse_job
from tba_operator.caches import Caches, RecentWrites, trim
from tba_operator.kubeapi import Forbidden
from tba_operator.kueue import flavor
from tba_operator.observe import CLUSTER_SECONDS, EVENTS_SECONDS, STUCK_SECONDS, Observer
from tba_operator.podstate import pod_of
from tba_operator.world import Ref

KEY = ("default", "gsm8k")
NOW = CREATED_SECONDS + 100
OWNER = [{"apiVersion": "tba.dev/v1alpha1", "kind": "TBAJob", "name": "gsm8k", "uid": "job-uid", "controller": True}]
SEARCHERS = Ref("apps/v1", "StatefulSet", "default", "gsm8k-searcher")


class Silent:
    """A progress source that has heard nothing."""

    asked: frozenset[str] = frozenset()

    def sample(self, key, pod_uids):
        self.asked = pod_uids
        return None


class Clock:
    now = NOW

    def __call__(self):
        return self.now


def raw_job(version=1, **metadata):
    data = smallest()
    known = {"namespace": "default", "uid": "job-uid", "generation": 1, "creationTimestamp": CREATED}
    data["metadata"] |= known | {"resourceVersion": str(version)} | metadata
    return data


def child(api_version, kind, name, uid="child", version=1, owners=OWNER, labels=None, **parts):
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "namespace": "default",
            "name": name,
            "uid": uid,
            "resourceVersion": str(version),
            "ownerReferences": owners,
            "labels": {"tba.dev/job-name": "gsm8k"} | (labels or {}),
        },
        **parts,
    }


def searchers(replicas=0, **more):
    return child("apps/v1", "StatefulSet", "gsm8k-searcher", spec={"replicas": replicas}, **more)


def trainer_job(attempt=1, **more):
    labels = {"tba.dev/role": "trainer", "tba.dev/attempt": str(attempt)}
    return child("batch/v1", "Job", f"gsm8k-trainer-{attempt}", uid=f"trainer-{attempt}", labels=labels, **more)


def event(reason, uid, message, at=CREATED, namespace="default"):
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": namespace, "name": f"{reason}-{uid}-{message}"[:60].replace(" ", "-")},
        "reason": reason,
        "involvedObject": {"uid": uid},
        "message": message,
        "lastTimestamp": at,
    }


class Scene:
    """An observer over a fake cluster and hand-filled caches."""

    def __init__(self, *, children=(), pods=(), kueue=False):
        self.api = FakeKube(kueue=kueue)
        self.clock = Clock()
        self.recent = RecentWrites(self.clock)
        self.progress = Silent()
        self.caches = Caches({KEY: [raw_job()]}, {KEY: list(children)}, {KEY: [pod_of(pod) for pod in pods]})
        self.observer = Observer(self.api, self.caches, self.recent, self.progress, kueue=kueue, clock=self.clock)

    def view(self, raw=None):
        return asyncio.run(self.observer.view(parse_job(raw or raw_job())))

    def live_view(self):
        return asyncio.run(self.observer.live_view(parse_job(raw_job())))


def test_children_and_pods_come_from_the_caches():
    scene = Scene(children=[searchers()], pods=[raw_pod("searcher")])
    view = scene.view()
    assert list(view.observed.children) == [SEARCHERS]
    assert [pod.name for pod in view.observed.pods] == ["gsm8k-searcher-0"]
    assert view.look_again_seconds is None


def test_a_child_of_another_owner_is_no_child():
    assert Scene(children=[searchers(owners=[{"uid": "other"}])]).view().observed.children == {}


def test_a_pod_of_a_deleted_namesake_is_not_counted():
    old = raw_pod("searcher", creationTimestamp="2027-01-15T07:59:59Z")
    assert Scene(pods=[old]).view().observed.pods == ()


@pytest.mark.parametrize("owners", [[], [{"kind": "Job", "name": "debug", "uid": "x", "controller": True}]])
def test_a_copy_of_a_trainer_pod_is_no_trainer(owners):
    copied = raw_pod("trainer", phase="Succeeded", ownerReferences=owners)
    for found in (Scene(pods=[copied]).view(), live(copied)):
        assert (found.observed.pods, found.observed.strays) == ((), ())


def test_a_copy_of_a_searcher_pod_is_no_searcher():
    assert Scene(pods=[raw_pod("searcher", ownerReferences=[])]).view().observed.pods == ()


@pytest.mark.parametrize("left", [{"creationTimestamp": "2027-01-15T07:59:59Z"}, {"ownerReferences": []}])
def test_a_trainer_that_runs_without_the_job_is_waited_for(left):
    for found in (Scene(pods=[raw_pod("trainer", **left)]).view(), live(raw_pod("trainer", **left))):
        assert found.observed.pods == ()
        assert [pod.name for pod in found.observed.strays] == ["gsm8k-trainer-0"]
        assert found.look_again_seconds is not None


def test_the_node_of_a_trainer_that_is_waited_for_is_asked_too():
    left = raw_pod("trainer", node="lost", ownerReferences=[], deletionTimestamp="2027-01-15T08:01:39Z")
    assert Scene(pods=[left]).view().observed.not_ready_nodes == {"lost"}


def live(*pods):
    """The live view of a cluster with these pods."""
    scene = Scene()
    for pod in pods:
        scene.api.put(pod)
    return scene.live_view()


def test_our_own_write_is_seen_before_the_watch_shows_it_and_looked_at_again():
    scene = Scene(children=[searchers(replicas=1, version=3)])
    scene.recent.put(KEY, searchers(replicas=2, version=4))
    view = scene.view()
    assert view.observed.children[SEARCHERS]["spec"]["replicas"] == 2
    assert view.look_again_seconds is not None


def test_an_own_status_write_is_the_newest_job():
    scene = Scene()
    scene.recent.put(KEY, raw_job(version=2) | {"status": {"phase": "Running"}})
    job = scene.observer.job(KEY)
    assert job is not None and job["status"] == {"phase": "Running"}
    assert scene.view().observed.children == {}


def test_a_status_write_to_a_deleted_namesake_is_not_the_job():
    scene = Scene()
    scene.recent.put(KEY, raw_job(version=2, uid="older"))
    job = scene.observer.job(KEY)
    assert job is not None and job["metadata"]["uid"] == "job-uid"


def test_a_live_view_replaces_pods_and_trainer_jobs_of_the_caches():
    scene = Scene(children=[searchers(), trainer_job(1)], pods=[raw_pod("trainer", "stale")])
    scene.api.put(trainer_job(2))
    scene.api.put(raw_pod("trainer", "alive"))
    observed = scene.live_view().observed
    assert {ref.name for ref in observed.children} == {"gsm8k-searcher", "gsm8k-trainer-2"}
    assert [pod.name for pod in observed.pods] == ["alive"]


def test_nodes_are_asked_only_for_pods_that_should_be_gone():
    dying = raw_pod("searcher", "s-0", node="lost", deletionTimestamp="2027-01-15T08:01:39Z")
    in_grace = raw_pod("searcher", "s-1", node="busy", deletionTimestamp="2027-01-15T08:01:41Z")
    assert Scene(pods=[dying, in_grace]).view().observed.not_ready_nodes == {"lost"}


@pytest.mark.parametrize(("status", "lost"), [("True", frozenset()), ("Unknown", {"n"}), ("False", {"n"})])
def test_a_node_is_ready_only_if_it_says_so(status, lost):
    scene = Scene(pods=[raw_pod("searcher", node="n", deletionTimestamp=CREATED)])
    conditions = [{"type": "Ready", "status": status}]
    scene.api.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}, "status": {"conditions": conditions}})
    assert scene.view().observed.not_ready_nodes == lost


def test_a_node_that_may_not_be_read_is_not_lost():
    scene = Scene(pods=[raw_pod("searcher", node="n", deletionTimestamp=CREATED)])
    scene.api.fail(Forbidden("nodes is forbidden"), kind="Node")
    assert scene.view().observed.not_ready_nodes == frozenset()


def test_a_mount_that_fails_is_told_by_its_newest_event():
    pod = raw_pod("trainer", phase="Pending", container=waiting("ContainerCreating"))
    scene = Scene(pods=[pod])
    scene.api.put(event("FailedMount", pod["metadata"]["uid"], "newer", at="2027-01-15T08:01:00Z"))
    scene.api.put(event("FailedMount", pod["metadata"]["uid"], "older"))
    view = scene.view()
    assert (view.observed.pods[0].waiting_reason, view.observed.pods[0].waiting_message) == ("FailedMount", "newer")
    assert view.look_again_seconds is not None


def test_a_pod_that_starts_is_given_its_time_and_looked_at_again():
    scene = Scene(pods=[raw_pod("trainer", phase="Pending", container=waiting("ContainerCreating"))])
    scene.clock.now = CREATED_SECONDS + 1
    assert scene.view().look_again_seconds == STUCK_SECONDS
    assert scene.api.accesses == set()


def test_creations_that_fail_are_told_while_pods_are_missing():
    scene = Scene(children=[searchers(replicas=2)], pods=[raw_pod("searcher")])
    scene.api.put(event("FailedCreate", "child", "exceeded quota: gpu"))
    scene.api.put(event("FailedCreate", "another", "not ours"))
    assert scene.view().observed.create_failures == ("exceeded quota: gpu",)


def test_creations_that_failed_once_are_history_when_all_pods_are_there():
    scene = Scene(children=[searchers(replicas=1)], pods=[raw_pod("searcher")])
    scene.api.put(event("FailedCreate", "child", "exceeded quota: gpu"))
    assert scene.view().observed.create_failures == ()


def test_a_trainer_job_without_a_pod_is_asked_for_its_failures():
    scene = Scene(children=[trainer_job(1)])
    scene.api.put(event("FailedCreate", "trainer-1", "forbidden: violates PodSecurity"))
    assert scene.view().observed.create_failures == ("forbidden: violates PodSecurity",)


@pytest.mark.parametrize(("had", "lacks"), [((), True), (("0",), True), (("0", "1"), False), (("0", "0"), True)])
def test_a_trainer_of_two_nodes_lacks_pods_until_each_node_has_had_one(had, lacks):
    pods = [
        raw_pod("trainer", f"t-{i}", labels={"tba.dev/attempt": "1", "batch.kubernetes.io/job-completion-index": index})
        for i, index in enumerate(had)
    ]
    scene = Scene(children=[trainer_job(1, spec={"completions": 2})], pods=pods)
    scene.api.put(event("FailedCreate", "trainer-1", "exceeded quota: gpu"))
    assert scene.view().observed.create_failures == (("exceeded quota: gpu",) if lacks else ())


def test_a_trainer_job_that_ended_lacks_no_pod():
    done = trainer_job(1, status={"conditions": [{"type": "Complete", "status": "True"}]})
    scene = Scene(children=[done])
    scene.api.put(event("FailedCreate", "trainer-1", "old"))
    assert scene.view().observed.create_failures == ()


def test_old_failures_are_not_told():
    scene = Scene(children=[searchers(replicas=2)])
    scene.api.put(event("FailedCreate", "child", "long ago", at="2027-01-15T07:00:00Z"))
    assert scene.view().observed.create_failures == ()


def test_one_listing_of_events_serves_for_a_while():
    scene = Scene(children=[searchers(replicas=2)])
    scene.view()
    scene.api.put(event("FailedCreate", "child", "later"))
    assert scene.view().observed.create_failures == ()
    scene.clock.now += EVENTS_SECONDS
    assert scene.view().observed.create_failures == ("later",)


def test_events_are_looked_at_again_when_they_may_be_listed_anew():
    scene = Scene(children=[searchers(replicas=2)])
    assert scene.view().look_again_seconds == EVENTS_SECONDS
    scene.clock.now += 5
    assert scene.view().look_again_seconds == EVENTS_SECONDS - 5
    pod = raw_pod("trainer", phase="Pending", container=waiting("ContainerCreating"))
    assert Scene(pods=[pod]).view().look_again_seconds == EVENTS_SECONDS


def test_a_failure_from_before_the_newest_pod_has_been_mended():
    mended = raw_pod("searcher", creationTimestamp="2027-01-15T08:00:30Z")
    scene = Scene(children=[searchers(replicas=2)], pods=[mended])
    scene.api.put(event("FailedCreate", "child", "exceeded quota: gpu", at="2027-01-15T08:00:29Z"))
    assert scene.view().observed.create_failures == ()


def test_a_failure_of_the_second_in_which_another_pod_was_created_holds():
    created = raw_pod("searcher", creationTimestamp="2027-01-15T08:00:30Z")
    scene = Scene(children=[searchers(replicas=2)], pods=[created])
    scene.api.put(event("FailedCreate", "child", "exceeded quota: gpu", at="2027-01-15T08:00:30Z"))
    assert scene.view().observed.create_failures == ("exceeded quota: gpu",)


def test_events_of_a_namespace_that_nobody_asks_about_are_not_kept():
    scene = Scene(children=[searchers(replicas=2)])
    scene.view()
    scene.clock.now += EVENTS_SECONDS
    other = raw_job(namespace="other")
    gone = weakref.ref(scene.observer._listing["default", "FailedCreate"])
    scene.caches._children["other", "gsm8k"] = [searchers(replicas=2)]
    scene.view(other)
    assert gone() is None


def test_events_that_may_not_be_read_are_none():
    scene = Scene(children=[searchers(replicas=2)])
    scene.api.fail(Forbidden("events is forbidden"), kind="Event")
    assert scene.view().observed.create_failures == ()


def test_progress_is_asked_of_trainers_that_run():
    over = raw_pod("trainer", "t-0", phase="Failed")
    other_node = raw_pod("trainer", "t-2", labels={"batch.kubernetes.io/job-completion-index": "1"})
    scene = Scene(pods=[over, raw_pod("trainer", "t-1"), other_node, raw_pod("searcher")])
    scene.view()
    assert scene.progress.asked == {"uid-t-1"}


def queued():
    return raw_job(labels={"kueue.x-k8s.io/queue-name": "main"})


def workload(*flavors):
    assignments = [{"name": "trainer", "flavors": {f"r{i}": name for i, name in enumerate(flavors)}}]
    status = {"admission": {"podSetAssignments": assignments}}
    return child("kueue.x-k8s.io/v1beta2", "Workload", "gsm8k-tba", spec={"podSets": []}, status=status)


def test_the_flavors_of_an_admitted_workload_are_read():
    scene = Scene(children=[workload("a100", "gone")], kueue=True)
    scene.api.put({"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "a100"}})
    observed = scene.view(queued()).observed
    assert observed.kueue and set(observed.flavors) == {"a100"}


def resource_flavor(name):
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": name}}


def test_a_flavor_that_may_not_be_read_is_told_and_asked_for_again():
    scene = Scene(children=[workload("a100")], kueue=True)
    scene.api.put(resource_flavor("a100"))
    scene.api.fail(Forbidden("cannot get resource resourceflavors"), kind="ResourceFlavor")
    view = scene.view(queued())
    assert view.observed.denied == {flavor("a100"): "cannot get resource resourceflavors"}
    assert not view.observed.flavors and view.look_again_seconds == CLUSTER_SECONDS
    assert set(scene.view(queued()).observed.flavors) == {"a100"}, "once the right is given"


def test_a_flavor_that_is_known_stays_known_when_the_right_to_read_it_goes():
    scene = Scene(children=[workload("a100")], kueue=True)
    scene.api.put(resource_flavor("a100"))
    scene.view(queued())
    scene.clock.now += CLUSTER_SECONDS + 1
    scene.api.fail(Forbidden("cannot get resource resourceflavors"), kind="ResourceFlavor")
    observed = scene.view(queued()).observed
    assert set(observed.flavors) == {"a100"} and not observed.denied


def test_a_priority_class_that_may_not_be_read_is_told():
    scene = Scene(kueue=True)
    scene.api.fail(Forbidden("cannot get resource workloadpriorityclasses"), kind="WorkloadPriorityClass")
    raw = raw_job(labels={"kueue.x-k8s.io/queue-name": "main", "kueue.x-k8s.io/priority-class": "high"})
    (told,) = scene.view(raw).observed.denied.values()
    assert told == "cannot get resource workloadpriorityclasses"


def test_without_a_queue_nothing_of_kueue_is_read():
    scene = Scene(children=[workload("a100")], kueue=True)
    scene.view()
    assert scene.api.accesses == set()


def test_trimmed_children_are_compared_with_trimmed_writes():
    full = searchers(replicas=1, version=5)
    full["spec"]["template"] = {"spec": {}}
    scene = Scene()
    scene.recent.put(KEY, full)
    assert scene.view().observed.children[SEARCHERS] == trim(full)
