import asyncio

import kopf
import pytest
from support.simulated_time import now, run
from yarl import URL

from tba_operator.streams import LOGIN_PAUSE_SECONDS, SERVER_TIMEOUT_SECONDS, STALE_SECONDS, Streams, stream_of

SERVER = "https://10.0.0.1:443"


class Told:
    def __init__(self):
        self.heard, self.again = [], []
        self.streams = Streams(self.heard.append, self.again.append)

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


def test_only_a_second_list_may_lack_what_was_deleted_meanwhile():
    told = Told()
    told.answer("/api/v1/pods?limit=500")
    told.answer("/api/v1/pods?limit=500&continue=abc")
    told.answer("/apis/batch/v1/jobs?limit=500")
    assert told.again == []
    told.answer("/api/v1/pods?limit=500")
    assert told.again == ["pods"]


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
