import asyncio

import pytest
from support.jobs import smallest
from support.kube_fake import FakeKube

from tba_operator.api import JobStatus, parse_job
from tba_operator.apply import RETRY_SECONDS, Applier, Refusal
from tba_operator.caches import RecentWrites
from tba_operator.kubeapi import Conflict, Forbidden, Invalid, NamespaceTerminating, QuotaExceeded, Unavailable
from tba_operator.world import ApplyError, Delete, Note, Plan, Ref, Scale, ref_of

KEY = ("default", "gsm8k")
OWNER = [{"apiVersion": "tba.dev/v1alpha1", "kind": "TBAJob", "name": "gsm8k", "uid": "job-uid", "controller": True}]


def manifest(api_version, kind, name, role=None, owners=OWNER, **parts):
    labels = {"tba.dev/job-name": "gsm8k"} | ({"tba.dev/role": role} if role else {})
    metadata = {"namespace": "default", "name": name, "labels": labels, "ownerReferences": owners}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **parts}


def config_map(**more):
    return manifest("v1", "ConfigMap", "gsm8k-config", data={"run.json": "{}"}, **more)


def searchers(**more):
    return manifest("apps/v1", "StatefulSet", "gsm8k-searcher", "searcher", spec={"replicas": 1}, **more)


def trainer(**more):
    return manifest("batch/v1", "Job", "gsm8k-trainer-1", "trainer", spec={}, **more)


def rehearsal(role):
    return manifest("v1", "Pod", f"gsm8k-{role}-rehearsal", role, spec={})


SEARCHERS, TRAINER, CONFIG = ref_of(searchers()), ref_of(trainer()), ref_of(config_map())


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


class Scene:
    def __init__(self):
        self.api = FakeKube()
        self.clock = Clock()
        self.recent = RecentWrites(self.clock)
        self.applier = Applier(self.api, self.recent, clock=self.clock)
        data = smallest()
        data["metadata"] |= {"namespace": "default", "uid": "job-uid"}
        self.raw_job = self.api.put(data)
        self.job = parse_job(self.raw_job)

    def execute(self, children=None, standing=None, **plan):
        return asyncio.run(self.applier.execute(self.job, Plan(**plan), children or {}, standing or {}))


def kinds(outcome):
    return {ref: refusal.error.kind for ref, refusal in outcome.refusals.items()}


def test_objects_are_applied_in_order():
    scene = Scene()
    outcome = scene.execute(apply=(config_map(), searchers(), trainer()))
    assert scene.api.writes == [("apply", CONFIG), ("apply", SEARCHERS), ("apply", TRAINER)]
    assert (outcome.writes, outcome.refusals) == (3, {})


def test_what_was_applied_is_seen_at_once():
    scene = Scene()
    scene.execute(apply=(searchers(),))
    seen = scene.recent.newest(KEY, SEARCHERS, None)
    assert seen is not None and seen["spec"] == {"replicas": 1}


def test_the_generation_that_an_apply_left_is_accepted():
    scene = Scene()
    outcome = scene.execute(apply=(config_map(), searchers()))
    uid = scene.api[SEARCHERS]["metadata"]["uid"]
    assert outcome.accepted == {SEARCHERS: (uid, 1)}  # a ConfigMap has none: any later edit must be seen


def test_an_apply_that_changes_nothing_is_no_write():
    scene = Scene()
    scene.execute(apply=(config_map(),))
    assert scene.execute({CONFIG: scene.api[CONFIG]}, apply=(config_map(),)).writes == 0


def test_an_object_of_somebody_else_is_never_touched():
    scene = Scene()
    theirs = scene.api.put(searchers(owners=[{"kind": "TBAJob", "name": "other", "uid": "other"}]))
    outcome = scene.execute(apply=(searchers(), trainer()))
    assert scene.api[SEARCHERS] == theirs
    assert kinds(outcome) == {SEARCHERS: "NameConflict"}
    told = outcome.refusals[SEARCHERS].error.message
    assert told.startswith("StatefulSet default/gsm8k-searcher exists, owned by TBAJob other:")
    assert ("apply", TRAINER) in scene.api.writes


def test_a_leftover_of_a_deleted_namesake_is_waited_for():
    scene = Scene()
    going = searchers(owners=[{"kind": "TBAJob", "name": "gsm8k", "uid": "older"}])
    going["metadata"] |= {"deletionTimestamp": "2027-01-15T08:00:00Z", "finalizers": ["x"]}
    scene.api.put(going)
    refusal = scene.execute(apply=(searchers(),)).refusals[SEARCHERS]
    assert "is being deleted" in refusal.error.message
    assert refusal.until == scene.clock.now + 5


def test_no_pod_is_made_beside_a_config_of_somebody_else():
    scene = Scene()
    scene.api.put(config_map(owners=[]))
    outcome = scene.execute(apply=(config_map(), searchers(), trainer()))
    assert kinds(outcome) == {CONFIG: "NameConflict"}
    assert "owned by nobody" in outcome.refusals[CONFIG].error.message
    assert scene.api.writes == []


def test_nor_in_the_passes_after():
    scene = Scene()
    scene.api.put(config_map(owners=[]))
    first = scene.execute(apply=(config_map(), searchers(), trainer()))
    second = scene.execute(standing=first.refusals, apply=(config_map(), searchers(), trainer()))
    assert kinds(second) == {CONFIG: "NameConflict"}
    assert scene.api.writes == []


def test_furniture_that_fits_the_quota_again_lets_pods_follow():
    scene = Scene()
    standing = {CONFIG: Refusal(ApplyError("QuotaExceeded", "no"), scene.clock.now + 30)}
    outcome = scene.execute(standing=standing, apply=(config_map(), searchers()))
    assert outcome.refusals == {}
    assert scene.api.writes == [("apply", CONFIG), ("apply", SEARCHERS)]


def test_a_refusal_goes_with_its_cause():
    scene = Scene()
    refusal = Refusal(ApplyError("InvalidPodTemplate", "no"), scene.clock.now + 600)
    outcome = scene.execute(standing={CONFIG: refusal, SEARCHERS: refusal}, apply=(trainer(),))
    # The configuration is as it should be; a refused StatefulSet is left out of the plan for being refused.
    assert outcome.refusals == {SEARCHERS: refusal}


def test_our_own_object_that_the_cache_lacks_is_applied():
    scene = Scene()
    scene.api.put(searchers())
    assert scene.execute(apply=(searchers(),)).refusals == {}


def test_a_pod_that_would_be_refused_keeps_its_workload_from_being_applied():
    scene = Scene()
    scene.api.fail(Invalid("spec.containers[0].image: Required"), verb="create", name="gsm8k-searcher-rehearsal")
    rehearse = (rehearsal("searcher"), rehearsal("trainer"))
    outcome = scene.execute(rehearse=rehearse, apply=(config_map(), searchers(), trainer()))
    assert kinds(outcome) == {SEARCHERS: "InvalidPodTemplate"}
    assert scene.api.writes == [("apply", CONFIG), ("apply", TRAINER)]


def test_pod_security_refuses_a_template():
    scene = Scene()
    scene.api.fail(Forbidden('pods "x" is forbidden: violates PodSecurity "restricted"'), verb="create")
    outcome = scene.execute(rehearse=(rehearsal("searcher"),), apply=(searchers(),))
    assert kinds(outcome) == {SEARCHERS: "InvalidPodTemplate"}


def test_a_missing_right_to_rehearse_says_nothing_about_the_pod():
    scene = Scene()
    scene.api.fail(Forbidden('pods is forbidden: User "x" cannot create resource "pods"'), verb="create")
    assert scene.execute(rehearse=(rehearsal("searcher"),), apply=(searchers(),)).refusals == {}


def test_a_full_quota_is_told_and_the_workload_applied():
    scene = Scene()
    scene.api.fail(QuotaExceeded("exceeded quota: gpu"), verb="create")
    outcome = scene.execute(rehearse=(rehearsal("searcher"),), apply=(searchers(),))
    assert kinds(outcome) == {SEARCHERS: "QuotaExceeded"}
    assert ("apply", SEARCHERS) in scene.api.writes


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Invalid("no"), "InvalidPodTemplate"),
        (QuotaExceeded("no"), "QuotaExceeded"),
        (Forbidden("no"), "Forbidden"),
    ],
)
def test_a_refused_apply_is_told_and_tried_again_later(error, kind):
    scene = Scene()
    scene.api.fail(error, verb="apply", kind="StatefulSet")
    outcome = scene.execute(apply=(searchers(), trainer()))
    assert kinds(outcome) == {SEARCHERS: kind}
    assert outcome.refusals[SEARCHERS].until == scene.clock.now + RETRY_SECONDS[kind]
    assert ("apply", TRAINER) in scene.api.writes


def test_a_standing_refusal_is_not_tried_again_before_its_time():
    scene = Scene()
    standing = {SEARCHERS: Refusal(ApplyError("InvalidPodTemplate", "no"), scene.clock.now + 1)}
    outcome = scene.execute(standing=standing, rehearse=(rehearsal("searcher"),), apply=(searchers(),))
    assert (scene.api.writes, scene.api.rehearsals) == ([], [])
    assert outcome.refusals == standing
    scene.clock.now += 2
    assert scene.execute(standing=standing, apply=(searchers(),)).refusals == {}


@pytest.mark.parametrize("error", [Conflict("later"), Unavailable("down"), NamespaceTerminating("going")])
def test_what_the_queue_retries_is_not_swallowed(error):
    scene = Scene()
    scene.api.fail(error, verb="apply")
    with pytest.raises(type(error)):
        scene.execute(apply=(config_map(),))


def test_scaling_and_deletions_follow():
    scene = Scene()
    scene.api.put(searchers())
    uid = scene.api.put(trainer())["metadata"]["uid"]
    outcome = scene.execute(scale=(Scale(SEARCHERS, 3),), delete=(Delete(TRAINER, uid),))
    assert scene.api[SEARCHERS]["spec"]["replicas"] == 3
    assert TRAINER not in scene.api
    assert outcome.writes == 2


def test_a_deleted_object_is_not_believed_to_be_there():
    scene = Scene()
    scene.execute(apply=(trainer(),))
    scene.execute(delete=(Delete(TRAINER, scene.api[TRAINER]["metadata"]["uid"]),))
    assert scene.recent.newest(KEY, TRAINER, None) is None


def test_the_status_of_a_namesake_is_left_alone():
    scene = Scene()
    older = {**scene.raw_job, "metadata": scene.raw_job["metadata"] | {"uid": "older", "resourceVersion": "0"}}
    with pytest.raises(Conflict):
        asyncio.run(scene.applier.write_status(older, JobStatus(phase="Failed")))
    assert "status" not in scene.api[ref_of(scene.raw_job)]


def test_a_status_made_from_an_older_version_of_the_job_is_not_written():
    scene = Scene()
    scene.api.edit(ref_of(scene.raw_job), spec={"suspend": True})
    with pytest.raises(Conflict):
        asyncio.run(scene.applier.write_status(scene.raw_job, JobStatus(phase="Running")))
    assert "status" not in scene.api[ref_of(scene.raw_job)]


def test_the_status_of_a_job_that_is_gone_is_nobodys():
    scene = Scene()
    scene.api.remove(ref_of(scene.raw_job))
    asyncio.run(scene.applier.write_status(scene.raw_job, JobStatus(phase="Failed")))
    assert scene.recent.newest(KEY, ref_of(scene.raw_job), None) is None


def test_a_status_is_written_without_reading_the_job_first():
    scene = Scene()
    asyncio.run(scene.applier.write_status(scene.raw_job, JobStatus(phase="Running")))
    assert {access.verb for access in scene.api.accesses} == {"patch"}


def test_a_written_status_is_seen_at_once():
    scene = Scene()
    asyncio.run(scene.applier.write_status(scene.raw_job, JobStatus(phase="Running")))
    seen = scene.recent.newest(KEY, ref_of(scene.raw_job), scene.raw_job)
    assert seen is not None and seen["status"]["phase"] == "Running"


def test_notes_become_events_about_the_job():
    scene = Scene()
    asyncio.run(scene.applier.tell(scene.raw_job, (Note("Warning", "OOMKilled", "raise it"),)))
    assert scene.api.events == [("Warning", "OOMKilled", "raise it")]


def test_an_expired_job_is_removed():
    scene = Scene()
    asyncio.run(scene.applier.delete_job(scene.job))
    assert Ref("tba.dev/v1alpha1", "TBAJob", "default", "gsm8k") not in scene.api
