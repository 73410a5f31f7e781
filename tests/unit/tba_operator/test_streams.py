import asyncio

import kopf
import pytest
from support.simulated_time import now, run
from yarl import URL

from tba_operator.streams import LOGIN_PAUSE_SECONDS, SERVER_TIMEOUT_SECONDS, STALE_SECONDS, Streams, stream_of

SERVER = "https://10.0.0.1:443"


def item(uid, spec=None, **metadata):
    return {"metadata": {"uid": uid, "name": uid, **metadata}, "spec": spec or {}}


class Told:
    def __init__(self):
        self.heard, self.pages = [], []
        self.streams = Streams(self.heard.append, self.page)

    def page(self, stream, uids, *, first, last):
        self.pages.append((stream, list(uids), first, last))

    def read(self, path, *items, more=""):
        body = {"kind": "PodList", "apiVersion": "v1", "metadata": {"continue": more}, "items": list(items)}
        self.streams.read(URL(SERVER + path), body)
        return body["items"]

    def answer(self, path, status=200):
        self.streams.answered(URL(SERVER + path), status)


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        ("/api/v1/pods", "pods"),
        ("/apis/tba.dev/v1alpha1/tbajobs", "tbajobs"),
        ("/apis/apps/v1/namespaces/research/statefulsets", "statefulsets in research"),
        ("/k8s/clusters/c-1/api/v1/pods", "pods"),
        ("/api/v1", None),
        ("/apis/batch/v1", None),
        ("/version", None),
        ("/apis/batch/v1/namespaces/a/jobs/b", None),
    ],
)
def test_a_request_belongs_to_the_stream_of_its_kind(path, stream):
    assert stream_of(URL(SERVER + path)) == stream


def test_a_watch_that_is_answered_is_heard_of():
    told = Told()
    told.answer("/api/v1/pods?watch=true&labelSelector=x")
    assert told.heard == ["pods"]


def test_a_watch_that_is_refused_is_not():
    told = Told()
    told.answer("/api/v1/pods?watch=true", status=503)
    assert told.heard == []


def test_a_list_says_nothing_of_a_watch():
    told = Told()
    told.answer("/api/v1/pods?limit=500")
    assert told.heard == []


def test_the_pages_of_a_list_are_told():
    told = Told()
    told.read("/api/v1/pods?limit=500", item("a"), item("b"), more="x")
    told.read("/api/v1/pods?limit=500&continue=x", item("c"))
    assert told.pages == [("pods", ["a", "b"], True, False), ("pods", ["c"], False, True)]


def test_kopf_gets_listed_objects_trimmed_and_with_their_kind():
    spec = {"nodeName": "n", "containers": [{"big": 1}]}
    [pod] = Told().read("/api/v1/pods", item("a", spec=spec, managedFields=[{}]))
    assert (pod["kind"], pod["apiVersion"], pod["spec"]) == ("Pod", "v1", {"nodeName": "n"})
    assert "managedFields" not in pod["metadata"]


@pytest.mark.parametrize("body", [{"kind": "APIResourceList", "resources": []}, {"items": None}, [], "text"])
def test_what_is_no_list_of_objects_is_left_alone(body):
    told = Told()
    told.streams.read(URL(SERVER + "/api/v1/pods"), body)
    assert told.pages == []


def test_a_live_watch_is_answered_long_before_it_counts_as_stale():
    assert SERVER_TIMEOUT_SECONDS + 30 <= STALE_SECONDS


def test_an_api_server_that_takes_no_credentials_is_not_asked_at_full_speed(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path)))

    async def three_logins():
        streams = Told().streams
        for _ in range(3):
            session = await streams.login(settings=kopf.OperatorSettings())
            await session.aiohttp_session.close()
        return now()

    assert run(three_logins()) == 2 * LOGIN_PAUSE_SECONDS


def test_without_credentials_there_is_no_login(monkeypatch, tmp_path):
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(kopf.PermanentError, match="KUBECONFIG"):
        asyncio.run(Told().streams.login(settings=kopf.OperatorSettings()))


def kubeconfig(folder):
    path = folder / "config"
    path.write_text(
        "current-context: c\n"
        "clusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}]\n"
        "users: [{name: u, user: {token: secret}}]\n"
        "contexts: [{name: c, context: {cluster: c, user: u}}]\n"
    )
    return path
