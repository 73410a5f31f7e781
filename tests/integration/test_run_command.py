"""`tba run` as a user has it: an embedded server, trainer, two searchers, Ctrl-C, the same command again, a look back.

One run serves all tests here: its processes take most of the time.
"""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from support.processes import job_for

from tba.cli.local_plan import num_cores

TOTAL_STEPS, SEARCHERS = 40, 2
COMMAND = [sys.executable, "-m", "tba"]


@dataclass
class TwoCalls:
    """What the two calls of the command left behind."""

    directory: Path
    interrupted: str
    """All output of the first."""
    result: str
    """Standard output of the second, which has --json."""
    resumed: str
    """Its standard error."""


def tba(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False)


def interrupt_after_a_step(arguments: list[str]) -> str:
    """Run until the first optimizer step is told, then Ctrl-C. Returns the output."""
    lines, told = [], False
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        for line in run.stdout:
            lines.append(line)
            if not told and re.match(r"step [1-9]", line):
                told = True
                run.send_signal(signal.SIGINT)
    assert run.returncode == 130, "".join(lines)
    return "".join(lines)


@pytest.fixture(scope="module")
def two_calls(tmp_path_factory) -> TwoCalls:
    root = tmp_path_factory.mktemp("run")
    job = job_for(
        root,
        "s3://unused/run",
        objective={"totalSteps": TOTAL_STEPS},
        buffer={"maxReplayRatio": 1.0},  # the trainer must wait for searchers, so there is time for a Ctrl-C
        searcher={
            "replicas": SEARCHERS,
            "engine": {"maxNumSeqs": 16, "extraArgs": {"tokensPerSecond": 400}},
        },
    )
    (root / "job.yaml").write_text(yaml.safe_dump(json.loads(job.to_json())))
    directory = root / "tiny"
    arguments = ["run", str(root / "job.yaml"), "--storage", "embedded", "--run-dir", str(directory)]
    arguments += ["--trace", str(root / "traces")]
    interrupted = interrupt_after_a_step(arguments)
    second = tba(*arguments, "--json")
    assert second.returncode == 0, second.stderr
    return TwoCalls(directory, interrupted, second.stdout, second.stderr)


def test_after_ctrl_c_the_same_command_goes_on_from_the_checkpoint_to_the_end(two_calls):
    assert "stopping: the trainer writes a checkpoint" in two_calls.interrupted
    stopped = re.search(r"^Stopped: step (\d+) of 40, epoch 1$", two_calls.interrupted, re.MULTILINE)
    assert stopped and 0 < int(stopped[1]) < TOTAL_STEPS
    assert f"resumes: the store holds this run at step {stopped[1]} (Running)" in two_calls.resumed
    result = json.loads(two_calls.result)
    assert (result["state"], result["step"], result["epoch"], result["exitCode"]) == ("Complete", TOTAL_STEPS, 2, 0)


def test_a_run_tells_its_processes_and_what_was_stale_and_leaves_none_of_them(two_calls):
    for output in (two_calls.interrupted, two_calls.resumed):
        pids = dict(re.findall(r"^(\S+) started, pid (\d+)", output, re.MULTILINE))
        assert set(pids) == {"server", "trainer", "searcher-0", "searcher-1"}
        assert not [name for name, pid in pids.items() if os.path.exists(f"/proc/{pid}")]
        assert re.search(r"staleness of trained rows \(steps: share\):\n +0: +\d+\.\d% █", output)
    assert Path(json.loads(two_calls.result)["report"]).read_text().count("<svg") > 5


def test_an_ended_run_is_looked_into_by_its_directory_though_its_server_is_gone(two_calls):
    done = tba("status", str(two_calls.directory), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == TOTAL_STEPS
    assert not (two_calls.directory / "server" / "server.json").exists(), "the server that status started still runs"


def test_status_splits_the_time_of_both_roles_and_each_second_once(two_calls):
    done = tba("status", str(two_calls.directory), "--json")
    status = json.loads(done.stdout)
    for role, work in (("trainer", "forward_backward"), ("searcher", "generate")):
        seconds = status[f"{role}Seconds"]
        assert seconds[work] > 0 and min(seconds.values()) >= 0
        waits = sum(s for name, s in seconds.items() if name.startswith("wait_"))
        assert status[f"{role}IdlePercent"] == pytest.approx(100 * waits / sum(seconds.values()))
        assert status[f"{role}Mfu"] is None, "there is no GPU"
    text = tba("status", str(two_calls.directory)).stdout
    assert re.search(r"^time of the searchers: .*generate \d+\.\d %", text, re.MULTILINE)


def test_timelines_of_all_processes_of_both_calls_merge_into_one(two_calls, tmp_path):
    traces = two_calls.directory.parent / "traces"
    done = tba("trace", str(traces), "-o", str(tmp_path / "trace.json"))
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert sorted(processes) == sorted(["searcher-0", "searcher-1", "trainer"] * 2)
    assert len({e["pid"] for e in events}) == 6
    assert {"train_step", "publish", "checkpoint", "generate", "upload"} <= {e["name"] for e in events}


def test_replay_of_the_recorded_trajectories_gives_the_same_weights(two_calls):
    threads = max(1, num_cores() // (1 + SEARCHERS))  # as `tba run` gave the trainer
    done = tba("replay", str(two_calls.directory), "--threads", str(threads))
    assert (done.returncode, done.stdout) == (
        0, f"replayed {TOTAL_STEPS} steps; weights and checkpoint equal bit for bit\n",
    ), done.stderr  # fmt: skip
