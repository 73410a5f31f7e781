"""Events: each change told once, with its text."""

from support.job_world import World

from tba_operator.plan import plan_invalid


def running(**spec):
    return World.of(**spec).settle()


def reasons(world):
    found = [reason for reason, _ in world.events]
    world.events.clear()
    return found


def test_a_life_is_told_in_events():
    world = running(searcher={"replicas": 3})
    assert reasons(world) == ["TrainerStarted"]
    world.change("searcher", replicas=5)
    world.settle()
    assert world.events == [("SearchersScaled", "3 → 5 by spec.searcher.replicas")]
    world.events.clear()
    world.change(None, suspend=True)
    world.settle()
    assert ("SearchersScaled", "5 → 0 by spec.suspend") in world.events
    assert reasons(world) == ["SearchersScaled", "Suspended"]
    world.change(None, suspend=False)
    world.settle()
    assert reasons(world) == ["SearchersScaled", "Resumed", "TrainerStarted"]
    world.end(world.trainer, 0)
    world.settle()
    assert ("SearchersScaled", "5 → 0 by the end of the job") in world.events
    assert reasons(world) == ["Completed", "SearchersScaled"]


def test_a_restart_is_told_with_how_the_pod_before_ended():
    world = running()
    world.end(world.trainer, 137, reason="OOMKilled", message="")
    world.settle()
    restarted = dict(world.events)["TrainerRestarted"]
    assert "exit code 137 (OOMKilled)" in restarted


def test_degraded_is_told_when_it_begins_gets_worse_and_ends():
    world = World.of()
    world.reconcile()
    world.controllers()
    world.set(world.trainer, unschedulable="0/1 nodes", unschedulable_since=world.now)
    world.pass_time(60)
    world.reconcile()
    assert reasons(world) == ["TrainerStarted", "Unschedulable"]
    world.set(world.trainer, unschedulable=None, waiting_reason="ErrImagePull", waiting_message="no")
    world.reconcile()
    world.reconcile()
    assert reasons(world) == ["ImagePullFailed"]
    world.set(world.trainer, unschedulable="0/1 nodes", waiting_reason=None)
    world.reconcile()
    assert reasons(world) == [], "something less telling is no event"
    world.set(world.trainer, unschedulable=None)
    world.settle()
    assert reasons(world) == ["Recovered"]


def test_a_failure_is_told_with_its_message():
    world = running()
    world.events.clear()
    world.end(world.trainer, 64, message="model.uri: no such repository")
    world.settle()
    assert "model.uri: no such repository" in dict(world.events)["UserError"]


def test_a_job_that_cannot_be_understood_is_told_once_and_not_touched():
    manifest = {"metadata": {"name": "x", "namespace": "lab"}, "spec": {}}
    found = plan_invalid(manifest, "model: missing", 0.0)
    assert [note.reason for note in found.notes] == ["InvalidSpec"] and not found.apply and not found.delete
    assert found.status is not None
    again = plan_invalid({**manifest, "status": found.status.dump()}, "model: missing", 9.0)
    assert again.status is None and again.notes == ()
    going = {"metadata": {"name": "x", "namespace": "lab", "deletionTimestamp": "2027-01-01T00:00:00Z"}}
    assert plan_invalid(going, "model: missing", 0.0).status is None
