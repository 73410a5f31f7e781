"""The port, the fake, and what the real adapter makes of answers; tests/cluster compares both with a real server."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client import ApiClient, Configuration
from support.kube_contract import SENTENCES, Sentence, config_map
from support.kube_fake import FakeKube

from tba_operator.cluster_api import ClusterApi, TokenBucket, error_of
from tba_operator.kubeapi import (
    Access,
    Conflict,
    Events,
    Forbidden,
    Invalid,
    NamespaceTerminating,
    NotFound,
    NotLeading,
    QuotaExceeded,
    Resource,
    TooManyRequests,
    Unavailable,
)
from tba_operator.world import Ref

LEASE = {
    "apiVersion": "coordination.k8s.io/v1",
    "kind": "Lease",
    "metadata": {"name": "tba-operator", "namespace": "tba-system"},
}


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda sentence: sentence.__name__)
def test_fake(sentence: Sentence):
    asyncio.run(sentence(FakeKube(), "default"))


# Where things are.


@pytest.mark.parametrize(
    ("api_version", "kind", "namespace", "name", "path"),
    [
        ("v1", "Pod", "ns", "p", "/api/v1/namespaces/ns/pods/p"),
        ("v1", "Pod", None, None, "/api/v1/pods"),
        ("v1", "Node", "", "n", "/api/v1/nodes/n"),
        (
            "networking.k8s.io/v1",
            "NetworkPolicy",
            "ns",
            None,
            "/apis/networking.k8s.io/v1/namespaces/ns/networkpolicies",
        ),
    ],
)
def test_paths_are_those_of_the_api(api_version, kind, namespace, name, path):
    assert Resource.of(api_version, kind).path(namespace, name) == path


def test_a_kind_of_no_concern_is_refused():
    with pytest.raises(ValueError, match="Secret"):
        Resource.of("v1", "Secret")


# What answers mean.


def status(message: str, **cause: str) -> str:
    return json.dumps({"kind": "Status", "message": message, "details": {"causes": [cause]} if cause else {}})


@pytest.mark.parametrize(
    ("code", "body", "expected"),
    [
        (400, status("cannot unmarshal"), Invalid),
        (401, status("Unauthorized"), Unavailable),
        (403, status("User x cannot create resource"), Forbidden),
        (403, status("pods p is forbidden: exceeded quota: q, requested: pods=1"), QuotaExceeded),
        (403, status("pods p is forbidden: failed quota: q: must specify limits.cpu"), QuotaExceeded),
        (404, status('namespaces "team-a" not found'), NamespaceTerminating),
        (404, status('jobs.batch "namespaces" not found'), NotFound),
        (403, status("forbidden", reason="NamespaceTerminating", field="metadata.namespace"), NamespaceTerminating),
        (404, status("not found"), NotFound),
        (409, status("the object has been modified"), Conflict),
        (413, status("Request entity too large"), Invalid),
        (422, status("is invalid", field="spec.replicas"), Invalid),
        (422, status("is invalid: metadata.uid: field is immutable", field="metadata.uid"), Conflict),
        (429, status("slow down"), TooManyRequests),
        (500, status("failed to create typed patch object (…): field not declared in schema"), Invalid),
        (500, status("etcdserver: request is too large"), Invalid),
        (500, status("failed calling webhook"), Unavailable),
        (503, "upstream connect error", Unavailable),
        (504, "", Unavailable),
        (502, "[1]", Unavailable),
    ],
)
def test_an_answer_means_one_error(code, body, expected):
    assert type(error_of(code, body, {})) is expected


def test_the_servers_own_words_are_kept():
    assert str(error_of(422, status("spec.x: must not be"), {})) == "spec.x: must not be"


@pytest.mark.parametrize(
    ("headers", "seconds"), [({"retry-after": "7"}, 7.0), ({}, 1.0), ({"Retry-After": "Fri"}, 1.0)]
)
def test_retry_after_is_read(headers, seconds):
    error = error_of(429, status("slow down"), headers)
    assert isinstance(error, TooManyRequests) and error.retry_after == seconds


# The adapter, against a server that misbehaves.

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(handler: Handler, **options) -> AsyncIterator[ClusterApi]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        configuration = Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
        async with ApiClient(configuration) as client:
            yield ClusterApi(client, **options)
    finally:
        await runner.cleanup()


async def reset(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def break_off(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await answer.prepare(request)
    await answer.write(b'{"a":')
    assert request.transport is not None
    request.transport.abort()
    return answer


async def gibberish(request: web.Request) -> web.StreamResponse:
    return web.Response(text="{", content_type="application/json")


async def page_of_a_proxy(request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>", content_type="text/html")


async def never(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


@pytest.mark.parametrize("handler", [reset, break_off, gibberish, page_of_a_proxy, never])
def test_no_sensible_answer_is_unavailable(handler: Handler):
    outcomes: list[tuple[str, str, str]] = []

    async def main() -> None:
        async with served(handler, timeout_seconds=0.1, observe=lambda *seen: outcomes.append(seen)) as api:
            with pytest.raises(Unavailable):
                await api.apply(config_map("ns"))

    asyncio.run(main())
    assert outcomes == [("apply", "ConfigMap", "Unavailable")]


def test_a_server_that_is_not_there_is_unavailable():
    async def main() -> None:
        async with ApiClient(Configuration(host="http://127.0.0.1:1")) as client:
            with pytest.raises(Unavailable, match="127.0.0.1"):
                await ClusterApi(client).get(Ref("v1", "Pod", "ns", "p"))

    asyncio.run(main())


def test_a_long_list_is_read_page_by_page():
    async def handler(request: web.Request) -> web.StreamResponse:
        start = int(request.query.get("continue", "0"))
        items = [{"metadata": {"name": f"p{n}", "managedFields": []}} for n in range(start, start + 2)]
        return web.json_response({"metadata": {"continue": str(start + 2)} if start < 4 else {}, "items": items})

    async def main() -> None:
        async with served(handler) as api:
            found = await api.list("v1", "Pod", "ns")
            assert [pod["metadata"] for pod in found] == [{"name": f"p{n}"} for n in range(6)]
            assert {(pod["apiVersion"], pod["kind"]) for pod in found} == {("v1", "Pod")}

    asyncio.run(main())


def test_whether_a_kind_is_there_is_asked_once():
    asked = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return web.json_response({"resources": [{"kind": "Workload"}]})

    async def main() -> None:
        async with served(handler) as api:
            for _ in range(3):
                assert await api.has_kind("kueue.x-k8s.io/v1beta2", "Workload")
                assert not await api.has_kind("kueue.x-k8s.io/v1beta2", "Cohort")

    asyncio.run(main())
    assert asked == ["/apis/kueue.x-k8s.io/v1beta2"]


def test_who_leads_no_longer_writes_nothing_but_leases():
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({"metadata": {}, "items": []})

    async def main() -> None:
        async with served(handler, may_write=lambda: False) as api:
            ref = Ref("apps/v1", "StatefulSet", "ns", "s")
            for write in (
                lambda: api.apply(config_map("ns")),
                lambda: api.apply_status(config_map("ns")),
                lambda: api.create(config_map("ns")),
                lambda: api.replace(config_map("ns")),
                lambda: api.scale(ref, 1),
                lambda: api.delete(ref, uid="u"),
            ):
                with pytest.raises(NotLeading):
                    await write()
            await api.get(ref)
            await api.list("v1", "Pod")
            await api.replace(LEASE)

    asyncio.run(main())


def test_leases_do_not_wait_for_tokens():
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({"metadata": {}})

    async def main() -> None:
        async with served(handler, rate=0.001, burst=1) as api:
            await api.get(Ref("v1", "Pod", "ns", "p"))
            async with asyncio.timeout(5):
                await api.replace(LEASE)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await api.get(Ref("v1", "Pod", "ns", "p"))

    asyncio.run(main())


def test_an_answer_of_a_pod_is_bounded():
    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.path == "/api/v1/namespaces/ns/pods/p:8080/proxy/progress"
        return web.Response(body=b"x" * 100)

    async def main() -> None:
        async with served(handler) as api:
            pod = Ref("v1", "Pod", "ns", "p")
            assert await api.proxy_get(pod, 8080, "/progress", limit=100) == b"x" * 100
            with pytest.raises(Invalid):
                await api.proxy_get(pod, 8080, "/progress", limit=99)
            assert Access("", "pods/proxy", "get") in api.accesses

    asyncio.run(main())


# Pace.


def test_a_burst_is_free_and_the_rest_comes_at_the_rate():
    bucket = TokenBucket(2.0, 3, now=0.0)
    assert [bucket.reserve(0.0) for _ in range(5)] == [0, 0, 0, 0.5, 1.0]
    assert bucket.reserve(10.0) == 0


@given(gaps=st.lists(st.floats(0, 2), max_size=60), rate=st.floats(0.5, 50), burst=st.integers(1, 30))
def test_no_window_sees_more_than_its_rate_and_one_burst(gaps, rate, burst):
    bucket, now, allowed = TokenBucket(rate, burst, now=0.0), 0.0, []
    for gap in gaps:
        now += gap
        allowed.append(now + bucket.reserve(now))
    for first in range(len(allowed)):
        for last in range(first, len(allowed)):
            assert last - first + 1 <= burst + rate * (allowed[last] - allowed[first]) + 1e-6


# Events.


def test_an_event_is_told_again_after_its_window():
    told: list[str] = []
    now = [0.0]

    async def create(manifest):
        told.append(manifest["note"])
        return manifest

    async def main() -> None:
        events = Events(create, instance="i", clock=lambda: now[0], wall=lambda: now[0])
        job = config_map("ns")
        for moment, message in ((0, "a"), (1, "b"), (599, "a"), (600, "a"), (700, "a")):
            now[0] = moment
            await events.emit(job, "Normal", "Started", message)

    asyncio.run(main())
    assert told == ["a", "b", "a"]


def test_a_note_is_cut_between_letters():
    notes: list[str] = []

    async def create(manifest):
        notes.append(manifest["note"])
        return manifest

    async def main() -> None:
        events = Events(create, instance="i", clock=lambda: 0.0, wall=lambda: 0.0)
        await events.emit(config_map("ns"), "Warning", "Failed", "ü" * 600)

    asyncio.run(main())
    assert len(notes[0].encode()) <= 1024 and notes[0].endswith("ü…")


# The fake's levers.


def test_an_injected_failure_strikes_as_often_as_told():
    async def main() -> None:
        fake = FakeKube()
        fake.fail(QuotaExceeded("full"), verb="apply", kind="ConfigMap", times=1)
        with pytest.raises(QuotaExceeded):
            await fake.apply(config_map("ns"))
        await fake.apply(config_map("ns"))
        fake.fail(Unavailable("answer lost"), verb="apply", after=True)
        with pytest.raises(Unavailable):
            await fake.apply(config_map("ns", a="1"))
        assert fake[Ref("v1", "ConfigMap", "ns", "run-config")]["data"] == {"a": "1"}
        assert len(fake.writes) == 3

    asyncio.run(main())


def test_garbage_goes_with_its_owner():
    fake = FakeKube()
    owner = fake.put(config_map("ns") | {"metadata": {"name": "owner", "namespace": "ns"}})
    child = config_map("ns")
    child["metadata"]["ownerReferences"] = [{"uid": owner["metadata"]["uid"]}]
    fake.put(child)
    fake.collect_garbage()
    assert len(fake.of_kind("ConfigMap")) == 2
    fake.remove(Ref("v1", "ConfigMap", "ns", "owner"))
    fake.collect_garbage()
    assert fake.of_kind("ConfigMap") == []


def test_subscribers_see_each_change_once():
    seen: list[tuple[str, str]] = []

    async def main() -> None:
        fake = FakeKube()
        fake.subscribers.append(lambda kind, found: seen.append((kind, found["metadata"]["name"])))
        created = await fake.apply(config_map("ns"))
        await fake.apply(config_map("ns"))
        await fake.apply(config_map("ns", a="1"))
        await fake.delete(Ref("v1", "ConfigMap", "ns", "run-config"), uid=created["metadata"]["uid"])

    asyncio.run(main())
    assert [kind for kind, _ in seen] == ["ADDED", "MODIFIED", "DELETED"]
