"""The folder of vLLM's files and sockets, without vLLM."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from tba.searcher.engines.vllm_folder import SOCKETS, EngineFolder

LEAVES_ITS_FOLDER = """
import os, signal
from tba.searcher.engines.vllm_folder import EngineFolder
folder = EngineFolder()
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary(monkeypatch):
    """A temporary directory with a short name, empty."""
    monkeypatch.delenv(SOCKETS, raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def age(folder: Path) -> None:
    os.utime(folder, (time.time() - 3600,) * 2)


def test_vllm_puts_sockets_there_while_it_starts_and_all_goes_with_the_folder(temporary):
    folder = EngineFolder()
    with folder.holding_sockets():
        assert os.environ[SOCKETS] == str(folder.path)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"{os.environ[SOCKETS]}/{uuid.uuid4()}")
    assert SOCKETS not in os.environ and len(list(folder.path.iterdir())) == 1
    folder.close()
    assert list(temporary.iterdir()) == []


def test_a_folder_that_somebody_chose_is_left_as_it_is(temporary, monkeypatch):
    monkeypatch.setenv(SOCKETS, "/elsewhere")
    folder = EngineFolder()
    with folder.holding_sockets():
        assert os.environ[SOCKETS] == "/elsewhere"
    assert os.environ[SOCKETS] == "/elsewhere"
    folder.close()


@pytest.mark.parametrize(("length", "fits"), [(50, True), (51, False)])
def test_a_path_is_chosen_only_if_a_socket_can_have_it(temporary, monkeypatch, length, fits):
    place = temporary / ("x" * (length - len(str(temporary)) - 1))
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    folder = EngineFolder()
    with folder.holding_sockets():
        assert (SOCKETS in os.environ) == fits
    bound = f"{folder.path}/{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX) as made:
        if fits:
            made.bind(bound)
        else:
            with pytest.raises(OSError, match="too long"):
                made.bind(bound)
    folder.close()


def test_the_next_engine_removes_what_a_killed_one_left_and_nothing_of_a_living_one(temporary):
    living, young = EngineFolder(), temporary / "tba-engine-young"
    young.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(Path(__file__).parents[3] / "workloads")}
    killed = subprocess.run(
        [sys.executable, "-c", LEAVES_ITS_FOLDER], env=environment, capture_output=True, text=True, timeout=120
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = Path(killed.stdout.strip())
    (left / "config.json").touch()
    for folder in (left, living.path):
        age(folder)
    following = EngineFolder()
    assert not left.exists()
    assert living.path.exists() and young.exists()
    for folder in (living, following):
        folder.close()
