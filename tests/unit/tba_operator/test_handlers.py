import asyncio
from types import SimpleNamespace

import kopf
from support.raw_pods import raw_pod

from tba_operator import handlers
from tba_operator.api import JOB_LABEL
from tba_operator.mirror import Mirror
from tba_operator.streams import Streams


class Registered:
    """The handlers of a registry, by kind."""

    def __init__(self, *, kueue=False):
        self.woken = []
        self.mirror = Mirror({}, lambda key, may_wait: self.woken.append(key))
        self.mirror.complete.set()
        streams = Streams(lambda _: None, self.mirror.page)
        self.registry = handlers.make_registry(self.mirror, streams, kueue=kueue)
        self.watching = self.registry._watching.get_all_handlers()

    def see(self, kind, body, event="MODIFIED"):
        handler = next(h for h in self.watching if h.selector.any_name == kind.plural)
        asyncio.run(handler.fn(body=kopf.Body(body), type=event))


def config_map():
    metadata = {"namespace": "default", "name": "gsm8k-config", "labels": {JOB_LABEL: "gsm8k"}, "uid": "c"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {}}


def test_every_kind_of_child_is_watched():
    wanted = {kind.plural for kind in handlers.kinds(kueue=False)}
    assert {h.selector.any_name for h in Registered().watching} == wanted


def test_workloads_are_watched_only_where_kueue_is():
    assert handlers.WORKLOADS in handlers.kinds(kueue=True)
    assert handlers.WORKLOADS not in handlers.kinds(kueue=False)


def test_there_is_no_handler_that_makes_kopf_write_to_objects_or_wait_for_all_others():
    registry = Registered(kueue=True).registry
    assert list(registry._indexing.get_all_handlers()) == []
    assert list(registry._changing.get_all_handlers()) == []
    assert list(registry._spawning.get_all_handlers()) == []
    assert list(registry._webhooks.get_all_handlers()) == []


def test_an_event_of_a_child_wakes_its_job():
    registered = Registered()
    registered.see(handlers.CHILDREN[2], config_map())
    registered.see(handlers.PODS, raw_pod())
    registered.see(handlers.JOBS, {"kind": "TBAJob", "metadata": {"namespace": "a", "name": "b", "uid": "j"}})
    assert registered.woken == [("default", "gsm8k"), ("default", "gsm8k"), ("a", "b")]


def test_what_is_deleted_is_forgotten_and_wakes_its_job():
    registered = Registered()
    registered.see(handlers.PODS, raw_pod(), event=None)
    assert len(registered.mirror.caches.pods(("default", "gsm8k"))) == 1
    registered.see(handlers.PODS, raw_pod(), event="DELETED")
    assert registered.mirror.caches.pods(("default", "gsm8k")) == []
    assert registered.woken == [("default", "gsm8k")] * 2


def test_kopf_compares_no_versions_of_objects():
    storage = handlers.kopf_settings().persistence.diffbase_storage
    body = kopf.Body(config_map())
    assert storage.fetch(body=body) is None
    assert dict(storage.build(body=body)) == {}


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
