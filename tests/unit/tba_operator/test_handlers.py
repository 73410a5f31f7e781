import asyncio
from types import SimpleNamespace

import kopf
from support.raw_pods import raw_pod

from tba_operator import handlers
from tba_operator.api import JOB_LABEL
from tba_operator.streams import Streams
from tba_operator.world import Pod


class Registered:
    """The handlers of a registry, by id."""

    def __init__(self, *, kueue=False):
        self.woken, self.started = [], []
        streams = Streams(lambda _: None, lambda _: None)
        self.registry = handlers.make_registry(self.woken.append, streams, self.started.append, kueue=kueue)
        self.watching = self.registry._watching.get_all_handlers()
        self.indexing = self.registry._indexing.get_all_handlers()

    def index(self, kind):
        return next(h for h in self.indexing if h.selector.any_name == kind.plural)

    def event(self, kind):
        return next(h for h in self.watching if h.selector.any_name == kind.plural)


def call(handler, body):
    return asyncio.run(handler.fn(body=kopf.Body(body)))


def config_map():
    metadata = {"namespace": "default", "name": "gsm8k-config", "labels": {JOB_LABEL: "gsm8k"}, "managedFields": [{}]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {}}


def test_every_kind_of_child_is_watched_and_indexed():
    registered = Registered()
    wanted = {kind.plural for kind in handlers.kinds(kueue=False)}
    assert {h.selector.any_name for h in registered.watching} == wanted
    assert {h.selector.any_name for h in registered.indexing} == wanted


def test_workloads_are_watched_only_where_kueue_is():
    assert handlers.WORKLOADS in handlers.kinds(kueue=True)
    assert handlers.WORKLOADS not in handlers.kinds(kueue=False)


def test_there_is_no_handler_that_makes_kopf_write_to_objects():
    registry = Registered(kueue=True).registry
    assert list(registry._changing.get_all_handlers()) == []
    assert list(registry._spawning.get_all_handlers()) == []
    assert list(registry._webhooks.get_all_handlers()) == []


def test_an_event_of_a_child_wakes_its_job():
    registered = Registered()
    call(registered.event(handlers.CHILDREN[2]), config_map())
    call(registered.event(handlers.PODS), raw_pod())
    call(registered.event(handlers.JOBS), {"metadata": {"namespace": "a", "name": "b"}})
    assert registered.woken == [("default", "gsm8k"), ("default", "gsm8k"), ("a", "b")]


def test_children_are_indexed_by_job_and_trimmed():
    [(key, kept)] = call(Registered().index(handlers.CHILDREN[2]), config_map()).items()
    assert key == ("default", "gsm8k")
    assert kept["kind"] == "ConfigMap" and "managedFields" not in kept["metadata"]


def test_pods_are_indexed_parsed():
    [(key, pod)] = call(Registered().index(handlers.PODS), raw_pod()).items()
    assert key == ("default", "gsm8k")
    assert isinstance(pod, Pod)


def test_a_pod_with_the_jobs_label_but_no_role_is_not_indexed():
    assert call(Registered().index(handlers.PODS), raw_pod(labels={"tba.dev/role": "other"})) is None


def test_the_indices_are_handed_out_at_the_start():
    registered = Registered()
    [hand_out] = [h for h in registered.registry._activities.get_all_handlers() if h.id == "hand_out"]
    asyncio.run(hand_out.fn(jobs={("a", "b"): [{"metadata": {"uid": "u"}}]}, children={}, pods={}))
    [caches] = registered.started
    assert caches.keys() == [("a", "b")]


def test_the_api_server_applies_the_label_selector_to_children_and_not_to_jobs():
    selectors = handlers.kopf_settings().watching.label_selectors
    for kind in handlers.kinds(kueue=True):
        resource = SimpleNamespace(
            group=kind.group,
            version=kind.version,
            plural=kind.plural,
            kind=kind.kind,
            singular="",
            shortcuts=(),
            categories=(),
            preferred=True,
        )
        assert list(selectors.collect(resource)) == ([] if kind == handlers.JOBS else [JOB_LABEL])


def test_kopf_posts_no_events_and_scans_nothing():
    settings = handlers.kopf_settings()
    assert not settings.posting.enabled
    assert settings.scanning.disabled
    assert settings.peering.standalone
