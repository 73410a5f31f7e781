"""The controller's passes over an API server in memory: caches that a test brings up to date, or leaves stale."""

import asyncio

from support.jobs import smallest
from support.kube_fake import FakeKube

from tba_operator.api import JOB_LABEL
from tba_operator.apply import Applier
from tba_operator.caches import Caches, RecentWrites, trim
from tba_operator.metrics import Metrics
from tba_operator.observe import Observer
from tba_operator.podstate import has_role, pod_of
from tba_operator.reconcile import Reconciler
from tba_operator.world import Ref, Settings

START = 1_800_000_000.0
_CHILDREN = (
    "ConfigMap",
    "Service",
    "ServiceAccount",
    "NetworkPolicy",
    "Job",
    "StatefulSet",
    "PodDisruptionBudget",
    "Workload",
)


class Controlled:
    """One controller, one cluster, one clock."""

    def __init__(self, api: FakeKube | None = None, **settings):
        self.now = START
        self.api = api or FakeKube(clock=lambda: self.now)
        self.samples = {}
        self.metrics = Metrics()
        self.recent = RecentWrites(lambda: self.now)
        self.jobs, self.children, self.pods = {}, {}, {}
        self.caches = Caches(self.jobs, self.children, self.pods)
        observer = Observer(self.api, self.caches, self.recent, self, kueue=self.api.kueue, clock=lambda: self.now)
        applier = Applier(self.api, self.recent, clock=lambda: self.now)
        chosen = Settings(**({"trainer_image": "trainer:1", "searcher_image": "searcher:1"} | settings))
        self.reconciler = Reconciler(
            observer, applier, self.recent, settings=chosen, metrics=self.metrics, clock=lambda: self.now
        )

    def sample(self, key, pod_uids):
        """As a `ProgressSource`."""
        return self.samples.get(key)

    def create(self, name="gsm8k", metadata=None, **spec):
        """A user applies a TBAJob; its key."""
        data = smallest(**spec)
        data["metadata"] = {"namespace": "default", "name": name} | (metadata or {})
        self.api.put(data)
        return "default", name

    def watch(self):
        """The watches catch up with the API server."""
        for index in (self.jobs, self.children, self.pods):
            index.clear()
        for raw in self.api.of_kind("TBAJob"):
            self.jobs[raw["metadata"]["namespace"], raw["metadata"]["name"]] = [trim(raw)]
        for kind in _CHILDREN:
            for raw in self.api.of_kind(kind):
                self._file(self.children, raw, trim(raw))
        for raw in self.api.of_kind("Pod"):
            if has_role(raw):
                self._file(self.pods, raw, pod_of(raw))

    def reconcile(self, key, *, stale=False):
        """One pass; what it returned."""
        if not stale:
            self.watch()
        return asyncio.run(self.reconciler.reconcile(key))

    def settle(self, key, passes=6):
        """Passes until one writes nothing."""
        for _ in range(passes):
            before = len(self.api.writes)
            self.reconcile(key)
            if len(self.api.writes) == before:
                return
        raise AssertionError(f"still writes after {passes} passes: {self.api.writes[-5:]}")

    def status(self, key):
        """Of the job in the API server."""
        return self.api[Ref("tba.dev/v1alpha1", "TBAJob", *key)].get("status", {})

    def condition(self, key, kind):
        """(status, reason) of a condition."""
        found = next(c for c in self.status(key)["conditions"] if c["type"] == kind)
        return found["status"], found["reason"]

    @staticmethod
    def _file(index, raw, kept):
        label = (raw["metadata"].get("labels") or {}).get(JOB_LABEL)
        if label is not None:
            index.setdefault((raw["metadata"]["namespace"], label), []).append(kept)
