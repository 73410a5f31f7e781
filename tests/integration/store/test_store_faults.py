"""The S3 store against a server that answers wrongly, late or not at all."""

import json
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from support.fault_proxy import FaultProxy
from support.store_settings import SHORT, TEST_RETRY, TEST_TRANSFER

from tba.contracts.errors import StoreUnavailable, UserError
from tba.store import AccessDenied, AlreadyExists, Conflict, NotFound, open_store
from tba.store.probe import probe, require


@pytest.fixture
def proxy(s3_server):
    with FaultProxy(s3_server.endpoint, seed=7) as proxy:
        yield proxy


@pytest.fixture
def flaky(s3_uri, proxy):
    store = open_store(s3_uri, endpoint=proxy.endpoint, retry=TEST_RETRY, transfer=TEST_TRANSFER)
    yield store
    store.close()


def operations(store):
    """Every request that a run makes."""
    return {
        "get": lambda: store.get("key"),
        "get_if_changed": lambda: store.get_if_changed("key", '"0"'),
        "head": lambda: store.head("key"),
        "put_once": lambda: store.put_once("key", b"1"),
        "put_once large": lambda: store.put_once("large", bytes(6 << 20)),
        "cas": lambda: store.cas("latest", b"1", None),
        "cas etag": lambda: store.cas("latest", b"1", '"0123456789abcdef0123456789abcdef"'),
        "read_into": lambda: store.read_into("key", memoryview(bytearray(1))),
        "list": lambda: list(store.list_after("x/")),
        "delete": lambda: store.delete(["key"]),
    }


@pytest.mark.parametrize("size", [100, 12 << 20])
def test_a_lost_reply_of_put_once_is_a_success(flaky, proxy, size):
    data = os.urandom(size)
    # The last request of either way: the PUT itself, or the completion of the parts.
    where = {"method": "PUT"} if size == 100 else {"method": "POST", "path": "uploadId="}
    proxy.add("lost_reply", times=1, **where)
    flaky.put_once("object", data)
    assert proxy.injected["lost_reply"] == 1
    assert flaky.get("object").data == data
    with pytest.raises(AlreadyExists):
        flaky.put_once("object", bytes(size))


def test_after_a_lost_reply_of_cas_the_nonce_in_the_object_is_the_callers(flaky, proxy):
    etag = flaky.cas("latest", b"before", None)
    nonce = secrets.token_hex(16).encode()
    proxy.add("lost_reply", times=1, method="PUT")
    with pytest.raises(Conflict):
        flaky.cas("latest", nonce, etag)
    assert flaky.get("latest").data == nonce


def test_one_request_in_ten_failing_loses_and_doubles_nothing(flaky, proxy):
    for kind in ("error", "reset", "lost_reply", "truncate"):
        proxy.add(kind, rate=0.025)
    proxy.add("error", rate=0.025, status=500)
    bodies = {f"w/{i:04d}": os.urandom(1000 + i) for i in range(150)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda item: flaky.put_once(*item), bodies.items()))
        read = dict(zip(bodies, pool.map(lambda key: flaky.get(key).data, bodies), strict=True))
    assert read == bodies
    assert [info.key for info in flaky.list_after("w/")] == sorted(bodies)
    large = os.urandom(25 << 20)
    flaky.put_once("large", large)
    target = bytearray(len(large))
    flaky.read_into("large", memoryview(target))
    assert target == large
    flaky.delete(bodies)
    assert list(flaky.list_after("w/")) == []
    assert len([kind for kind, count in proxy.injected.items() if count]) == 4


def test_concurrent_swaps_with_lost_replies_lose_and_double_nothing(flaky, proxy):
    """Each writer finds out by its nonce whether a Conflict was its own success, as the committer does."""
    flaky.cas("log", json.dumps([]).encode(), None)
    for kind in ("error", "lost_reply"):
        proxy.add(kind, rate=0.15, method="PUT")

    def append(writer: int) -> None:
        for i in range(3):
            entry = f"{writer}.{i}.{secrets.token_hex(8)}"
            while entry not in (entries := json.loads((current := flaky.get("log")).data)):
                try:
                    flaky.cas("log", json.dumps([*entries, entry]).encode(), current.etag)
                    break
                except Conflict:
                    pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(4)))
    entries = json.loads(flaky.get("log").data)
    assert len(entries) == len(set(entries)) == 12
    assert proxy.injected["lost_reply"] > 0


def test_a_store_whose_replies_are_lost_still_passes_the_probe(flaky, proxy):
    proxy.add("lost_reply", rate=0.15)
    require(probe(flaky))
    assert proxy.injected["lost_reply"] > 5


def test_a_damaged_connection_in_the_middle_of_a_large_read_is_made_good(flaky, proxy):
    data = os.urandom(20 << 20)
    flaky.put_once("large", data)
    proxy.add("truncate", times=3, method="GET")
    target = bytearray(len(data))
    flaky.read_into("large", memoryview(target))
    assert target == data
    assert proxy.injected["truncate"] == 3


@pytest.mark.parametrize("operation", operations(None))
@pytest.mark.parametrize("kind", ["error", "reset"])
def test_a_store_that_is_down_is_reported_within_the_budget(s3_uri, proxy, operation, kind):
    proxy.add(kind)
    store = open_store(s3_uri, endpoint=proxy.endpoint, retry=SHORT, transfer=TEST_TRANSFER)
    start = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"did not serve .* attempts .*last error: .*; check"):
        operations(store)[operation]()
    assert time.monotonic() - start < SHORT.budget_seconds + SHORT.request_timeout_seconds
    assert sum(proxy.injected.values()) > 1
    store.close()


@pytest.mark.parametrize("operation", ["get", "put_once", "read_into", "list"])
def test_a_silent_server_is_given_up_within_the_budget(s3_uri, proxy, operation):
    proxy.add("stall")
    retry = replace(SHORT, budget_seconds=0.5, request_timeout_seconds=0.3)
    store = open_store(s3_uri, endpoint=proxy.endpoint, retry=retry, transfer=TEST_TRANSFER)
    start = time.monotonic()
    with pytest.raises(StoreUnavailable):
        operations(store)[operation]()
    assert time.monotonic() - start < 2
    store.close()


def test_an_endpoint_where_nothing_listens_is_unavailable(s3_env):
    store = open_store("s3://tba/x", endpoint="http://127.0.0.1:1", retry=SHORT)
    for operation in operations(store).values():
        with pytest.raises(StoreUnavailable, match="refused"):
            operation()
    with pytest.raises(StoreUnavailable, match="refused"):
        store.now()
    store.close()


# Not `cas etag`: SeaweedFS answers 412 before it looks for the bucket, and the caller's next read then tells.
@pytest.mark.parametrize("operation", [name for name in operations(None) if name != "cas etag"])
def test_a_missing_bucket_is_the_users_error(s3_env, operation):
    store = open_store("s3://no-such-bucket/x", retry=SHORT, transfer=TEST_TRANSFER)
    with pytest.raises(UserError, match="NoSuchBucket.*create the bucket"):
        operations(store)[operation]()
    store.close()


@pytest.mark.parametrize("operation", operations(None))
@pytest.mark.parametrize(
    ("variable", "message"),
    [("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch.*secret"), ("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId.*exists")],
)
def test_wrong_credentials_are_the_users_error_and_are_not_printed(
    s3_env, s3_uri, monkeypatch, operation, variable, message
):
    monkeypatch.setenv(variable, "wrong-and-private")
    store = open_store(s3_uri, retry=SHORT, transfer=TEST_TRANSFER)
    with pytest.raises(UserError, match=message) as caught:
        operations(store)[operation]()
    shown = str(caught.value)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in shown and "wrong-and-private" not in shown
    store.close()


def test_https_to_an_http_server_is_the_users_error(s3_server, s3_uri):
    store = open_store(s3_uri, endpoint=s3_server.endpoint.replace("http:", "https:"), retry=SHORT)
    for read in (lambda: store.get("x"), lambda: store.put_once("x", b"1"), store.now):
        with pytest.raises(UserError, match="TLS.*caBundle"):
            read()
    store.close()


def test_a_refusal_for_lack_of_rights_has_its_own_type(s3_uri, proxy):
    proxy.add("error", status=403)
    store = open_store(s3_uri, endpoint=proxy.endpoint, retry=SHORT)
    with pytest.raises(AccessDenied):
        store.head("x")
    store.close()


def test_writes_in_flight_that_collide_are_tried_again(flaky, proxy):
    proxy.add("error", status=409, times=2, method="PUT")
    flaky.put_once("object", b"1")
    proxy.add("error", status=409, times=2, method="PUT")
    etag = flaky.cas("latest", b"1", None)
    proxy.add("error", status=409, times=2, method="PUT")
    flaky.cas("latest", b"2", etag)
    assert proxy.injected["error"] == 6
    assert flaky.get("latest").data == b"2"


def test_parts_of_a_failed_upload_are_removed(flaky, proxy, s3_uri):
    proxy.add("error", status=403, method="PUT", path="partNumber=2")
    with pytest.raises(UserError):
        flaky.put_once("large", bytes(12 << 20))
    assert proxy.requests["DELETE"] == 1
    proxy.clear()
    with pytest.raises(NotFound):
        flaky.head("large")


def test_every_request_is_observed(s3_uri, proxy):
    seen = []
    store = open_store(
        s3_uri,
        endpoint=proxy.endpoint,
        retry=TEST_RETRY,
        observe=lambda operation, outcome: seen.append((operation, outcome)),
    )
    proxy.add("error", times=1)
    store.put_once("x", b"1")
    with pytest.raises(NotFound):
        store.get("y")
    assert seen == [("put_once", "retried"), ("put_once", "ok"), ("get", "refused")]
    store.close()
