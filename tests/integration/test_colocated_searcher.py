"""A searcher inside the trainer's pod: real processes over a directory, with and without other searchers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from support.processes import Cluster, cluster, job_for

from tba.contracts.job import TBAJob
from tba.trainer.colocated import NAME

STEPS = 12
SOON = 60.0


def colocated_job(root: Path, storage: str, **changes) -> TBAJob:
    return job_for(root, storage, trainer={"colocatedSearcher": {"enabled": True}}, **changes)


def child_of(trainer: subprocess.Popen) -> int | None:
    """The searcher that a trainer has started."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == trainer.pid and NAME.encode() in arguments:
            return int(entry.name)
    return None


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def until(run: Cluster, condition, what: str):
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"not within {SOON:.0f} s: {what}\n{run.tail()}")


def spans_of(folder: Path) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(process, what) -> when, from the timelines of all processes."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for path in folder.glob("*.trace.json"):
        events = json.loads(path.read_text().rstrip().rstrip(",").removesuffix("]") + "]")
        process = next(e["args"]["name"] for e in events if e["name"] == "process_name")
        for event in events:
            if event["ph"] == "X":
                found.setdefault((process, event["name"]), []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def test_one_device_for_the_whole_system_generates_and_trains_in_turns(tmp_path):
    job = colocated_job(
        tmp_path,
        "s3://unused/run",
        objective={"totalSteps": STEPS},
        buffer={"maxReplayRatio": 1.0},
        searcher={"replicas": 0, "engine": {"type": "transformers", "maxNumSeqs": 24}},
        task={
            "evaluation": {"prompts": {"uri": f"file://{tmp_path}/train.jsonl"}, "maxPrompts": 8, "everySteps": STEPS}
        },
    )
    data = json.loads(job.to_json())
    data["spec"]["searcher"]["engine"]["extraArgs"] = {}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(data))
    done = subprocess.run(
        [sys.executable, "-m", "tba", "run", str(tmp_path / "job.yaml"), "--run-dir", str(tmp_path / "run"), "--json",
         "--trace", str(tmp_path / "traces")],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["state"], result["step"]) == ("Complete", STEPS)
    assert result["evalScore"] is not None, "it answers the evaluation of the last weights too"
    spans = spans_of(tmp_path / "traces")
    trained, generated = spans["trainer", "train_step"], spans[f"searcher {NAME}", "generate"]
    assert len(trained) == STEPS and len(generated) > STEPS
    both = [(a, c) for a, b in trained for c, d in generated if min(b, d) > max(a, c)]
    assert not both, "an engine's step overlaps a training step"
    status = subprocess.run(
        [sys.executable, "-m", "tba", "status", str(tmp_path / "run"), "--json"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert json.loads(status.stdout)["searcherSeconds"]["asleep"] > 0
    log = (tmp_path / "run" / "logs" / f"{NAME}.log").read_text()
    assert "policy_swapped" in log and "Traceback" not in log


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run with another searcher beside it, whose colocated searcher and then whose trainer get SIGKILL."""
    root = tmp_path_factory.mktemp("kills")
    job = colocated_job(
        root, f"file://{root}/store", objective={"totalSteps": 10_000}, buffer={"maxReplayRatio": 1.0},
        searcher={"engine": {"maxNumSeqs": 12, "extraArgs": {"tokensPerSecond": 2000}}},
    )  # fmt: skip
    with cluster(root, job) as run:
        trainer = run.trainer()
        run.searcher("searcher-0")
        first = until(run, lambda: child_of(trainer), "a colocated searcher")
        names = lambda: {(k.searcher, k.incarnation) for k in run.shards()}  # noqa: E731
        until(run, lambda: {n for n, _ in names()} == {NAME, "searcher-0"}, "shards of both")
        before = run.wait_for(lambda latest: latest.step > 0).step
        os.kill(first, signal.SIGKILL)
        second = until(run, lambda: (pid := child_of(trainer)) != first and pid, "another colocated searcher")
        until(run, lambda: len({i for n, i in names() if n == NAME}) == 2, "shards of the second")
        after = run.wait_for(lambda latest: latest.step > before).step
        assert trainer.poll() is None, run.tail()
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        since = time.monotonic()
        while alive(second) and time.monotonic() - since < SOON:
            time.sleep(0.05)
        yield {"run": run, "trainer": trainer, "steps": (before, after), "second": second}


def test_a_killed_colocated_searcher_is_replaced_and_the_run_goes_on(killed):
    before, after = killed["steps"]
    assert after > before
    assert '"event": "colocated_ended"' in killed["run"].log_of(killed["trainer"])


def test_a_killed_trainer_takes_its_searcher_with_it(killed):
    assert not alive(killed["second"])
