"""Trainer and searcher as a pod runs them: environment, mounts, probes, last words, process 1."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.processes import Cluster, cluster, job_for

from tba.contracts.keys import RUN
from tba.contracts.records import RunRecord
from tba.contracts.termination import Termination, read_termination
from tba.report.history import read_history

REWARD = "def reward(prompt, response, answer, scale=1):\n    return scale * (len(response) % 2)\n"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answer_of(port: int, path: str) -> int | None:
    """The status; None if nobody listens yet."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return None


def words_of(path: Path) -> Termination:
    found = read_termination(path.read_text())
    assert found is not None, path.read_text()
    return found


def wait_until(condition, process: subprocess.Popen, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def mounted(run: Cluster) -> dict[str, str]:
    """ConfigMaps as the operator mounts them: for the trainer alone."""
    maps = run.root / "configmaps"
    (maps / "mine").mkdir(parents=True)
    (maps / "mine" / "r.py").write_text(REWARD)
    (maps / "mine" / "train.jsonl").write_text((run.root / "train.jsonl").read_text())
    return {"TBA_CONFIG_MAPS_DIR": str(maps), "TBA_POD_UID": "uid-1"}


def test_a_run_is_stopped_crashes_and_completes_with_mounted_inputs_and_a_searcher_that_was_there_first(
    tmp_path, trainer_here
):
    job = job_for(
        tmp_path,
        f"file://{tmp_path}/store",
        task={
            "prompts": {"uri": None, "configMapRef": {"name": "mine", "key": "train.jsonl"}},
            "reward": {"name": None, "configMapRef": {"name": "mine", "key": "r.py"}, "parameters": {"scale": 3}},
        },
        objective={"totalSteps": 200},
        storage={"checkpoints": {"everySteps": 1000}},
        searcher={"engine": {"extraArgs": {"rewardMean": None, "tokensPerSecond": 5000}}},
    )
    with cluster(tmp_path, job) as run:
        port, words = free_port(), tmp_path / "words"
        searcher = run.searcher(TBA_PORT=str(port), TBA_TERMINATION_PATH=f"{words}-searcher")
        environment = mounted(run)
        first = run.trainer(**environment, TBA_TERMINATION_PATH=f"{words}-stopped")
        wait_until(lambda: answer_of(port, "/healthz") == 200, searcher)
        if not (tmp_path / "store" / "run.json").exists():
            assert answer_of(port, "/readyz") == 503, "alive and not ready while there is no run"

        run.wait_for(lambda latest: latest.step >= 3)
        assert run.stop(first) == [143]
        stopped = words_of(Path(f"{words}-stopped"))
        assert (stopped.exit_code, stopped.message) == (143, "") and stopped.progress is not None
        assert stopped.progress.checkpoint_step == stopped.progress.step >= 3

        crashing = run.trainer("step.after_update=raise:2", TBA_TERMINATION_PATH=f"{words}-crashed")
        assert crashing.wait(60) == 1
        crashed = words_of(Path(f"{words}-crashed"))
        assert crashed.exit_code == 1 and crashed.message.startswith("tba.failpoints.Failpoint")
        assert crashed.progress is not None and crashed.progress.checkpoint_step == stopped.progress.step

        assert run.trainer(**environment, TBA_TERMINATION_PATH=f"{words}-done").wait(120) == 0, run.tail()
        done = words_of(Path(f"{words}-done"))
        assert (done.exit_code, done.message) == (0, "") and done.progress is not None
        progress = done.progress
        assert (progress.state, progress.step, progress.checkpoint_step) == ("Complete", 200, 200)
        assert progress.pod_uid == "uid-1"
        assert progress.steps_per_busy_second is not None and progress.steps_per_busy_second > 0
        record = RunRecord.model_validate_json(run.store.get(RUN).data)
        assert record.reward_code is not None and run.store.get(record.reward_code).data.decode() == REWARD
        rewards = {round(s.reward_mean, 6) for s in read_history(run.store).steps}
        assert len(rewards) > 1 and max(rewards) <= 3.0, "the searcher ran the code from the bucket"
        assert run.stop(searcher) == [143]
        assert words_of(Path(f"{words}-searcher")) == Termination(exit_code=143)
        # The pod's exit code was lost, say: one more finds the run ended, needs no mount, and says the same.
        assert trainer_here(run, TBA_TERMINATION_PATH=f"{words}-again") == 0
        again = words_of(Path(f"{words}-again")).progress
        assert again is not None and (again.state, again.step, again.run_id) == ("Complete", 200, progress.run_id)


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ({"entrypoint": "no_such_module:reward"}, "there is no module 'no_such_module'"),
        ({"configMapRef": {"name": "mine", "key": "empty.py"}}, "Define `def reward(prompt, response, answer"),
    ],
    ids=["entrypoint", "file"],
)
def test_a_reward_that_cannot_be_loaded_ends_the_trainer_before_there_is_a_run(tmp_path, trainer_here, reward, told):
    job = job_for(tmp_path, f"file://{tmp_path}/store", task={"reward": {"name": None, **reward}})
    with cluster(tmp_path, job) as run:
        environment = mounted(run)
        (tmp_path / "configmaps" / "mine" / "empty.py").write_text("x = 1\n")
        assert trainer_here(run, **environment, TBA_TERMINATION_PATH=str(tmp_path / "words")) == 64
        words = words_of(tmp_path / "words")
        assert words.exit_code == 64 and told in words.message
        assert words.progress is not None and words.progress.state == "Failed"
        assert not (tmp_path / "store" / "run.json").exists()


def _namespaces() -> bool:
    return (
        shutil.which("unshare") is not None
        and not subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode
    )


@pytest.mark.skipif(not _namespaces(), reason="needs the right to make a process namespace")
def test_process_1_of_a_container_obeys_sigterm_from_its_first_moment_on(tmp_path):
    job = job_for(tmp_path, f"file://{tmp_path}/store")
    with cluster(tmp_path, job) as run:
        command = [
            "unshare",
            "--pid",
            "--fork",
            sys.executable,
            "-m",
            "tba",
            "trainer",
            "--config",
            str(tmp_path / "config"),
        ]
        words = tmp_path / "words"
        with (tmp_path / "log").open("wb") as log:
            outer = subprocess.Popen(
                command, env={**run.env, "TBA_TERMINATION_PATH": str(words)}, stdout=log, stderr=log
            )
        try:
            inner = _child_of(outer)
            # A handler for SIGTERM (bit 14) is there, long before torch is imported and the real shutdown is set up.
            wait_until(lambda: _caught(inner) >> (signal.SIGTERM - 1) & 1, outer)
            os.kill(inner, signal.SIGTERM)
            assert outer.wait(30) == 143
        finally:
            outer.kill()
            outer.wait()
        assert words_of(words).exit_code == 143


def _child_of(process: subprocess.Popen) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: children.read_text().split() and b"tba" in _command(int(children.read_text())), process)
    return int(children.read_text())


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _caught(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), 16)


ORPHANS = """
import ctypes, json, os, sys, time
from pathlib import Path
ctypes.CDLL(None).prctl(36, 1)  # orphans fall to this process, as to process 1
from tba.contracts.config import Reward
from tba.rewards import orphans, sandbox
sandbox._ORPHANS_SECONDS = 0.1
own = os.spawnlp(os.P_NOWAIT, "true", "true")  # a child of our own: nobody else may collect it
with sandbox.RewardPool(Reward(entrypoint="forks:reward"), num_workers=1, search_path=Path(sys.argv[1])) as pool:
    call = sandbox.RewardCall("p", "r", None)
    for _ in range(8):
        assert [r.reward for r in pool.score([call])] == [1.0]
        time.sleep(0.1)
zombies = [p for p in orphans._processes() if p.parent == os.getpid() and p.state == "Z" and p.pid != own]
print(json.dumps([len(zombies), os.waitpid(own, 0)[0] == own]))
"""
FORKS = """
import subprocess

def reward(prompt, response, answer):
    subprocess.run(["sh", "-c", "true & true &"])  # two orphans a call
    return 1.0
"""


def test_what_reward_code_leaves_behind_is_collected_and_nothing_else(tmp_path):
    (tmp_path / "forks.py").write_text(FORKS)
    done = subprocess.run(
        [sys.executable, "-c", ORPHANS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": "workloads"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, True]
