"""Fixtures that many tests share. The S3 server starts with the first test that asks for it."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import settings
from support.store_settings import TEST_RETRY, TEST_TRANSFER

from tba.store import ObjectStore, open_store
from tba.store.serve import EmbeddedServer

# A loaded machine is no failure. The same examples each time: a run of the tests judges a change, and says the same
# of it everywhere; what has not been tried yet is looked for by `make test-properties`, with new examples each time.
settings.register_profile("tba", deadline=None, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=1000, print_blob=True)  # make test-properties
settings.load_profile("tba")

_prefixes = itertools.count()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory) -> Iterator[EmbeddedServer]:
    """A real SeaweedFS server with the bucket `tba`."""
    with EmbeddedServer(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_env(s3_server, monkeypatch) -> dict[str, str]:
    """The server's credentials and endpoint in the environment, as a process of a run has them."""
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    return s3_server.env


@pytest.fixture
def s3_uri(s3_env) -> str:
    """A prefix that no other test has used."""
    return f"s3://tba/tests/{next(_prefixes):06d}"


@pytest.fixture
def s3_store(s3_uri) -> Iterator[ObjectStore]:
    """A store under a fresh prefix of the real server."""
    store = open_store(s3_uri, retry=TEST_RETRY, transfer=TEST_TRANSFER)
    yield store
    store.close()


@pytest.fixture
def local_store(tmp_path) -> Iterator[ObjectStore]:
    """A store in a fresh directory."""
    store = open_store(f"file://{tmp_path}/store", retry=TEST_RETRY)
    yield store
    store.close()


@pytest.fixture(params=["local", "s3"])
def store(request) -> ObjectStore:
    """Each store in turn."""
    return request.getfixturevalue(f"{request.param}_store")
