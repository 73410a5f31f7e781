"""From creation over suspension to the end, through the plan."""

from dataclasses import replace

import pytest
from support.job_world import START, STATEFUL_SET, World, job_ref, said

from tba_operator.api import format_time, parse_time
from tba_operator.plan import plan
from tba_operator.world import Observed, Plan, ProgressSample, ref_of


def running(**spec):
    return World.of(**spec).settle()


def kinds(found):
    return [manifest["kind"] for manifest in found.apply]


# -- creation


def test_a_new_job_gets_its_children_with_pods_last():
    world = World.of(searcher={"replicas": 3})
    found = world.plan()
    assert kinds(found) == [
        *("ConfigMap", "ServiceAccount", "ServiceAccount", "Service", "Service", "NetworkPolicy", "NetworkPolicy"),
        *("PodDisruptionBudget", "StatefulSet", "Job"),
    ]
    assert [pod["kind"] for pod in found.rehearse] == ["Pod", "Pod"]
    assert found.status is not None and found.status.start_time == format_time(START)


def test_the_first_status_holds_every_known_condition():
    world = World.of()
    world.reconcile()
    assert [c.type for c in world.status.conditions] == [
        *("Suspended", "StorageReady", "TrainerReady", "SearchersReady", "Degraded", "Complete", "Failed")
    ]
    assert world.condition("StorageReady") == ("Unknown", "NotTried")
    assert all(c.observed_generation == 1 for c in world.status.conditions)


def test_a_pass_over_an_unchanged_job_writes_nothing():
    world = running(searcher={"replicas": 3})
    assert world.is_quiet()
    world.pass_time(500)
    assert world.is_quiet()


def test_a_job_that_goes_away_or_belongs_to_another_controller_is_left_alone():
    job = World.of().job
    assert plan(replace(job, deleting=True), Observed(), START, World.of().settings) == Plan()
    foreign = World.of(managedBy="kueue.x-k8s.io/multikueue")
    assert foreign.plan() == Plan()


def test_images_are_resolved_once_so_an_operator_upgrade_rolls_no_pod():
    world = running()
    world.settings = replace(world.settings, trainer_image="registry/trainer:2", searcher_image="registry/searcher:2")
    assert world.is_quiet()
    assert (world.status.images.trainer, world.status.images.searcher) == ("registry/trainer:1", "registry/searcher:1")


def test_an_image_of_the_spec_goes_before_the_resolved_one():
    world = running(trainer={"image": "mine:1"})
    pod = world.objects[job_ref(1)]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "mine:1"
    assert world.status.images.trainer is None, "status keeps the controller's choices only"


def test_a_live_change_reaches_the_config_map_and_no_pod():
    world = running()
    world.change("sync", intervalSteps=7)
    found = world.plan()
    assert kinds(found) == ["ConfigMap"] and not found.delete and not found.scale


def test_a_template_that_this_release_would_render_otherwise_is_left_as_it_is():
    world = running()
    for ref in (STATEFUL_SET, job_ref(1)):
        world.objects[ref]["spec"]["template"] = {}
    assert world.is_quiet(), "only the hash of the inputs counts"


def test_what_our_own_apply_left_is_no_drift_until_something_else_is_asked_for():
    world = running()
    ref = next(ref for ref in world.objects if ref.kind == "NetworkPolicy")
    world.objects[ref]["spec"]["policyTypes"] = ["normalised"]
    assert kinds(world.plan()) == ["NetworkPolicy"]
    metadata = world.objects[ref]["metadata"]
    observed = replace(world.observed(), accepted={ref: (metadata["uid"], metadata["generation"])})
    assert plan(world.job, observed, world.now, world.settings).apply == ()
    world.change("searcher", replicas=2)
    observed = replace(observed, children=world.observed().children)
    applied = plan(world.job, observed, world.now, world.settings).apply
    assert ref in [ref_of(m) for m in applied]


def test_policies_open_again_when_the_chart_asks_less_of_the_namespaces_that_scrape():
    world = World.of()
    world.settings = replace(world.settings, metrics_namespace_labels={"team": "ml", "scrapes": "yes"})
    world.settle()
    for labels in ({"team": "ml"}, {}):
        world.settings = replace(world.settings, metrics_namespace_labels=labels)
        assert kinds(world.plan()) == ["NetworkPolicy", "NetworkPolicy"]
        assert world.settle().is_quiet()


def test_a_budget_and_policies_that_are_switched_off_are_removed():
    world = running(searcher={"replicas": 3})
    world.change("searcher", podDisruptionBudget=False)
    world.settings = replace(world.settings, network_policy=False)
    assert sorted(d.ref.kind for d in world.plan().delete) == ["NetworkPolicy", "NetworkPolicy", "PodDisruptionBudget"]


# -- searchers


def test_another_number_of_searchers_is_a_scale_not_an_apply():
    world = running(searcher={"replicas": 3})
    world.change("searcher", replicas=5)
    found = world.plan()
    assert [(s.ref, s.replicas) for s in found.scale] == [(STATEFUL_SET, 5)]
    assert "StatefulSet" not in kinds(found)


def test_another_searcher_template_is_applied_whole_after_a_rehearsal():
    world = running(searcher={"replicas": 3})
    world.change("searcher", image="mine:2")
    found = world.plan()
    assert kinds(found) == ["StatefulSet"] and len(found.rehearse) == 1
    assert found.apply[0]["spec"]["replicas"] == 3
    world.settle(rounds=60)
    assert world.status.searcher.updated_replicas == 3


def test_searchers_are_ready_when_the_least_number_is():
    world = World.of(searcher={"replicas": 3, "minAvailable": 2})
    world.reconcile()
    assert world.condition("SearchersReady") == ("False", "Starting")
    world.settle()
    first = world.of_role("searcher")[0]
    world.set(first, ready=False)
    world.settle()
    assert world.condition("SearchersReady") == ("True", "Ready")
    assert world.message("SearchersReady") == "2 of 3 searchers are ready, 2 are needed"
    world.change("searcher", replicas=0)
    world.settle()
    assert world.condition("SearchersReady") == ("False", "NoneDesired")


def test_a_last_evaluation_without_searchers_says_what_it_waits_for():
    world = running(searcher={"replicas": 0})
    world.progress = ProgressSample(said(world.trainer.uid, step=700, state="Evaluating"), world.now)
    world.settle()
    assert world.condition("SearchersReady") == ("False", "NoneDesired")
    assert "the last evaluation waits up to 1800 s" in world.message("SearchersReady")
    assert "Set it to 1 or more" in world.message("SearchersReady")


def test_scale_and_its_selector_are_served():
    world = running(searcher={"replicas": 3})
    searcher = world.status.searcher
    assert (searcher.replicas, searcher.ready_replicas, searcher.desired_replicas) == (3, 3, 3)
    assert searcher.selector == "tba.dev/job-name=gsm8k,tba.dev/role=searcher"


def test_a_managed_job_starts_from_its_spec_and_leaves_it_to_the_user():
    autoscaling = {"mode": "Managed", "minReplicas": 2, "maxReplicas": 6}
    world = running(searcher={"replicas": 3, "autoscaling": autoscaling})
    assert world.status.searcher.desired_replicas == 3 and world.scaling.desired == 3
    assert world.manifest["spec"]["searcher"]["replicas"] == 3, "spec is the user's"


def test_an_autoscaler_that_is_switched_on_again_goes_on_from_what_there_is():
    managed = {"mode": "Managed", "minReplicas": 2, "maxReplicas": 12}
    world = running(searcher={"replicas": 3, "autoscaling": managed})
    world.scaling = replace(world.scaling, desired=10)
    assert world.settle().status.searcher.desired_replicas == 10
    world.change("searcher", autoscaling={"mode": "Static"})
    assert world.settle().status.searcher.desired_replicas == 3
    world.change("searcher", autoscaling=managed)
    assert world.settle().status.searcher.desired_replicas == 3


# -- suspension


def test_suspend_removes_every_pod_and_only_then_says_so():
    world = running(searcher={"replicas": 3})
    world.change(None, suspend=True)
    world.reconcile()
    assert world.condition("Suspended") == ("False", "Suspending") and world.phase == "Suspending"
    assert world.jobs() == [] and world.objects[STATEFUL_SET]["spec"]["replicas"] == 0
    world.settle()
    assert world.condition("Suspended") == ("True", "Suspended") and world.phase == "Suspended"
    assert not world.pods and world.status.start_time is None


def test_resume_takes_the_next_attempt_and_a_new_start():
    world = running()
    world.change(None, suspend=True)
    world.settle()
    world.pass_time(1000)
    world.change(None, suspend=False)
    world.settle()
    assert world.jobs() == [2] and world.phase == "Running"
    assert (parse_time(world.status.start_time) or 0) > START + 1000


def test_a_job_created_suspended_has_no_pods_and_starts_with_its_first_attempt():
    world = World.of(suspend=True).settle()
    assert not world.pods and world.phase == "Suspended" and STATEFUL_SET not in world.objects
    world.change(None, suspend=False)
    world.settle()
    assert world.jobs() == [1] and world.phase == "Running"


def test_a_template_changed_while_suspended_is_that_of_the_next_attempt():
    world = running()
    world.change(None, suspend=True)
    world.settle()
    world.change("trainer", image="mine:2")
    world.change(None, suspend=False)
    world.settle()
    assert world.objects[job_ref(2)]["spec"]["template"]["spec"]["containers"][0]["image"] == "mine:2"


# -- the end


def test_a_trainer_that_is_done_completes_the_job_with_its_final_word():
    world = running()
    world.speak(step=690)  # the last answer that was heard
    pod = world.trainer
    word = said(pod.uid, step=700, state="Complete", reward=0.75)
    world.end(pod, 0, progress=word)
    world.settle()
    assert world.condition("Complete") == ("True", "Completed") and world.condition("Failed")[0] == "False"
    assert world.phase == "Complete" and world.status.completion_time
    progress = world.status.progress
    assert (progress.step, progress.percentage, progress.reward) == (700, 100.0, 0.75)


def test_a_complete_job_has_made_all_steps_even_if_its_pod_is_gone():
    world = running()
    world.speak(step=640)
    world.settle()
    pod = world.trainer
    world.end(pod, 0)
    world.controllers()
    del world.pods[pod.uid], world.owners[pod.uid]
    world.settle()
    progress = world.status.progress
    assert (progress.step, progress.percentage, progress.reward) == (700, 100.0, 0.1235)


def test_completion_beats_suspension_and_deadline():
    world = running(runPolicy={"startupDeadlineSeconds": 50, "activeDeadlineSeconds": 100})
    world.end(world.trainer, 0)
    world.controllers()
    world.change(None, suspend=True)
    world.pass_time(1000)
    world.settle()
    assert world.condition("Complete")[0] == "True" and world.condition("Failed")[0] == "False"


def test_the_verdict_is_written_before_what_it_was_read_off_is_removed():
    world = running()
    world.end(world.trainer, 64)
    world.controllers()
    world.change(None, suspend=True)
    found = world.plan()
    assert found.status is not None and found.status.is_true("Failed")
    assert not (found.delete or found.scale or found.apply) and found.requeue_after_seconds == 1


@pytest.mark.parametrize(("policy", "jobs", "replicas"), [("None", [1], 3), ("Running", [1], 0), ("All", [], None)])
def test_cleanup_policy_after_completion(policy, jobs, replicas):
    world = running(searcher={"replicas": 3}, runPolicy={"cleanupPolicy": policy})
    world.end(world.trainer, 0)
    world.settle()
    found = world.objects.get(STATEFUL_SET)
    assert world.jobs() == jobs
    assert (found and found["spec"]["replicas"]) == replicas
    assert world.status.searcher.desired_replicas == (replicas or 0)
    assert world.is_quiet()


@pytest.mark.parametrize("policy", ["None", "Running"])
def test_a_job_that_completes_keeps_its_trainer_although_the_trainers_job_has_yet_to_say_so(policy):
    world = running(runPolicy={"cleanupPolicy": policy})
    pod = world.trainer
    world.end(pod, 0)
    world.reconcile()
    world.reconcile()
    assert world.status.is_true("Complete") and world.jobs() == [1]
    world.settle()
    assert world.jobs() == [1] and pod.uid in world.pods, "for its logs"


@pytest.mark.parametrize("policy", ["None", "Running"])
def test_a_job_that_failed_keeps_the_trainer_that_failed_it(policy):
    world = running(runPolicy={"cleanupPolicy": policy})
    pod = world.trainer
    world.end(pod, 64)
    world.settle()
    assert world.condition("Failed") == ("True", "UserError")
    assert world.jobs() == [1] and pod.uid in world.pods, "for its logs"


def test_a_failed_job_stops_its_running_trainer():
    world = running(runPolicy={"startupDeadlineSeconds": 50, "activeDeadlineSeconds": 100})
    world.pass_time(100)
    world.settle()
    assert world.condition("Failed") == ("True", "DeadlineExceeded")
    assert "all that runPolicy.activeDeadlineSeconds allows" in world.message("Failed")
    assert world.jobs() == [] and not world.pods


def test_an_end_never_turns_into_another():
    world = running(runPolicy={"startupDeadlineSeconds": 50, "activeDeadlineSeconds": 100, "cleanupPolicy": "None"})
    world.pass_time(100)
    world.settle()
    before = world.status.condition("Failed")
    world.end(world.trainer, 0)
    world.change(None, suspend=True)
    world.settle()
    after = world.status.condition("Failed")
    assert after == before.model_copy(update={"observed_generation": 2}) and not world.status.is_true("Complete")


def test_deadlines_do_not_run_while_a_job_is_suspended():
    world = running(runPolicy={"startupDeadlineSeconds": 50, "activeDeadlineSeconds": 100})
    world.change(None, suspend=True)
    world.settle()
    world.pass_time(5000)
    world.settle()
    assert world.phase == "Suspended"
    world.change(None, suspend=False)
    world.settle()
    assert world.phase == "Running"


def test_the_startup_deadline_tells_why_the_trainer_never_came_up():
    world = World.of(runPolicy={"startupDeadlineSeconds": 600})
    world.reconcile()
    world.controllers()
    world.set(world.trainer, waiting_reason="ImagePullBackOff", waiting_message='Back-off pulling image "x:nope"')
    assert world.plan().requeue_after_seconds == 600
    world.pass_time(600)
    world.settle()
    assert world.condition("Failed") == ("True", "StartupDeadlineExceeded")
    assert "ImagePullFailed: Pod" in world.message("Failed") and "x:nope" in world.message("Failed")


def test_the_startup_deadline_is_over_once_the_trainer_was_ready():
    world = running(runPolicy={"startupDeadlineSeconds": 600})
    world.end(world.trainer, 1)
    world.controllers()
    world.set(world.trainer, unschedulable="0/3 nodes are available")
    world.pass_time(5000)
    world.settle()
    assert world.condition("TrainerReady") == ("False", "Restarting") and not world.job.finished


def started_while_nobody_watched(**last_words):
    """The trainer was ready and is being replaced, all of it while the controller was away."""
    world = World.of(runPolicy={"startupDeadlineSeconds": 600, "backoffLimit": 9})
    world.reconcile()
    world.controllers()
    world.kubelets()
    pod = world.trainer
    world.end(pod, 1, progress=said(pod.uid, **last_words))
    world.controllers()
    world.pass_time(5000)
    world.reconcile()
    return world


@pytest.mark.parametrize("words", [{"step": 0}, {"step": 30, "state": "Failed"}], ids=["it trained", "it made steps"])
def test_a_trainer_that_worked_while_nobody_watched_keeps_the_startup_deadline(words):
    world = started_while_nobody_watched(**words)
    assert not world.job.finished
    assert world.condition("TrainerReady") == ("False", "Restarting")
    world.pods = {uid: pod for uid, pod in world.pods.items() if not pod.over}
    world.reconcile()
    assert not world.job.finished, "it is remembered"


@pytest.mark.parametrize("words", [{"run_id": ""}, {"step": 0, "state": "Starting"}, {"step": 0, "state": "Failed"}])
def test_last_words_of_a_trainer_that_never_came_up_do_not_keep_it(words):
    world = started_while_nobody_watched(**words)
    assert world.condition("Failed") == ("True", "StartupDeadlineExceeded")


def test_what_was_said_before_the_start_does_not_keep_the_startup_deadline():
    world = running(runPolicy={"startupDeadlineSeconds": 600})
    pod = world.trainer
    world.end(pod, 143, progress=said(pod.uid, step=30))
    ended = world.pods[pod.uid]
    world.change(None, suspend=True)
    world.settle()
    world.pass_time(1000)
    world.change(None, suspend=False)
    world.reconcile()
    world.pass_time(601)
    world.reconcile(pods=(ended,))
    assert world.condition("Failed") == ("True", "StartupDeadlineExceeded")


def test_a_trainer_that_is_heard_training_keeps_the_startup_deadline_before_it_is_seen_ready():
    world = World.of(runPolicy={"startupDeadlineSeconds": 600})
    world.reconcile()
    world.controllers()
    world.set(world.trainer, phase="Running", node="n")
    world.speak(step=0)
    world.pass_time(5000)
    world.reconcile()
    assert not world.job.finished


def test_a_finished_job_is_removed_when_its_time_is_over():
    world = running(runPolicy={"ttlSecondsAfterFinished": 300})
    world.end(world.trainer, 0)
    world.settle()
    found = world.plan()
    assert not found.delete_job and 290 <= found.requeue_after_seconds <= 300
    world.pass_time(300)
    assert world.plan().delete_job


def test_nothing_of_a_finished_job_is_made_anew():
    world = running()
    world.end(world.trainer, 0)
    world.settle()
    world.objects.clear()
    world.pods.clear()
    world.owners.clear()
    found = world.plan()
    assert not found.apply and not found.scale
