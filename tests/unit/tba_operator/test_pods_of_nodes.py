"""A trainer of several nodes: one Job of as many pods, of which rank 0's speaks for all."""

import pytest
from support.job_world import SETTINGS, World, job_ref, said

from tba_operator import manifests
from tba_operator.api import Images
from tba_operator.progress import running_trainers

IMAGES = Images(trainer="trainer:1", searcher="searcher:1")
NODES = {"trainer": {"nodes": 3, "gpusPerNode": 2}}


def trainer_job(attempt=1, **spec):
    return manifests.trainer_job(World.of(**spec).job, IMAGES, attempt)["spec"]


def env_of(job_spec):
    (container,) = job_spec["template"]["spec"]["containers"]
    return {entry["name"]: entry for entry in container["env"]}


def field_of(entry):
    return entry["valueFrom"]["fieldRef"]["fieldPath"]


@pytest.fixture
def world():
    return World.of(**NODES).settle()


# -- manifests


def test_a_job_has_a_pod_for_each_node_and_succeeds_with_rank_0s():
    spec = trainer_job(**NODES)
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_pods_know_their_number_where_rank_0_is_and_what_only_they_know():
    env = env_of(trainer_job(attempt=2, **NODES))
    assert env["TBA_TRAINER_NODES"]["value"] == "3" and env["TBA_TRAINER_RANKS"]["value"] == "2"
    assert env["TBA_RENDEZVOUS"]["value"] == "gsm8k-trainer-2-0.gsm8k-trainer:29500"
    assert field_of(env["TBA_TRAINER_NODE_RANK"]) == "metadata.labels['batch.kubernetes.io/job-completion-index']"
    assert field_of(env["TBA_RENDEZVOUS_TOKEN"]) == "metadata.labels['batch.kubernetes.io/controller-uid']"


def test_the_name_of_rank_0_is_one_of_the_headless_service():
    job = World.of(**NODES).job
    (service,) = (s for s in manifests.services(job) if s["metadata"]["name"] == "gsm8k-trainer")
    spec = manifests.trainer_job(job, IMAGES, 1)["spec"]["template"]["spec"]
    assert spec["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]


def test_a_token_of_the_users_takes_the_place_of_ours():
    own = {"name": "TBA_RENDEZVOUS_TOKEN", "valueFrom": {"secretKeyRef": {"name": "ours", "key": "token"}}}
    assert env_of(trainer_job(trainer={"nodes": 2, "env": [own]}))["TBA_RENDEZVOUS_TOKEN"] == own


def test_only_trainers_of_the_job_reach_the_ports_of_ranks():
    policy, _ = manifests.network_policies(World.of(**NODES).job, SETTINGS)
    (everywhere,) = (rule for rule in policy["spec"]["ingress"] if "ports" not in rule)
    assert everywhere["from"] == [{"podSelector": policy["spec"]["podSelector"]}]


def test_nothing_forces_pods_apart():
    spec = trainer_job(**NODES)["template"]["spec"]
    assert "affinity" not in spec and "topologySpreadConstraints" not in spec


def test_one_node_has_nothing_of_all_that():
    spec = trainer_job(trainer={"nodes": 1, "gpusPerNode": 2})
    assert spec == trainer_job(trainer={"gpusPerNode": 2})
    assert (spec["completions"], spec["parallelism"]) == (1, 1) and "successPolicy" not in spec
    assert not {"TBA_TRAINER_NODES", "TBA_TRAINER_NODE_RANK", "TBA_RENDEZVOUS"} & env_of(spec).keys()


def test_another_number_of_nodes_is_another_template():
    hashes = {
        manifests.trainer_inputs(World.of(trainer=trainer).job, IMAGES) for trainer in ({}, {"nodes": 1}, {"nodes": 2})
    }
    assert len(hashes) == 2


# -- a life


def test_a_job_runs_as_soon_as_rank_0_is_ready_and_its_pod_is_the_trainer(world):
    world.speak()
    world.settle()
    assert (world.phase, world.status.trainer.pod_name) == ("Running", world.node(0).name)
    assert [world.node(rank).name[:18] for rank in range(3)] == [f"gsm8k-trainer-1-{rank}-" for rank in range(3)]
    assert world.is_quiet()


def test_the_words_of_other_nodes_are_not_the_runs(world):
    world.speak(step=5, checkpoint_step=5)
    world.settle()
    world.end(world.node(1), 143, message="not of the run", progress=said("x", step=99, checkpoint_step=99))
    world.reconcile()
    trainer = world.status.trainer
    assert (trainer.checkpoint_step, trainer.last_message, trainer.restarts) == (5, None, 0)


def test_a_lost_rank_counts_once_and_all_pods_are_made_again(world):
    before = {world.node(rank).uid for rank in range(3)}
    world.end(world.node(0), 1, message="trainer rank 3 ended with SIGKILL (node 1)")
    for rank in (1, 2):
        world.end(world.node(rank), 143)
    world.reconcile()
    assert "trainer rank 3 ended with SIGKILL" in world.message("Degraded")
    world.settle()
    assert world.status.trainer.failures == 1 and world.status.trainer.attempt == 1
    assert not before & {world.node(rank).uid for rank in range(3)}
    assert world.phase == "Running"


def test_a_drained_node_is_not_held_against_the_job(world):
    world.set(world.node(2), disrupted=True)
    for rank in range(3):
        world.end(world.node(rank), 143)
    world.settle()
    assert (world.status.trainer.failures, world.phase) == (0, "Running")


def test_an_error_of_the_users_on_all_nodes_fails_the_job_in_rank_0s_words(world):
    for rank in (2, 1, 0):
        world.end(world.node(rank), 64, message="dtype must be" if rank == 0 else "")
    world.settle()
    assert world.condition("Failed") == ("True", "UserError")
    assert "dtype must be" in world.message("Failed")


def test_a_job_is_complete_with_rank_0_whatever_became_of_the_others(world):
    world.end(world.node(1), 0)
    world.reconcile()
    assert world.condition("Complete")[0] == "False"
    world.end(world.node(0), 0)
    world.settle()
    assert world.phase == "Complete"
    world.pass_time(60)
    world.settle()
    assert not world.of_role("trainer")


def test_a_node_that_no_pod_fits_is_told_while_rank_0_waits_for_it(world):
    world = World.of(**NODES)
    world.reconcile()
    world.controllers()
    world.set(world.node(2), unschedulable="0/3 nodes have GPUs", unschedulable_since=world.now)
    world.kubelets()
    world.set(world.node(0), ready=False)
    world.pass_time(60)
    world.reconcile()
    assert world.condition("Degraded") == ("True", "Unschedulable")
    assert world.node(2).name in world.message("Degraded")
    assert world.condition("TrainerReady")[1] == "Starting"
    assert "2 of 3 trainer pods run" in world.message("TrainerReady")


def test_a_node_that_ran_out_of_memory_is_told_with_rank_0s_end(world):
    killed = world.node(1)
    world.end(killed, 137, reason="OOMKilled")
    world.end(world.node(0), 1, message="trainer node 1 is gone")
    world.reconcile()
    assert world.condition("Degraded") == ("True", "OOMKilled")
    assert killed.name in world.message("Degraded") and "node 1 is gone" in world.message("Degraded")


def test_what_all_nodes_end_with_is_told_once(world):
    for rank in range(3):
        world.end(world.node(rank), 2, message="no answer from storage" if rank == 0 else "")
    world.reconcile()
    assert world.condition("Degraded") == ("True", "StorageUnreachable")
    assert world.message("Degraded").count("gave up") == 1


def test_a_lost_node_of_another_rank_takes_the_attempt_with_it(world):
    world.lose_node(world.node(1))
    world.end(world.node(0), 1)
    for _ in range(10):
        world.pass_time(30)
        world.reconcile()
        world.controllers()
        world.kubelets()
    assert world.status.trainer.attempt == 2 and world.jobs() == [2]
    assert {world.node(rank).attempt for rank in (0, 2)} == {2}


def test_suspending_waits_for_every_pod(world):
    world.change(None, suspend=True)
    world.reconcile()
    world.controllers()
    assert job_ref(1) not in world.objects and len(world.of_role("trainer")) == 3
    assert world.condition("Suspended") == ("False", "Suspending")
    world.settle()
    assert world.condition("Suspended") == ("True", "Suspended") and not world.of_role("trainer")


def test_a_queue_is_asked_for_all_nodes():
    world = World.of(labels={"kueue.x-k8s.io/queue-name": "gpus"}, **NODES)
    world.kueue = True
    world.reconcile()
    (workload,) = (found for ref, found in world.objects.items() if ref.kind == "Workload")
    assert [s["count"] for s in workload["spec"]["podSets"] if s["name"] == "trainer"] == [3]
    assert all("minCount" not in s for s in workload["spec"]["podSets"] if s["name"] == "trainer")


def test_progress_is_read_from_rank_0_alone(world):
    class Caches:
        def keys_with_pods(self):
            return [("lab", "gsm8k")]

        def pods(self, _key):
            return [_owned(pod) for pod in world.of_role("trainer")]

    assert [pod.name for pod in running_trainers(Caches()).values()] == [world.node(0).name]


def _owned(pod):
    from dataclasses import replace

    return replace(pod, owner="Job/gsm8k-trainer-1")
