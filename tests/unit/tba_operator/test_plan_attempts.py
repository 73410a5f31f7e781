"""Trainer attempts through the plan: which Job there is, what counts, what the next one waits for."""

import copy

import pytest
from support.job_world import NAMESPACE, World, job_ref, said

from tba_operator.api import TrainerStatus
from tba_operator.lifecycle import last_words
from tba_operator.world import ApplyError


def running(**spec):
    return World.of(**spec).settle()


def test_a_crashed_trainer_goes_on_in_the_same_job_and_is_counted():
    world = running()
    world.end(world.trainer, 1, message="CUDA error")
    world.settle()
    trainer = world.status.trainer
    assert world.jobs() == [1]
    assert (trainer.failures, trainer.attempt_failures, trainer.restarts) == (1, 1, 1)
    assert (trainer.last_exit_code, trainer.last_reason, trainer.last_message) == (1, "Error", "CUDA error")


def test_a_failure_is_counted_once_however_often_it_is_seen():
    world = running()
    world.end(world.trainer, 1)
    world.controllers()
    before = copy.deepcopy(world.manifest)
    world.reconcile()
    world.reconcile()
    world.manifest = before  # the status write was lost
    world.reconcile()
    assert world.status.trainer.failures == 1


def test_an_older_view_takes_no_failure_back_and_adds_none():
    world = running()
    older = copy.deepcopy(world.objects)
    world.end(world.trainer, 1)
    world.settle()
    world.reconcile(children=older)
    assert world.status.trainer.failures == 1
    world.settle()
    assert world.status.trainer.failures == 1


@pytest.mark.parametrize("code", [2, 143])
def test_storage_outage_and_sigterm_are_not_counted(code):
    world = running()
    world.end(world.trainer, code)
    world.settle()
    assert (world.status.trainer.failures, world.status.trainer.restarts) == (0, 1)


def test_a_preempted_trainer_is_not_counted():
    world = running()
    world.disrupt(world.trainer)
    world.settle()
    trainer = world.status.trainer
    assert (trainer.failures, trainer.restarts, world.jobs(), world.phase) == (0, 1, [1], "Running")


def test_failures_without_a_new_checkpoint_beyond_the_limit_fail_the_job_with_the_last_words():
    world = running(runPolicy={"backoffLimit": 2})
    for _ in range(3):
        world.end(world.trainer, 137, reason="OOMKilled")
        world.settle(rounds=5) if world.status.trainer.failures < 2 else world.controllers()
        world.reconcile()
    assert world.condition("Failed") == ("True", "BackoffLimitExceeded")
    assert "failed 3 times without a new checkpoint" in world.message("Failed")
    assert "exit code 137 (OOMKilled)" in world.message("Failed")


@pytest.mark.parametrize(
    ("code", "reason", "message", "words"),
    [
        (137, "OOMKilled", "killed", "exit code 137 (OOMKilled): killed"),
        (1, None, None, "exit code 1"),
        (None, "Evicted", "low on memory", "Evicted: low on memory"),
        (None, None, None, ""),
    ],
)
def test_the_last_end_is_told_by_what_is_known_of_it(code, reason, message, words):
    ended = TrainerStatus(last_exit_code=code, last_reason=reason, last_message=message)
    assert last_words(ended) == words


def test_a_new_checkpoint_forgives_the_failures_before_it():
    world = running(runPolicy={"backoffLimit": 1})
    for step in range(10, 60, 10):
        world.speak(step=step, checkpoint_step=step)
        world.settle()
        world.end(world.trainer, 1)
        world.settle()
    assert (world.status.trainer.failures, world.phase) == (5, "Running")
    world.progress = None
    world.end(world.trainer, 1)
    world.settle()
    assert world.condition("Failed") == ("True", "BackoffLimitExceeded")


def test_checkpoints_told_only_in_last_words_forgive_too():
    world = running(runPolicy={"backoffLimit": 1})
    for step in (10, 20, 30, 40):
        word = said(world.trainer.uid, step=step, checkpoint_step=step)
        world.end(world.trainer, 1, progress=word)
        world.settle()
    assert (world.phase, world.status.trainer.checkpoint_step, world.status.trainer.failures) == ("Running", 40, 4)


def test_a_fenced_trainer_is_followed_by_the_next_attempt_and_counted():
    world = running()
    world.end(world.trainer, 3, message="epoch 4 is taken")
    world.settle()
    assert world.jobs() == [2], "the old Job goes when the new one is there"
    assert (world.status.trainer.attempt, world.status.trainer.failures) == (2, 1)
    assert world.phase == "Running"


def test_a_user_error_fails_the_job_with_its_message():
    world = running()
    world.end(world.trainer, 64, message="model.uri: no such repository")
    world.settle()
    assert world.condition("Failed") == ("True", "UserError")
    assert "model.uri: no such repository" in world.message("Failed")
    assert world.status.trainer.attempt == 1


def test_a_failure_rule_of_the_user_is_obeyed_even_for_exit_3():
    world = running(runPolicy={"failureRules": [{"action": "FailJob", "onExitCodes": [3]}]})
    world.end(world.trainer, 3)
    world.settle()
    assert world.condition("Failed") == ("True", "FailureRule")


def test_new_credentials_take_a_new_attempt_and_never_two_pods():
    world = running(storage={"uri": "s3://b/run", "credentials": {"secretRef": {"name": "old"}}})
    first = world.trainer
    world.change("storage", credentials={"secretRef": {"name": "new"}})
    world.reconcile()
    assert world.jobs() == [], "the old one is deleted"
    world.controllers()
    waiting = world.reconcile()
    assert not waiting.apply and first.name in world.message("TrainerReady"), "its pod still ends"
    world.settle()
    assert world.jobs() == [2] and world.trainer.attempt == 2


def test_a_new_attempt_waits_while_an_old_job_could_still_make_pods():
    world = running()
    world.end(world.trainer, 1)
    world.manifest["status"]["trainer"]["attempt"] = 2  # a status from after the replacement, children from before
    found = world.plan()
    assert [d.ref for d in found.delete] == [job_ref(1)]
    assert not any(m["kind"] == "Job" for m in found.apply)


def test_an_operator_that_crashed_before_its_status_write_adopts_the_job_it_made():
    world = World.of()
    world.reconcile()
    world.controllers()
    del world.manifest["status"]
    world.reconcile()
    assert world.status.trainer.attempt == 1 and world.jobs() == [1]


def test_a_view_from_before_the_creation_makes_the_same_job_again_not_another():
    world = World.of()
    world.reconcile()
    found = world.plan(children={}, pods=())
    assert job_ref(1).name in [m["metadata"]["name"] for m in found.apply if m["kind"] == "Job"]


def test_a_job_deleted_by_hand_comes_back_when_its_pod_is_gone():
    world = running()
    world.remove_job(1)
    assert not any(m["kind"] == "Job" for m in world.plan().apply), "its pod has yet to go"
    world.settle()
    assert world.phase == "Running" and len(world.jobs()) == 1


def test_a_job_made_again_under_its_number_counts_from_nothing():
    world = running()
    world.end(world.trainer, 1)
    world.settle()
    world.remove_job(1)
    world.settle()
    for failures in (2, 3):
        world.end(world.trainer, 1)
        world.settle()
        assert (world.jobs(), world.status.trainer.failures) == ([1], failures)
    assert world.truly_failed == 3


def test_a_status_without_the_jobs_uid_takes_the_job_for_the_one_that_it_counted():
    world = running()
    world.end(world.trainer, 1)
    world.settle()
    del world.manifest["status"]["trainer"]["attemptUid"]
    world.settle()
    assert world.status.trainer.failures == 1 and world.status.trainer.attempt_uid


def test_a_trainer_on_a_dead_node_is_replaced_by_the_next_attempt():
    world = running()
    pod = world.trainer
    world.lose_node(pod)
    world.pass_time(85)  # 30 s of grace and less than 60
    assert world.plan().delete == () and world.plan().requeue_after_seconds == 6
    world.pass_time(10)
    world.settle()
    assert world.jobs() == [2]
    assert [p.attempt for p in world.living_trainers()] == [2]
    assert pod.uid in world.pods, "only its node can end it; the bucket's epoch fences it"
    assert world.condition("Degraded") == ("True", "NodeLost")


def test_a_slow_pod_on_a_ready_node_is_never_given_up():
    world = running()
    pod = world.trainer
    world.delete_pod(pod.uid)
    world.pass_time(1000)
    found = world.plan()
    assert found.delete == () and found.requeue_after_seconds == 30


def test_a_searcher_on_a_dead_node_is_removed_by_force():
    world = running(searcher={"replicas": 2})
    pod = world.of_role("searcher")[0]
    world.lose_node(pod)
    world.pass_time(95)
    (delete,) = world.plan().delete
    assert (delete.ref.kind, delete.ref.name, delete.uid, delete.grace_seconds) == ("Pod", pod.name, pod.uid, 0)
    assert delete.ref.namespace == NAMESPACE
    world.settle()
    assert world.condition("SearchersReady")[0] == "True" and world.condition("Degraded")[0] == "False"


def test_an_error_of_an_attempt_that_is_not_wanted_any_more_is_no_fault():
    world = running()
    world.errors = {job_ref(7): ApplyError("InvalidPodTemplate", "immutable")}
    world.settle()
    assert world.condition("Degraded") == ("False", "AsExpected")
