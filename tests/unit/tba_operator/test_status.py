"""Status from what was found: times, texts, numbers, and when it is written."""

import pytest
from support.job_world import START, World, said

from tba_operator.api import format_time
from tba_operator.status import invalid


def running(**spec):
    return World.of(**spec).settle()


def test_last_transition_time_moves_with_the_status_alone():
    world = running(searcher={"replicas": 3})
    since = world.status.condition("SearchersReady").last_transition_time
    world.pass_time(100)
    world.set(world.of_role("searcher")[0], ready=False)
    world.settle()
    found = world.status.condition("SearchersReady")
    assert found.message.startswith("2 of 3") and found.last_transition_time == since
    world.change(None, suspend=True)
    world.reconcile()
    assert world.status.condition("SearchersReady").last_transition_time == format_time(world.now)


def test_observed_generation_follows_the_spec_on_every_condition_that_of_the_end_included():
    world = running()
    world.change("searcher", replicas=2)
    world.settle()
    assert world.status.observed_generation == 2
    assert {c.observed_generation for c in world.status.conditions} == {2}
    world.end(world.trainer, 0)
    world.settle()
    ended = world.status.condition("Complete")
    world.pass_time(60)
    world.change("searcher", replicas=1)
    world.settle()
    assert world.status.condition("Complete") == ended.model_copy(update={"observed_generation": 3})
    assert world.is_quiet()


def test_fields_of_a_newer_release_are_no_reason_for_a_write():
    world = running()
    world.manifest["status"]["future"] = {"field": 1}
    world.manifest["status"]["trainer"]["future"] = 1
    assert world.plan().status is None


def test_a_status_that_lacks_a_field_is_written_again():
    world = running()
    del world.manifest["status"]["searcher"]["selector"]
    assert world.plan().status is not None


def test_progress_is_rounded_and_kept_when_the_trainer_is_away():
    world = running()
    world.speak(step=123)
    world.settle()
    progress = world.status.progress
    assert (progress.step, progress.percentage, progress.reward) == (123, 17.6, 0.1235)
    assert (progress.staleness_mean, progress.trainer_idle_percent, progress.replay_ratio) == (1.23, 12.3, 0.988)
    assert progress.last_updated_time == format_time(START + 123)
    world.progress = None
    world.change(None, suspend=True)
    world.settle()
    assert world.status.progress == progress


def test_a_trainer_that_has_not_claimed_its_run_does_not_reset_progress():
    world = running()
    world.speak(step=123)
    world.settle()
    world.speak(step=0, run_id="", state="Starting")
    world.settle()
    assert world.status.progress.step == 123


def test_the_last_words_of_an_older_pod_do_not_take_progress_back():
    world = running()
    world.end(world.trainer, 1, progress=said(world.trainer.uid, step=50))
    world.settle()
    assert world.status.progress.step == 50
    world.speak(step=70)
    world.settle()
    world.progress = None
    world.settle()
    assert world.status.progress.step == 70


def test_the_trainer_condition_says_what_is_awaited():
    world = World.of()
    world.reconcile()
    assert world.condition("TrainerReady") == ("False", "Starting") and world.phase == "Pending"
    assert world.message("TrainerReady") == "Attempt 1 has no pod yet"
    world.controllers()
    world.set(world.trainer, phase="Running", node="n")
    world.reconcile()
    assert world.message("TrainerReady") == f"Pod {world.trainer.name} is not ready yet" and world.phase == "Starting"
    world.settle()
    world.set(world.trainer, ready=True)
    world.reconcile()
    assert world.condition("TrainerReady") == ("True", "Ready") and world.phase == "Running"
    world.end(world.trainer, 1, message="boom")
    world.reconcile()
    assert world.condition("TrainerReady") == ("False", "Restarting")
    assert "exit code 1 (Error): boom); another follows" in world.message("TrainerReady")


def test_a_trainer_whose_process_has_just_ended_does_not_start_again():
    world = running()
    pod = world.set(world.trainer, ready=False)  # the kubelet tells of the container before it tells of the pod
    world.reconcile()
    assert world.condition("TrainerReady")[0] == "False" and world.phase == "Running"
    world.end(pod, 0)
    world.reconcile()
    assert world.phase == "Complete"


def test_a_trainer_that_follows_another_starts():
    world = running()
    world.end(world.trainer, 1)
    world.controllers()
    world.set(world.trainer, phase="Running", node="n")
    for _ in range(2):
        world.reconcile()
        assert world.phase == "Starting"


@pytest.mark.parametrize("seconds", [1e18, -1e18])
def test_a_nonsensical_time_of_the_trainer_stops_no_pass(seconds):
    world = running()
    world.speak(last_updated_time=seconds)
    world.settle()
    assert world.status.progress.last_updated_time in ("9999-12-31T23:59:59Z", "1970-01-01T00:00:00Z")
    world.end(world.trainer, 143, progress=said(world.trainer.uid, last_updated_time=seconds))
    world.settle()
    assert world.is_quiet()


def test_the_trainers_pod_is_named_while_it_is_away_but_not_ready():
    world = running()
    name = world.trainer.name
    world.change(None, suspend=True)
    world.settle()
    assert (world.status.trainer.pod_name, world.status.trainer.ready) == (name, False)


def test_a_pod_that_left_no_exit_code_has_none():
    world = running()
    world.end(world.trainer, -1, reason="Evicted", message="The node was low on memory")
    world.settle()
    trainer = world.status.trainer
    assert (trainer.last_exit_code, trainer.last_reason) == (None, "Evicted")


def test_a_message_has_an_end():
    world = running()
    for pod, code in zip(world.of_role("searcher"), (1,), strict=True):
        world.crash_searcher(pod, code, message="x" * 100_000)
    world.reconcile()
    assert len(world.message("Degraded")) < 1000


def test_a_job_that_cannot_be_understood_says_why_once():
    manifest = {"metadata": {"name": "x", "namespace": "lab", "generation": 3}, "spec": {}}
    status = invalid(manifest, "lab/x: model: missing", START)
    assert status is not None
    found = status.condition("Degraded")
    assert found is not None
    assert (found.status, found.reason, found.message) == ("True", "InvalidSpec", "lab/x: model: missing")
    assert (status.observed_generation, status.phase) == (3, "Pending")
    assert invalid({**manifest, "status": status.dump()}, "lab/x: model: missing", START + 60) is None


def test_a_broken_edit_of_a_running_job_keeps_the_rest_of_its_status():
    world = running()
    before = world.status
    status = invalid(world.manifest, "wrong", world.now + 60)
    assert status is not None and status.trainer == before.trainer and status.phase == "Running"
    assert [c.type for c in status.conditions] == [c.type for c in before.conditions]


@pytest.mark.parametrize("suspend", [True, False])
def test_phase_is_derived(suspend):
    world = running(suspend=suspend)
    assert world.phase == ("Suspended" if suspend else "Running")
    world.manifest["status"]["phase"] = "Nonsense"
    world.reconcile()
    assert world.phase == ("Suspended" if suspend else "Running")
