"""What users of similar operators report (design/pains.md), and what this one says and does instead."""

import pytest
from support.job_world import NAME, STATEFUL_SET, World, job_ref, said

from tba.contracts.history import Alert
from tba.contracts.newer import known_fields
from tba_operator.crd import custom_resource_definition
from tba_operator.world import ApplyError, ProgressSample

BACK_OFF = 'Back-off pulling image "registry/trainer:1"'


def running(**spec):
    return World.of(**spec).settle()


def starting(**spec):
    """Pods are there, and none has started."""
    world = World.of(**spec)
    world.reconcile()
    world.controllers()
    return world


def degraded(world):
    """(reason, message), and that it is told again by nobody."""
    world.reconcile()
    status, reason = world.condition("Degraded")
    assert status == "True", reason
    assert world.is_quiet()
    return reason, world.message("Degraded")


# -- images


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"])
def test_image_pull_failure_is_a_condition_not_a_wait_for_ever(reason):
    world = starting()
    world.set(world.trainer, waiting_reason=reason, waiting_message="manifest unknown")
    reason, message = degraded(world)
    assert reason == "ImagePullFailed"
    for part in (
        world.trainer.name,
        "registry/trainer:1",
        "manifest unknown",
        "spec.trainer.image",
        "imagePullSecrets",
    ):
        assert part in message


def test_a_kubelet_that_words_the_same_pull_failure_anew_makes_no_writes():
    world = starting()
    world.set(world.trainer, waiting_reason="ErrImagePull", waiting_message="failed to resolve: not found")
    degraded(world)
    world.set(
        world.trainer,
        waiting_reason="ImagePullBackOff",
        waiting_message=f"{BACK_OFF}: ErrImagePull: failed to resolve: not found",
    )
    assert world.is_quiet()


def test_an_image_pull_that_never_works_fails_the_job_at_the_startup_deadline():
    world = starting(runPolicy={"startupDeadlineSeconds": 900})
    world.set(world.trainer, waiting_reason="ImagePullBackOff", waiting_message=BACK_OFF)
    world.pass_time(900)
    world.settle()
    assert world.condition("Failed") == ("True", "StartupDeadlineExceeded")


def test_a_bad_searcher_image_stops_the_rollout_and_its_revert_heals_it():
    world = running(searcher={"replicas": 3, "image": "mine:1"})
    world.change("searcher", image="mine:nope")
    world.reconcile()
    world.controllers()
    world.pass_time(5)
    world.kubelets()
    world.controllers()
    (new,) = [p for p in world.of_role("searcher") if p.phase == "Pending"]
    world.set(new, waiting_reason="ImagePullBackOff", waiting_message='Back-off pulling image "mine:nope"')
    reason, message = degraded(world)
    assert reason == "ImagePullFailed" and "mine:nope" in message
    assert "Also RolloutStuck" in message and new.name in message
    assert len([p for p in world.of_role("searcher") if p.ready]) == 2, "the others go on"
    world.change("searcher", image="mine:1")
    world.settle(rounds=60)
    assert world.condition("SearchersReady") == ("True", "Ready") and world.condition("Degraded")[0] == "False"


def test_a_crashing_new_searcher_template_is_a_stuck_rollout():
    world = running(searcher={"replicas": 2})
    found = world.objects[STATEFUL_SET]["status"]
    found["currentRevision"], found["updateRevision"] = "old", "new"
    pod = world.set(world.of_role("searcher")[0], revision="new")
    world.crash_searcher(pod, 1, message="unknown option --enginee")
    reason, message = degraded(world)
    assert reason == "RolloutStuck" and pod.name in message
    assert "Also CrashLoop" in message and "unknown option --enginee" in message


# -- crashes


def test_an_oom_killed_trainer_says_so_and_what_to_change():
    world = running()
    world.end(world.trainer, 137, reason="OOMKilled")
    world.controllers()
    reason, message = degraded(world)
    assert reason == "OOMKilled" and "exit code 137" in message
    assert "trainer.resources.limits.memory" in message and "microBatchTokens" in message
    assert (world.status.trainer.last_exit_code, world.status.trainer.last_reason) == (137, "OOMKilled")


def test_a_trainer_that_is_gone_for_good_always_ends_the_job():
    world = running(runPolicy={"backoffLimit": 3})
    for _ in range(4):
        if world.of_role("trainer"):
            world.end(world.trainer, 137, reason="OOMKilled")
            world.settle()
    assert world.phase == "Failed" and not world.pods, "nothing holds a GPU"


def test_a_crash_loop_tells_the_last_words():
    world = running(searcher={"replicas": 3})
    for pod in world.of_role("searcher")[:2]:
        world.crash_searcher(pod, 1, message="ValueError: max_model_len")
    reason, message = degraded(world)
    assert reason == "CrashLoop" and "ValueError: max_model_len" in message and "one more searcher pod" in message
    world.set(world.of_role("searcher")[0], waiting_reason=None)
    assert world.is_quiet(), "the loop's turns are no news"
    for pod in world.of_role("searcher"):
        world.set(pod, ready=True, waiting_reason=None)
    world.settle()
    assert world.condition("Degraded") == ("False", "AsExpected")


def test_searchers_that_refuse_their_settings_speak_through_the_job():
    world = running()
    world.crash_searcher(world.of_role("searcher")[0], 64, message="engine.extraArgs: no option foo: remove it")
    reason, message = degraded(world)
    assert reason == "SearcherError" and "engine.extraArgs: no option foo: remove it" in message


def test_preemption_and_sigterm_are_nothing_wrong():
    world = running()
    pod = world.trainer
    world.set(pod, disrupted=True)
    world.end(pod, 137)
    world.controllers()
    world.reconcile()
    assert world.condition("Degraded") == ("False", "AsExpected")
    world.settle()
    assert world.status.trainer.failures == 0


# -- things that are missing


def test_a_missing_secret_is_named_with_the_keys_it_needs():
    world = starting(storage={"uri": "s3://b/run", "credentials": {"secretRef": {"name": "tba-s3"}}})
    world.set(
        world.trainer,
        waiting_reason="FailedMount",
        waiting_message='MountVolume.SetUp failed for volume "storage" : secret "tba-s3" not found',
    )
    reason, message = degraded(world)
    assert reason == "SecretNotFound"
    for part in ("lab/tba-s3", world.trainer.name, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        assert part in message


def test_a_missing_token_and_a_missing_key_are_told_apart():
    world = starting(model={"uri": "hf://a/b", "secretRef": {"name": "hf"}})
    told = {"waiting_reason": "CreateContainerConfigError"}
    world.set(world.trainer, **told, waiting_message='secret "hf" not found')
    assert "lab/hf" in degraded(world)[1] and "with HF_TOKEN" in world.message("Degraded")
    world.set(world.trainer, **told, waiting_message="couldn't find key HF_TOKEN in Secret lab/hf")
    reason, message = degraded(world)
    assert reason == "SecretNotFound" and "lacks a key: couldn't find key HF_TOKEN in Secret lab/hf" in message


def test_a_missing_config_map_is_named_with_its_key():
    world = starting(
        task={"prompts": {"configMapRef": {"name": "prompts", "key": "train.jsonl"}}, "reward": {"name": "gsm8k"}}
    )
    world.set(world.trainer, waiting_reason="FailedMount", waiting_message='configmap "prompts" not found')
    reason, message = degraded(world)
    assert reason == "ConfigMapNotFound" and "with train.jsonl" in message


def test_a_misspelt_account_of_the_cloud_is_named_with_its_field():
    identity = {"workloadIdentity": {"serviceAccountName": "cluod"}}
    world = starting(storage={"uri": "s3://b/run", "credentials": identity})
    world.create_failures = (
        'pods "gsm8k-trainer-1-0-" is forbidden: error looking up service account lab/cluod: '
        'serviceaccount "cluod" not found',
    )
    reason, message = degraded(world)
    assert reason == "ServiceAccountNotFound"
    assert message.startswith("ServiceAccount lab/cluod does not exist. Create it or correct workloadIdentity.")


def test_a_volume_that_cannot_be_mounted_and_a_container_that_cannot_start_are_told():
    world = starting()
    world.set(world.trainer, waiting_reason="FailedMount", waiting_message="timed out waiting for nfs")
    assert degraded(world)[0] == "VolumeNotMounted"
    world.set(world.trainer, waiting_reason="CreateContainerConfigError", waiting_message="image will run as root")
    reason, message = degraded(world)
    assert reason == "InvalidPodTemplate" and "image will run as root" in message


def test_a_job_without_any_image_says_which_to_set():
    world = World.of(trainer={"image": "mine:1"})
    world.settings = type(world.settings)()
    world.reconcile()
    reason, message = degraded(world)
    assert reason == "InvalidSpec" and message.startswith("spec.searcher.image is not set")
    assert world.jobs() == [1] and STATEFUL_SET not in world.objects


# -- room


def test_a_gpu_node_that_takes_minutes_to_come_is_no_failure():
    world = starting()
    world.set(world.trainer, unschedulable="0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    world.reconcile()
    assert world.condition("Degraded")[0] == "False"
    assert world.plan().requeue_after_seconds == 30
    world.pass_time(30)
    reason, message = degraded(world)
    assert reason == "Unschedulable" and "3 Insufficient nvidia.com/gpu" in message and "The job waits" in message
    world.pass_time(1800)
    world.reconcile()
    assert not world.job.finished, "the startup deadline alone decides"
    world.set(world.trainer, unschedulable=None)
    world.settle()
    assert world.phase == "Running" and world.condition("Degraded")[0] == "False"


def test_a_full_quota_is_a_condition_and_scaling_down_heals_it():
    world = running(searcher={"replicas": 2})
    world.create_failures = ('pods "gsm8k-searcher-1" is forbidden: exceeded quota: gpus, requested: 1, limited: 1',)
    reason, message = degraded(world)
    assert reason == "QuotaExceeded" and "exceeded quota: gpus" in message and "searcher.replicas" in message
    world.change("searcher", replicas=1)
    assert [s.replicas for s in world.plan().scale] == [1]
    world.create_failures = ()
    world.settle()
    assert world.condition("Degraded")[0] == "False"


def test_a_policy_that_refuses_pods_is_told_by_its_words():
    world = running()
    world.create_failures = ('pods "x" is forbidden: violates PodSecurity "restricted:latest": privileged',)
    reason, message = degraded(world)
    assert reason == "InvalidPodTemplate" and "violates PodSecurity" in message


def test_a_write_refused_by_quota_is_tried_again():
    world = World.of()
    world.refusing = {job_ref(1): ApplyError("QuotaExceeded", "exceeded quota: count/jobs.batch")}
    world.reconcile()
    assert world.condition("Degraded") == ("True", "QuotaExceeded")
    found = world.plan()
    assert found.apply[-1]["kind"] == "Job" and found.requeue_after_seconds == 30


# -- writes


def test_a_refused_pod_template_is_not_tried_again_until_the_spec_changes():
    world = World.of()
    world.refusing = {job_ref(1): ApplyError("InvalidPodTemplate", "spec.containers[0].resources: Invalid value: 7")}
    world.reconcile()
    reason, message = degraded(world)
    assert reason == "InvalidPodTemplate" and "Invalid value: 7" in message and "spec.trainer" in message
    assert "tried again when the spec changes, and now and then" in message
    world.refusing = {}
    world.change("trainer", resources={"limits": {"memory": "8Gi"}})
    world.settle()
    assert world.phase == "Running"


def test_a_refused_searcher_template_still_lets_the_old_pods_scale():
    world = running(searcher={"replicas": 2})
    world.change("searcher", image="mine:2", replicas=1)
    world.errors = {STATEFUL_SET: ApplyError("InvalidPodTemplate", "no")}
    found = world.plan()
    assert not found.apply and [s.replicas for s in found.scale] == [1]


def test_a_name_that_somebody_else_holds_is_a_condition():
    world = World.of()
    said_by_applier = f"StatefulSet lab/{NAME}-searcher exists, owned by nobody: delete it"
    world.refusing = {STATEFUL_SET: ApplyError("NameConflict", said_by_applier)}
    world.reconcile()
    assert world.condition("Degraded") == ("True", "NameConflict")
    assert world.message("Degraded") == f"{said_by_applier}."


def test_a_namespace_that_goes_away_is_no_alarm():
    world = running()
    world.errors = {STATEFUL_SET: ApplyError("NamespaceTerminating", "is being terminated")}
    world.reconcile()
    assert world.condition("Degraded")[0] == "False"


# -- what the trainer sees


@pytest.mark.parametrize("reason", ["SyncStalled", "NoRewardSignal", "StorageUnreachable"])
def test_alerts_of_the_trainer_are_conditions(reason):
    world = running()
    world.speak(alerts=[Alert(reason=reason, message="what, got, remedy")])
    assert degraded(world) == (reason, "what, got, remedy.")


def test_storage_that_is_away_is_told_and_back_again_too():
    world = running()
    world.speak()
    world.reconcile()
    assert world.condition("StorageReady") == ("True", "Reachable")
    world.speak(state="WaitingForStorage", detail="storage has not answered for 30 s")
    reason, message = degraded(world)
    assert reason == "StorageUnreachable" and "has not answered for 30 s" in message and "s3://b/run" in message
    assert world.condition("StorageReady") == ("False", "StorageUnreachable")
    world.speak()
    world.reconcile()
    assert world.condition("StorageReady") == ("True", "Reachable")


def test_a_trainer_that_gave_up_on_storage_is_neither_counted_nor_silent():
    world = running()
    world.end(world.trainer, 2, message="s3://b/run: connection refused")
    world.controllers()
    reason, message = degraded(world)
    assert reason == "StorageUnreachable" and "connection refused" in message
    assert world.condition("StorageReady")[0] == "False" and world.status.trainer.failures == 0


def test_the_word_of_another_pod_is_not_taken():
    world = running()
    world.progress = ProgressSample(said("someone-else", step=99), world.now)
    world.settle()
    assert world.status.progress is None


# -- scale and names


def test_the_scale_selector_is_exactly_the_pods_labels():
    world = running()
    labels = world.objects[STATEFUL_SET]["spec"]["template"]["metadata"]["labels"]
    wanted = dict(part.split("=") for part in world.status.searcher.selector.split(","))
    assert wanted.items() <= labels.items()
    assert wanted == world.objects[STATEFUL_SET]["spec"]["selector"]["matchLabels"]


def test_replica_changes_in_a_hurry_converge_to_the_last():
    world = running(searcher={"replicas": 1})
    for replicas in (4, 2, 5, 1, 3):
        world.change("searcher", replicas=replicas)
        world.reconcile()
    world.delete_pod(world.of_role("searcher")[0].uid)
    world.settle()
    assert len(world.of_role("searcher")) == 3 and world.condition("SearchersReady")[0] == "True"


def test_a_finished_child_that_something_removed_is_not_made_again():
    world = running()
    world.end(world.trainer, 0)
    world.settle()
    del world.objects[job_ref(1)]
    assert world.is_quiet()


def test_every_status_fits_the_schema_of_the_crd():
    world = running()
    world.speak()
    world.settle()
    raw = world.manifest["status"]
    assert known_fields(type(world.status), raw) == raw
    (version,) = custom_resource_definition()["spec"]["versions"]
    assert raw.keys() <= version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"].keys()
