"""What is wrong with a job, through the plan: told while it lasts, over when it is mended, never an end by itself."""

from support.job_world import STATEFUL_SET, World

from tba_operator.api import QUEUE_LABEL
from tba_operator.faults import UNSCHEDULABLE_SECONDS
from tba_operator.world import ApplyError

BACK_OFF = 'Back-off pulling image "mine:2": ErrImagePull: not found'


def running(**spec):
    return World.of(**spec).settle()


def degraded(world):
    """(reason, message) while it is True."""
    status, reason = world.condition("Degraded")
    return (reason, world.message("Degraded")) if status == "True" else None


def test_a_broken_image_of_searchers_is_told_others_stay_and_a_revert_heals():
    world = running(searcher={"replicas": 3})
    world.change("searcher", image="mine:2")
    world.reconcile()
    world.controllers()
    for _ in range(8):
        world.kubelets()
        world.controllers()
        world.pass_time(1)
        for pod in world.of_role("searcher"):
            if pod.phase == "Pending" and pod.waiting_reason is None:
                world.set(pod, node="node-9", waiting_reason="ImagePullBackOff", waiting_message=BACK_OFF)
    world.reconcile()
    reason, message = degraded(world) or ("", "")
    assert reason == "ImagePullFailed" and "mine:2" in message and "RolloutStuck" in message
    assert any(pod.ready for pod in world.of_role("searcher"))
    assert world.condition("Failed")[0] == "False"
    del world.manifest["spec"]["searcher"]["image"]
    world.change("searcher", replicas=3)
    world.settle(rounds=60)
    assert degraded(world) is None
    assert [pod.ready for pod in world.of_role("searcher")] == [True] * 3


def test_a_trainer_out_of_memory_is_told_with_exit_code_and_remedy():
    world = running()
    world.end(world.trainer, 137, reason="OOMKilled")
    world.controllers()
    world.reconcile()
    reason, message = degraded(world) or ("", "")
    assert reason == "OOMKilled"
    assert "137" in message and "limits.memory" in message and "microBatchTokens" in message


def test_a_scale_up_beyond_quota_is_told_and_a_scale_down_heals():
    world = running(searcher={"replicas": 2})
    world.change("searcher", replicas=5)
    world.create_failures = ('pods "gsm8k-searcher-2" is forbidden: exceeded quota: team',)
    world.reconcile()
    assert (degraded(world) or ("",))[0] == "QuotaExceeded"
    world.change("searcher", replicas=2)
    world.create_failures = ()  # no pod is missing, so none is asked for
    world.settle()
    assert degraded(world) is None
    assert world.objects[STATEFUL_SET]["spec"]["replicas"] == 2 and world.phase == "Running"


def test_a_pod_without_a_node_is_told_after_half_a_minute_and_fails_nothing():
    world = World.of()
    world.reconcile()
    world.controllers()
    since = world.now
    world.set(world.trainer, unschedulable="0/3 nodes: insufficient nvidia.com/gpu", unschedulable_since=since)
    found = world.reconcile()
    assert degraded(world) is None
    assert found.requeue_after_seconds == UNSCHEDULABLE_SECONDS
    world.pass_time(UNSCHEDULABLE_SECONDS)
    world.reconcile()
    reason, message = degraded(world) or ("", "")
    assert reason == "Unschedulable" and "nvidia.com/gpu" in message
    world.pass_time(1800)
    world.reconcile()
    assert world.condition("Failed")[0] == "False" and world.phase == "Pending"


def test_no_child_of_a_queued_job_carries_its_queue_label():
    world = World.of(labels={QUEUE_LABEL: "team"})
    assert not [m for m in world.plan().apply if QUEUE_LABEL in m["metadata"]["labels"]]


def test_an_object_of_another_owner_is_told_by_name():
    world = World.of()
    world.reconcile()
    world.errors = {STATEFUL_SET: ApplyError("NameConflict", f"{STATEFUL_SET} exists, owned by nobody: delete it")}
    world.reconcile()
    reason, message = degraded(world) or ("", "")
    assert reason == "NameConflict" and "gsm8k-searcher" in message
