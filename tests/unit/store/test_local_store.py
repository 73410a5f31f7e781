"""What is particular to the directory; the shared promises are in test_store_contract.py."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.store_settings import SHORT

from tba.contracts.errors import StoreUnavailable, UserError
from tba.store import AccessDenied, OutOfSpace, Weather, open_store
from tba.store.local import LocalStore


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def test_a_relative_uri_starts_at_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = open_store("file://runs/one")
    assert store.uri == f"file://{tmp_path}/runs/one"
    store.put_once("a", b"1")
    assert (tmp_path / "runs/one/a").read_bytes() == b"1"
    monkeypatch.chdir("/")
    assert store.get("a").data == b"1"
    assert open_store(f"file://{tmp_path}/runs/one").get("a").data == b"1"


@pytest.mark.parametrize("uri", ["", "runs", "file://", "gs://b/x", "/abs"])
def test_other_uris_are_refused(uri):
    with pytest.raises(UserError, match="storage URI must be s3://bucket/prefix or file://directory, got"):
        open_store(uri)


def test_no_temporary_file_outlives_a_call(tmp_path):
    store = LocalStore(tmp_path)
    store.put_once("a/b", b"1")
    store.put_once("a/b", b"1")
    store.cas("latest", b"2", None)
    assert files(tmp_path) == [".tba/cas.lock", "a/b", "latest"]
    assert [info.key for info in store.list_after("")] == ["a/b", "latest"]
    store.delete(["a/b"])
    assert not (tmp_path / "a").exists()


def test_a_writer_killed_half_way_leaves_no_object(tmp_path):
    script = (
        "import sys; from pathlib import Path; from tba.store.local import LocalStore\n"
        "store = LocalStore(Path(sys.argv[1])); i = 0\n"
        "while True:\n"
        "    store.put_once(f'x/{i:08d}', bytes([i % 256]) * 300_000); i += 1\n"
        "    print(i, flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, env=environment
    ) as writer:
        for _ in range(20):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    store = LocalStore(tmp_path)
    keys = [info.key for info in store.list_after("")]
    assert len(keys) >= 20
    for number, key in enumerate(keys):
        assert key == f"x/{number:08d}"
        assert store.get(key).data == bytes([number % 256]) * 300_000


def test_temporary_files_of_the_dead_are_removed_after_a_day(tmp_path):
    folder = tmp_path / ".tba" / "tmp"
    folder.mkdir(parents=True)
    for name, age in (("old", 90_000), ("new", 100)):
        (folder / name).write_bytes(b"")
        os.utime(folder / name, (time.time() - age,) * 2)
    LocalStore(tmp_path)
    assert files(tmp_path) == [".tba/tmp/new"]


def test_a_stopped_holder_of_the_lock_does_not_stop_others_for_ever(tmp_path):
    store = LocalStore(tmp_path, retry=replace(SHORT, budget_seconds=0.1))
    store.cas("latest", b"1", None)
    with open(tmp_path / ".tba" / "cas.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StoreUnavailable, match="lock.*stopped process"):
            store.cas("latest", b"2", store.get("latest").etag)
    store.cas("latest", b"2", store.get("latest").etag)


def test_equal_content_has_an_equal_etag_only_for_what_may_change(tmp_path):
    store = LocalStore(tmp_path)
    first = store.cas("latest", b"1", None)
    second = store.cas("latest", b"2", first)
    assert store.cas("latest", b"1", second) == first
    store.put_once("large", bytes(100_000))
    assert store.head("large").etag == store.get("large").etag != first


def test_a_listing_opens_no_file_and_notices_a_change(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    etag = store.cas("latest", b"1", None)
    [before] = store.list_after("")
    store.cas("latest", b"2", etag)
    monkeypatch.setattr("builtins.open", None)
    [after] = store.list_after("")
    assert (after.key, after.size) == ("latest", 1) and after.etag != before.etag


def test_errors_of_a_listing_are_told_like_those_of_other_calls(tmp_path, monkeypatch):
    store = LocalStore(tmp_path, retry=SHORT)
    store.put_once("a/b", b"1")
    scandir, errors = os.scandir, [OSError(errno.EIO, "Input/output error"), PermissionError(errno.EACCES, "denied")]

    def fails_first(folder):
        if errors:
            raise errors.pop(0)
        return scandir(folder)

    monkeypatch.setattr("os.scandir", fails_first)
    with pytest.raises(AccessDenied, match=f"list file://{tmp_path}/a/.*give this user access"):
        list(store.list_after("a/"))
    assert [info.key for info in store.list_after("a/")] == ["a/b"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_at_the_first_attempt(tmp_path, monkeypatch, number):
    def full(_descriptor):
        raise OSError(number, os.strerror(number))

    seen, weather = [], Weather()
    store = LocalStore(
        tmp_path, observe=lambda *told: seen.append(told), weather=weather, on_wait=lambda wait: pytest.fail(wait.cause)
    )
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutOfSpace, match=f"put_once file://{tmp_path}/a: .*; free some space at {tmp_path}"):
        store.put_once("a", b"1")
    assert seen == [("put_once", "unavailable")]
    assert weather.trouble is not None and os.strerror(number) in weather.trouble.error
    assert files(tmp_path) == [], "half a file would keep the disk full"


def test_a_file_in_the_place_of_the_root_is_not_taken_for_a_store(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="is a file; name a directory"):
        LocalStore(tmp_path / "file")


def test_a_key_below_an_object_is_refused(tmp_path):
    store = LocalStore(tmp_path)
    store.put_once("p", b"1")
    with pytest.raises(ValueError, match="is an object"):
        store.put_once("p/q", b"1")


@settings(max_examples=25, deadline=None)
@given(
    st.sets(st.text("ab-.0", min_size=1, max_size=3).filter(lambda s: s.strip(".")), min_size=1, max_size=6),
    st.text("ab-./0", max_size=5),
)
def test_listings_follow_the_order_of_whole_keys(tmp_path_factory, names, after):
    store = LocalStore(tmp_path_factory.mktemp("order"))
    # Each name is a leaf under "f/" and a folder under "d/", so siblings that share a beginning meet.
    keys = sorted([f"d/{name}/x" for name in names] + [f"f/{name}" for name in names])
    for key in keys:
        store.put_once(key, b"")
    for cursor in (None, after, "d/" + after, "f/" + after):
        assert [info.key for info in store.list_after("", cursor)] == [k for k in keys if k > (cursor or "")]
    store.close()
