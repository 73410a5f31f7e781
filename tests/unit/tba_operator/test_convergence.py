"""Any order of events, crashes of the controller between two writes, and views of a moment ago: what holds always."""

import copy

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.job_world import STATEFUL_SET, World, job_ref

FATES = (
    "crash",
    "oom",
    "outage",
    "fenced",
    "sigterm",
    "checkpoint",
    "preempted",
    "trainer's node",
    "searcher's node",
    "Job removed",
)
WISHES = ("suspend", "resume", "scale to 0", "scale to 2", "first secret", "second secret")
ENDS = {"crash": 1, "oom": 137, "outage": 2, "fenced": 3, "sigterm": 143, "done": 0, "user error": 64}
EVENTS = ("nothing", *FATES, *WISHES, "resume", "40 s", "100 s", "700 s", "done or user error")
WORKERS = (
    "controller",
    "controller",
    "controller crashes",
    "controller sees the past",
    "cluster",
    "kubelets",
    "everybody",
)


class Life(RuleBasedStateMachine):
    """A job's life: something happens, and some of those who should work on it do."""

    @initialize(
        policy=st.sampled_from(["None", "Running", "All"]),
        backoff=st.sampled_from([1, 6]),
        deadline=st.sampled_from([None, 5000]),
        running=st.sampled_from([True, True, False]),
    )
    def begin(self, policy, backoff, deadline, running):
        run_policy = {"cleanupPolicy": policy, "backoffLimit": backoff, "startupDeadlineSeconds": 1500}
        if deadline is not None:
            run_policy["activeDeadlineSeconds"] = deadline
        credentials = {"uri": "s3://b/run", "credentials": {"secretRef": {"name": "first"}}}
        self.world = World.of(runPolicy=run_policy, searcher={"replicas": 2}, storage=credentials)
        if running:
            self.world.settle()
        self.past = self._view()
        self.attempt = 0
        self.ended = []
        self.told = {}
        self.done = set()
        self.removed_by_hand = False

    @rule(
        event=st.sampled_from(EVENTS),
        number=st.integers(0, 5),
        work=st.lists(st.sampled_from(WORKERS), max_size=5),
        seconds=st.sampled_from([0, 1, 4]),
    )
    def something_happens(self, event, number, work, seconds):
        """`number`: what the event or a crash needs one for."""
        self._remembering(self._wish if event in WISHES else self._fate, event, number)
        for worker in work:
            self.world.pass_time(seconds)
            self._remembering(self._work, worker, number)
            self.there_are_never_two_trainers()
            self.a_trainer_that_is_done_stays_for_its_logs()

    def _view(self):
        return copy.deepcopy(self.world.objects), tuple(self.world.pods.values())

    def _remembering(self, act, *args):
        view = self._view()
        act(*args)
        self.past = view

    def _work(self, worker, number):
        world, (children, pods) = self.world, self.past
        if worker == "controller":
            self.told |= self._failures()
            world.reconcile()
            if world.status.is_true("Suspended"):
                assert not world.of_role("searcher") and not world.living_trainers(), "a suspended job has no pods"
        elif worker == "controller crashes":
            world.reconcile(crash_after=number)
        elif worker == "controller sees the past":
            world.reconcile(
                **[{"children": children}, {"pods": pods}, {"children": children, "pods": pods}][number % 3]
            )
        elif worker == "cluster":
            world.controllers()
        elif worker == "everybody":
            for one in ("controller", "cluster", "kubelets") * 3:
                self._work(one, number)
                world.pass_time(2)
        else:
            world.kubelets()

    def _failures(self):
        """uid -> counted ends, of the trainer Jobs whose ends the job has to count."""
        jobs = [found for ref, found in self.world.objects.items() if ref.kind == "Job"]
        return {
            found["metadata"]["uid"]: (found.get("status") or {}).get("failed", 0)
            for found in jobs
            if int(found["metadata"]["labels"]["tba.dev/attempt"]) >= self.world.status.trainer.attempt
        }

    def _fate(self, event, number):
        world = self.world
        trainer = next((p for p in world.living_trainers() if p.node is not None), None)
        searcher = next((p for p in world.of_role("searcher") if p.node is not None), None)
        if event.endswith(" s"):
            world.pass_time(int(event.removesuffix(" s")))
        elif event == "Job removed" and world.jobs():
            self.removed_by_hand = True
            world.remove_job(world.jobs()[-1])
        elif event == "searcher's node" and searcher is not None:
            world.lose_node(searcher)
        elif trainer is None:
            return
        elif event == "trainer's node":
            world.lose_node(trainer)
        elif event == "preempted":
            world.disrupt(trainer)
        elif event == "checkpoint":
            world.speak(step=10 * number, checkpoint_step=10 * number or None)
        elif event == "done or user error":
            world.end(trainer, ENDS["done" if number % 2 else "user error"])
        elif event in ENDS:
            world.end(trainer, ENDS[event], progress=world.progress and world.progress.progress)

    def _wish(self, event, _number):
        if event.startswith("scale to "):
            self.world.change("searcher", replicas=int(event[-1]))
        elif event.endswith(" secret"):
            self.world.change("storage", credentials={"secretRef": {"name": event.split()[0]}})
        else:
            self.world.change(None, suspend=event == "suspend")

    @invariant()
    def there_are_never_two_trainers(self):
        assert len(self.world.living_trainers()) <= 1

    @invariant()
    def an_end_is_for_good(self):
        ended = [c for c in self.world.status.conditions if c.type in ("Complete", "Failed") and c.status == "True"]
        ended = [c.model_copy(update={"observed_generation": None}) for c in ended]
        assert len(ended) <= 1
        assert not self.ended or ended == self.ended
        self.ended = ended

    @invariant()
    def every_failure_that_was_seen_counts_once_and_attempts_only_grow(self):
        trainer = self.world.status.trainer
        assert sum(self.told.values()) <= trainer.failures <= self.world.truly_failed
        assert 0 <= trainer.failures_at_checkpoint <= trainer.failures
        assert trainer.attempt >= self.attempt
        self.attempt = trainer.attempt

    @invariant()
    def a_trainer_that_is_done_stays_for_its_logs(self):
        world = self.world
        jobs = {found["metadata"]["uid"] for ref, found in world.objects.items() if ref.kind == "Job"}
        if self.removed_by_hand or world.job.spec.run_policy.cleanup_policy == "All":
            return
        assert self.done <= jobs
        if world.status.is_true("Complete"):
            self.done |= jobs & {world.owners[pod.uid] for pod in world.pods.values() if pod.phase == "Succeeded"}

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        for _ in range(3):  # long enough for pods on dead nodes to be given up
            world.settle()
            world.pass_time(100)
        world.settle()
        assert world.is_quiet(), world.plan()
        self.an_end_is_for_good()
        self._is_as_asked_for()

    def _is_as_asked_for(self):
        world, status, spec = self.world, self.world.status, self.world.job.spec
        assert all(len(ref.name) <= 63 for ref in world.objects)
        if world.job.finished:
            assert not world.living_trainers() or spec.run_policy.cleanup_policy == "None"
        elif spec.suspend:
            assert status.phase == "Suspended"
            assert not (world.jobs() or world.of_role("searcher") or world.living_trainers())
        else:
            assert status.phase == "Running" and world.jobs() == [status.trainer.attempt]
            assert job_ref(status.trainer.attempt) in world.objects
            assert len(world.of_role("searcher")) == spec.searcher.replicas == status.searcher.desired_replicas
            assert (
                not spec.searcher.replicas or world.objects[STATEFUL_SET]["spec"]["replicas"] == spec.searcher.replicas
            )


# The same examples every time, so that what breaks one is the change at hand.
Life.TestCase.settings = settings(
    max_examples=70, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestLife = Life.TestCase
