from contextlib import suppress

import pytest
from support.controlled import Controlled
from support.raw_pods import condition, raw_pod, terminated

from tba_operator.apply import RETRY_SECONDS
from tba_operator.kubeapi import Forbidden, Invalid, QuotaExceeded, Unavailable
from tba_operator.reconcile import TRIES_BEFORE_TOLD
from tba_operator.world import Ref

JOB = ("default", "gsm8k")
TRAINER = Ref("batch/v1", "Job", "default", "gsm8k-trainer-1")
SEARCHERS = Ref("apps/v1", "StatefulSet", "default", "gsm8k-searcher")
BUDGET = Ref("policy/v1", "PodDisruptionBudget", "default", "gsm8k-searcher")
CONFIG = Ref("v1", "ConfigMap", "default", "gsm8k-config")


def running(world, name="gsm8k-trainer-1-0-abc"):
    """The trainer pod of attempt 1 runs."""
    return world.api.put(raw_pod("trainer", name, conditions=[condition("Ready")], status={"podIP": "10.0.0.7"}))


def test_a_new_job_gets_its_children_and_a_status():
    world = Controlled()
    key = world.create()
    world.reconcile(key)
    assert TRAINER in world.api and SEARCHERS in world.api and CONFIG in world.api
    assert world.status(key)["phase"] == "Pending"


def test_a_second_pass_over_an_unchanged_job_writes_nothing():
    world = Controlled()
    key = world.create()
    world.settle(key)
    writes = len(world.api.writes)
    world.reconcile(key)
    assert world.api.writes[writes:] == []


def test_a_pass_before_the_watch_has_caught_up_makes_nothing_twice():
    world = Controlled()
    key = world.create()
    world.reconcile(key)
    made = [write for write in world.api.writes if write[0] == "apply"]
    assert world.reconcile(key, stale=True) is not None
    assert [write for write in world.api.writes if write[0] == "apply"] == made


def test_another_controller_that_starts_anew_writes_nothing():
    world = Controlled()
    key = world.create()
    world.settle(key)
    restarted = Controlled(world.api)
    writes = len(world.api.writes)
    restarted.reconcile(key)
    assert world.api.writes[writes:] == []


def test_no_second_trainer_is_made_while_the_cache_misses_the_first():
    world = Controlled()
    key = world.create()
    world.settle(key)
    world.recent.forget(key)
    for index in (world.children, world.pods):
        index.clear()
    world.reconcile(key, stale=True)
    assert [job["metadata"]["name"] for job in world.api.of_kind("Job")] == ["gsm8k-trainer-1"]
    assert world.api.writes.count(("apply", TRAINER)) == 1


def test_a_trainer_pod_that_the_cache_misses_keeps_the_next_attempt_away():
    world = Controlled()
    key = world.create()
    world.settle(key)
    world.watch()
    world.api.remove(TRAINER)
    world.children[key] = [child for child in world.children[key] if child["kind"] != "Job"]
    running(world)
    world.reconcile(key, stale=True)
    assert world.api.of_kind("Job") == []


def test_an_end_is_read_off_the_api_server_and_not_off_a_cache():
    world = Controlled()
    key = world.create()
    world.settle(key)
    world.api.edit(TRAINER, status={"conditions": [{"type": "Complete", "status": "True"}]})
    world.watch()
    world.api.edit(TRAINER, status={"conditions": []})
    world.reconcile(key, stale=True)
    assert world.condition(key, "Complete") == ("False", "NotFinished")
    world.api.edit(TRAINER, status={"conditions": [{"type": "Complete", "status": "True"}]})
    world.reconcile(key)
    assert world.condition(key, "Complete")[0] == "True"


def test_a_job_of_another_controller_is_left_alone():
    world = Controlled()
    key = world.create(managedBy="kueue.x-k8s.io/multikueue")
    assert world.reconcile(key) is None
    assert world.api.writes == []


def test_a_job_that_is_being_deleted_is_left_to_the_garbage_collector():
    world = Controlled()
    key = world.create(metadata={"deletionTimestamp": "2027-01-15T08:00:00Z", "finalizers": ["x"]})
    world.reconcile(key)
    assert world.api.writes == []


def test_a_job_that_cannot_be_understood_gets_a_status_and_nothing_else():
    world = Controlled()
    key = world.create(objective={"responsesPerPrompt": 50}, searcher={"samplesPerPrompt": 2})
    world.reconcile(key)
    assert world.condition(key, "Degraded") == ("True", "InvalidSpec")
    assert [verb for verb, _ in world.api.writes] == ["apply_status"]
    assert [event[1] for event in world.api.events] == ["InvalidSpec"]
    world.reconcile(key)
    assert len(world.api.writes) == 1


def test_a_deleted_job_is_forgotten():
    world = Controlled()
    key = world.create()
    world.settle(key)
    world.api.remove(Ref("tba.dev/v1alpha1", "TBAJob", *key))
    world.reconcile(key)
    assert world.recent.refs(key) == []
    assert b"tba_job_info{" not in world.metrics.render()


def test_a_refused_template_is_told_in_the_same_pass():
    world = Controlled()
    key = world.create()
    world.api.fail(Invalid("spec.containers[0].image: Required"), verb="create", kind="Pod", times=None)
    world.reconcile(key)
    assert world.condition(key, "Degraded") == ("True", "InvalidPodTemplate")
    assert SEARCHERS not in world.api and CONFIG in world.api
    assert ("Warning", "InvalidPodTemplate") in [event[:2] for event in world.api.events]


def test_a_refused_template_is_not_tried_again_until_the_job_changes():
    world = Controlled()
    key = world.create()
    world.api.fail(Invalid("no"), verb="create", kind="Pod", times=None)
    world.reconcile(key)
    world.api.mend()
    world.reconcile(key)
    assert SEARCHERS not in world.api
    world.api.edit(Ref("tba.dev/v1alpha1", "TBAJob", *key), spec={"searcher": {"image": "good:1"}})
    world.reconcile(key)
    world.reconcile(key)
    assert SEARCHERS in world.api
    assert world.condition(key, "Degraded") == ("False", "AsExpected")


def test_a_full_quota_passes():
    world = Controlled()
    key = world.create()
    world.api.fail(QuotaExceeded("exceeded quota: gpu"), verb="create", kind="Pod", times=2)
    again = world.reconcile(key)
    assert world.condition(key, "Degraded") == ("True", "QuotaExceeded")
    assert again is not None and again <= 30
    world.now += 31
    world.reconcile(key)
    assert world.condition(key, "Degraded") == ("False", "AsExpected")


def test_a_taken_name_is_told_and_waited_for():
    world = Controlled()
    theirs = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"namespace": "default"}, "spec": {}}
    theirs["metadata"]["name"] = "gsm8k-searcher"
    world.api.put(theirs)
    key = world.create()
    again = world.reconcile(key)
    assert world.condition(key, "Degraded") == ("True", "NameConflict")
    assert again is not None and again <= 5
    world.api.remove(SEARCHERS)
    world.now += 6
    world.reconcile(key)
    assert SEARCHERS in world.api
    assert world.condition(key, "Degraded") == ("False", "AsExpected")


def test_a_server_that_does_not_answer_leaves_the_status_as_it_was():
    world = Controlled()
    key = world.create()
    world.api.fail(Unavailable("down"), verb="apply")
    with pytest.raises(Unavailable):
        world.reconcile(key)
    assert world.status(key) == {}


def test_a_server_that_fails_again_and_again_is_told():
    world = Controlled()
    key = world.create()
    refused = Unavailable('HTTP 500: failed calling webhook "policy.example.com"')
    world.api.fail(refused, verb="apply", kind="StatefulSet", times=None)
    for _ in range(TRIES_BEFORE_TOLD):
        assert world.status(key) == {}
        with pytest.raises(Unavailable):
            world.reconcile(key)
    assert world.condition(key, "Degraded") == ("True", "WriteFailed")
    assert "policy.example.com" in world.api.events[-1][2]
    writes = len(world.api.writes)
    with pytest.raises(Unavailable):
        world.reconcile(key)
    assert [verb for verb, _ in world.api.writes[writes:]].count("apply_status") == 0, "told once"
    world.api.mend()
    world.reconcile(key)
    assert world.condition(key, "Degraded") == ("False", "AsExpected")


def test_a_deletion_that_is_refused_again_and_again_is_told():
    world = Controlled()
    key = world.create()
    world.settle(key)
    world.api.edit(Ref("tba.dev/v1alpha1", "TBAJob", *key), spec={"suspend": True})
    world.api.fail(Forbidden("jobs.batch is forbidden: cannot delete"), verb="delete", times=None)
    for _ in range(TRIES_BEFORE_TOLD):
        with pytest.raises(Forbidden):
            world.reconcile(key)
    assert world.condition(key, "Degraded") == ("True", "Forbidden")


@pytest.mark.parametrize("error", [Unavailable("HTTP 500"), Forbidden("no")])
def test_what_failed_after_a_change_is_done_when_it_can_be(error):
    world = Controlled()
    key = world.create(searcher={"replicas": 3})
    world.settle(key)
    before = world.api[BUDGET]["spec"]
    world.api.edit(Ref("tba.dev/v1alpha1", "TBAJob", *key), spec={"searcher": {"minAvailable": 2}})
    world.api.fail(error, verb="apply", kind="PodDisruptionBudget", times=None)
    for _ in range(TRIES_BEFORE_TOLD):
        with suppress(Unavailable):
            world.reconcile(key)
    assert world.status(key)["observedGeneration"] == 2, "the status tells of the new generation"
    world.api.mend()
    world.now += 61
    world.reconcile(key)
    assert world.api[BUDGET]["spec"] != before


def test_a_status_that_cannot_be_written_either_hides_nothing():
    world = Controlled()
    key = world.create()
    world.api.fail(Unavailable("first"), verb="apply", times=None)
    world.api.fail(Unavailable("second"), verb="apply_status", times=None)
    for _ in range(TRIES_BEFORE_TOLD + 1):
        with pytest.raises(Unavailable, match="first"):
            world.reconcile(key)


def test_no_pod_starts_beside_a_config_of_somebody_else_however_often_it_is_tried():
    world = Controlled()
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "default", "name": "gsm8k-config"}}
    world.api.put(theirs)
    key = world.create()
    for _ in range(4):
        world.reconcile(key)
        world.now += 2
    assert SEARCHERS not in world.api and TRAINER not in world.api
    assert world.condition(key, "Degraded") == ("True", "NameConflict")


def test_what_could_not_be_done_is_counted():
    world = Controlled()
    key = world.create()
    world.api.fail(Forbidden("no"), verb="apply", kind="StatefulSet")
    world.reconcile(key)
    assert b'tba_reconcile_errors_total{kind="Forbidden"} 1.0' in world.metrics.render()


def test_a_user_error_ends_the_job_with_its_words():
    world = Controlled()
    key = world.create()
    world.settle(key)
    words = '{"exitCode": 64, "message": "model.uri: not found"}'
    world.api.put(raw_pod("trainer", "t", phase="Failed", container=terminated(64, message=words)))
    told = "Container trainer for pod default/t failed with exit code 64 matching FailJob rule at index 1"
    failed = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": told}
    world.api.edit(TRAINER, status={"failed": 1, "conditions": [failed]})
    world.settle(key)
    assert world.condition(key, "Failed") == ("True", "UserError")
    assert world.status(key)["trainer"]["lastMessage"] == "model.uri: not found"


def test_a_job_that_may_not_be_deleted_is_cleaned_up_all_the_same_and_told():
    world = Controlled()
    key = world.create(runPolicy={"ttlSecondsAfterFinished": 0, "cleanupPolicy": "All"})
    world.settle(key)
    world.api.fail(Forbidden("tbajobs is forbidden: cannot delete"), verb="delete", kind="TBAJob", times=None)
    world.api.edit(TRAINER, status={"conditions": [{"type": "Complete", "status": "True"}]})
    world.reconcile(key)
    again = world.reconcile(key)
    assert SEARCHERS not in world.api and TRAINER not in world.api
    assert again == RETRY_SECONDS["Forbidden"]
    assert ("Warning", "Forbidden") in [event[:2] for event in world.api.events]


def test_a_copied_trainer_pod_that_ends_well_completes_nothing():
    world = Controlled()
    key = world.create()
    world.settle(key)
    world.api.put(raw_pod("trainer", "copied", phase="Succeeded", container=terminated(0), ownerReferences=[]))
    world.settle(key)
    assert world.condition(key, "Complete") == ("False", "NotFinished")


def test_a_recreated_job_waits_for_the_trainer_of_its_namesake():
    world = Controlled()
    world.api.put(raw_pod("trainer", "saving", creationTimestamp="2027-01-15T07:00:00Z"))
    key = world.create()
    world.settle(key)
    assert SEARCHERS in world.api and TRAINER not in world.api
    world.api.remove(Ref("v1", "Pod", "default", "saving"))
    world.settle(key)
    assert TRAINER in world.api


def test_an_expired_job_is_removed():
    world = Controlled()
    key = world.create(runPolicy={"ttlSecondsAfterFinished": 60})
    world.settle(key)
    world.api.edit(TRAINER, status={"conditions": [{"type": "Complete", "status": "True"}]})
    world.settle(key)
    world.now += 61
    world.reconcile(key)
    assert world.api.of_kind("TBAJob") == []
