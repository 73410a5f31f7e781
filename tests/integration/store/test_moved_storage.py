"""Storage that is reached another way while a run goes on: endpoint, path style and CA are live."""

import os
import shutil
import ssl
import subprocess
import threading

import pytest
from support.fault_proxy import FaultProxy
from support.processes import cluster, job_for
from support.store_settings import TEST_RETRY, TEST_TRANSFER

from tba.contracts.errors import UserError
from tba.contracts.runfile import write_config
from tba.store import open_store
from tba.store.access import locate

LARGE = 12 << 20


@pytest.fixture
def two_doors(s3_server):
    with FaultProxy(s3_server.endpoint) as one, FaultProxy(s3_server.endpoint) as other:
        yield one, other


def here(uri: str, endpoint: str):
    return locate(uri, endpoint=endpoint, region=None, force_path_style=None, ca_bundle=None, environ=dict(os.environ))


def test_a_moved_store_takes_its_calls_in_flight_along_and_leaves_nothing_behind(s3_uri, two_doors):
    one, other = two_doors
    store = open_store(s3_uri, endpoint=one.endpoint, retry=TEST_RETRY, transfer=TEST_TRANSFER)
    data = os.urandom(LARGE)
    store.put_once("large", data)  # through obstore, and in parts by connections that are kept
    one.add("error")
    back = memoryview(bytearray(LARGE))
    reading = threading.Thread(target=store.read_into, args=("large", back))
    reading.start()
    store.relocate(here(s3_uri, other.endpoint))
    reading.join(30)
    assert not reading.is_alive() and back == data
    gone = sum(one.requests.values())
    etag = store.cas("latest", b"1", None)
    store.put_once("again", data)
    assert (store.get("latest").etag, store.now() > 0) == (etag, True)
    assert sum(one.requests.values()) == gone and other.requests["PUT"] >= 4
    store.close()


def test_parts_of_an_upload_that_the_new_place_does_not_know_are_sent_again(s3_uri, two_doors):
    one, _ = two_doors
    store = open_store(s3_uri, endpoint=one.endpoint, retry=TEST_RETRY, transfer=TEST_TRANSFER)
    one.add("error", method="PUT", path="partNumber", status=404, times=1)  # what NoSuchUpload comes down to
    data = os.urandom(LARGE)
    store.put_once("large", data)
    assert one.injected["error"] == 1 and store.get("large").data == data
    store.close()


def test_a_store_stays_at_its_prefix(s3_uri, s3_store):
    with pytest.raises(ValueError, match="stays at its bucket and prefix"):
        s3_store.relocate(here("s3://tba/elsewhere", "http://127.0.0.1:1"))


def test_a_run_follows_its_endpoint_while_the_old_one_is_dead(tmp_path, s3_uri, two_doors):
    one, other = two_doors
    job = job_for(
        tmp_path,
        s3_uri,
        storage={"endpoint": one.endpoint},
        objective={"totalSteps": 100_000},
        searcher={"engine": {"extraArgs": {"tokensPerSecond": 5000}}},
    )
    with cluster(tmp_path, job) as run:
        trainer, searcher = run.trainer(), run.searcher()
        run.wait_for(lambda latest: latest.version >= 2)
        one.close()
        live = job.spec.live_config()
        there = live.model_copy(update={"storage": live.storage.model_copy(update={"endpoint": other.endpoint})})
        write_config(tmp_path / "config", job, live=there)
        moved = run.wait_for(lambda _: all("storage_moved" in run.log_of(each) for each in (trainer, searcher)))
        run.wait_for(lambda latest: latest.version >= moved.version + 2)
        assert (trainer.poll(), searcher.poll()) == (None, None), run.tail()
        assert run.stop(trainer, searcher) == [143, 143], run.tail()


def certificate(folder, name: str):
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    leaf = ("-addext", "basicConstraints=critical,CA:FALSE")  # obstore takes no CA for a server
    subject = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", *leaf)
    subprocess.run(
        ["openssl", "req", "-x509", "-nodes", *curve, *subject, "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )
    return cert, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
def test_a_renewed_ca_is_taken_from_its_file(tmp_path, s3_server, s3_uri, monkeypatch):
    old, new = certificate(tmp_path, "old"), certificate(tmp_path, "new")
    bundle = tmp_path / "ca.crt"
    shutil.copy(old[0], bundle)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*old)
    with FaultProxy(s3_server.endpoint, tls=tls) as door:
        store = open_store(s3_uri, endpoint=door.endpoint, retry=TEST_RETRY, transfer=TEST_TRANSFER)
        data = os.urandom(LARGE)
        store.put_once("before", data)
    tls.load_cert_chain(*new)
    with FaultProxy(s3_server.endpoint, tls=tls) as door:
        store.relocate(here(s3_uri, door.endpoint))
        with pytest.raises(UserError, match="no trusted TLS connection.*caBundleConfigMapRef"):
            store.get("before")
        shutil.copy(new[0], bundle)
        store.relocate(here(s3_uri, door.endpoint))
        assert store.get("before").data == data
        store.put_once("after", data)
    store.close()
