"""A Secret that changes while a process runs, against a real server that knows one pair of keys."""

import os
import threading

import pytest
from support.store_settings import TEST_RETRY, TEST_TRANSFER

from tba.contracts.errors import UserError
from tba.store import AccessDenied, Weather
from tba.store.access import KeySource, locate
from tba.store.key_files import KeyFiles
from tba.store.retry import Rotation
from tba.store.s3 import S3Store

LARGE = 6 << 20


def write(folder, key: str, secret: str) -> None:
    for name, value in (("AWS_ACCESS_KEY_ID", key), ("AWS_SECRET_ACCESS_KEY", secret)):
        (folder / f".{name}").write_text(value)
        (folder / f".{name}").rename(folder / name)


@pytest.fixture
def make(s3_uri, s3_env, tmp_path):
    """A store whose keys come from files in tmp_path, and the weather it sees."""
    stores = []

    def open_it(rotation: Rotation) -> tuple[S3Store, Weather]:
        where = locate(
            s3_uri, endpoint=None, region=None, force_path_style=None, ca_bundle=None, environ=dict(os.environ)
        )
        weather = Weather()
        keys = KeySource(KeyFiles(tmp_path), rotation)
        stores.append(S3Store(where, keys, retry=TEST_RETRY, settings=TEST_TRANSFER, weather=weather))
        return stores[-1], weather

    yield open_it
    for store in stores:
        store.close()


def test_a_key_that_is_gone_is_sat_out_until_the_new_one_is_projected(make, tmp_path, s3_env):
    good = s3_env["AWS_ACCESS_KEY_ID"], s3_env["AWS_SECRET_ACCESS_KEY"]
    write(tmp_path, *good)
    store, weather = make(Rotation(first_seconds=0.1, later_seconds=30.0))
    store.put_once("a", b"1")
    write(tmp_path, "AKIAGONE", "gone")
    threading.Event().wait(1.1)  # the files are looked at once a second
    back = threading.Timer(1.5, write, (tmp_path, *good))
    back.start()
    store.put_once("b", bytes(LARGE))  # in parts: the other way to the server
    back.join()
    assert store.get("b").data == bytes(LARGE) and weather.trouble is None


def test_a_wrong_key_from_the_start_is_the_users_mistake_and_names_the_secret(make, tmp_path):
    write(tmp_path, "AKIAWRONG", "wrong")
    store, weather = make(Rotation(first_seconds=1.0, later_seconds=30.0, where="the Secret tba-s3"))
    with pytest.raises(UserError, match="InvalidAccessKeyId.*the keys come from the Secret tba-s3") as caught:
        store.get("a")
    assert not isinstance(caught.value, AccessDenied) and "wrong" not in str(caught.value)
    assert weather.trouble is not None and "InvalidAccessKeyId" in weather.trouble.error


def test_a_rotation_that_never_ends_is_denied_access_that_a_trainer_may_sit_out_longer(make, tmp_path, s3_env):
    write(tmp_path, s3_env["AWS_ACCESS_KEY_ID"], s3_env["AWS_SECRET_ACCESS_KEY"])
    store, _ = make(Rotation(first_seconds=0.1, later_seconds=0.5))
    store.put_once("a", b"1")
    write(tmp_path, s3_env["AWS_ACCESS_KEY_ID"], "not the secret")
    threading.Event().wait(1.1)
    with pytest.raises(AccessDenied, match="SignatureDoesNotMatch"):
        store.get("a")
