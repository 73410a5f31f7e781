"""Real trainer and searcher processes over a store, with named failpoints: for integration and fault tests."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from support.tiny_models import save_tiny

from tba.contracts.job import TBAJob
from tba.contracts.keys import LATEST, SHARDS, ShardKey
from tba.contracts.records import Latest
from tba.contracts.runfile import write_config
from tba.store import NotFound, ObjectStore, open_store

TIMEOUT_SECONDS = 120.0


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` over `base`, section by section."""
    result = dict(base)
    for name, value in changes.items():
        old = result.get(name)
        result[name] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def job_for(root: Path, storage_uri: str, **changes: Any) -> TBAJob:
    """A job that trains the tiny random model on sums, with the fake engine unless `changes` say otherwise."""
    save_tiny(root / "model", tied=True)
    sums = [json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)}) for a in range(10) for b in range(10)]
    (root / "train.jsonl").write_text("\n".join(sums))
    spec = {
        "model": {"uri": f"file://{root}/model", "dtype": "float32", "maxModelLen": 32},
        "task": {
            "prompts": {"uri": f"file://{root}/train.jsonl"},
            "reward": {"name": "fake"},
            "sampling": {"maxTokens": 12},
        },
        "objective": {
            "responsesPerPrompt": 4,
            "promptsPerBatch": 4,
            "totalSteps": 40,
            "learningRate": 1e-3,
            "schedule": {"warmupSteps": 0},
        },
        "buffer": {"minInitialTrajectories": 24, "sampling": "Uniform", "maxReplayRatio": None},
        "sync": {"pollIntervalSeconds": 0.05},
        "storage": {"uri": storage_uri, "checkpoints": {"everySteps": 5}},
        "searcher": {
            "samplesPerPrompt": 6,
            "engine": {"type": "fake", "extraArgs": {"vocabulary": 12, "tokensPerSecond": 400}},
        },
    }
    return TBAJob.model_validate(
        {
            "apiVersion": "tba.dev/v1alpha1",
            "kind": "TBAJob",
            "metadata": {"name": "tiny"},
            "spec": merge(spec, changes),
        }
    )


class Cluster:
    """The processes of one run. Leaves none behind."""

    def __init__(self, root: Path, job: TBAJob, *, env: dict[str, str] | None = None) -> None:
        self.root = root
        self.job = job
        self.uri = job.spec.storage.uri
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
        self.env.pop("TBA_FAILPOINTS", None)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs = 0
        write_config(root / "config", job)

    @cached_property
    def store(self) -> ObjectStore:
        """A store of its own to look into the bucket."""
        return open_store(self.uri)

    def trainer(self, failpoints: str = "", **env: str) -> subprocess.Popen[bytes]:
        """Start a trainer; `failpoints` as of tba.failpoints."""
        arguments = ["trainer", "--config", str(self.root / "config"), "--storage", self.uri, "--threads", "1"]
        return self._start("trainer", arguments, failpoints, env)

    def searcher(self, name: str = "searcher-0", failpoints: str = "", **env: str) -> subprocess.Popen[bytes]:
        """Start a searcher."""
        arguments = ["searcher", "--config", str(self.root / "config"), "--storage", self.uri, "--name", name]
        return self._start(name, arguments, failpoints, env)

    def latest(self) -> Latest | None:
        """`latest` as it is now."""
        try:
            return Latest.model_validate_json(self.store.get(LATEST).data)
        except NotFound:
            return None

    def wait_for(self, condition: Callable[[Latest], bool], timeout_seconds: float = TIMEOUT_SECONDS) -> Latest:
        """Poll `latest` until `condition` holds of it."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            latest = self.latest()
            if latest is not None and condition(latest):
                return latest
            time.sleep(0.05)
        raise AssertionError(f"not reached within {timeout_seconds:.0f} s; latest is {self.latest()}\n{self.tail()}")

    def shards(self) -> list[ShardKey]:
        """Every shard in the bucket."""
        return [ShardKey.parse(info.key) for info in self.store.list_after(SHARDS)]

    def wait_for_shards(self, searchers: int, *, more_than: int = 0) -> None:
        """Until the bucket holds more than so many shards, of at least so many searcher processes."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(keys := self.shards()) <= more_than or len({k.incarnation for k in keys}) < searchers:
            assert time.monotonic() < deadline, f"{len(keys)} shards\n{self.tail()}"
            time.sleep(0.1)

    def stop(self, *processes: subprocess.Popen[bytes], within_seconds: float = 60.0) -> list[int]:
        """SIGTERM; their exit codes."""
        for process in processes:
            process.send_signal(signal.SIGTERM)
        return [process.wait(within_seconds) for process in processes]

    def tail(self, lines: int = 15) -> str:
        """The end of every log."""
        found = []
        for path in sorted(self.root.glob("*.log")):
            text = path.read_text(errors="replace").splitlines()[-lines:]
            found.append(f"--- {path.name}\n" + "\n".join(text))
        return "\n".join(found)

    def log_of(self, process: subprocess.Popen[bytes]) -> str:
        """Everything a process printed."""
        return Path(process.log_path).read_text(errors="replace")  # type: ignore[attr-defined]

    def close(self) -> None:
        """Kill what still runs, by pid, and reap it."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
        if "store" in self.__dict__:
            self.store.close()

    def _start(self, name: str, arguments: list[str], failpoints: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
        self._logs += 1
        path = self.root / f"{self._logs:03d}-{name}.log"
        environment = {**self.env, **env} | ({"TBA_FAILPOINTS": failpoints} if failpoints else {})
        with path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tba.cli", *arguments], stdout=log, stderr=log, env=environment
            )
        process.log_path = str(path)  # type: ignore[attr-defined]
        self._processes.append(process)
        return process


@contextmanager
def cluster(root: Path, job: TBAJob, *, env: dict[str, str] | None = None) -> Iterator[Cluster]:
    """A run's processes, ended on the way out."""
    running = Cluster(root, job, env=env)
    try:
        yield running
    finally:
        running.close()
