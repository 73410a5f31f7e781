"""Nobody waits for anybody: separate processes, a trainer that goes on alone, searchers that come and go."""

import json
import os
import signal
import time
import urllib.request
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from support.plausibility import ks_2samp
from support.processes import Cluster, cluster, job_for

from tba.report.history import read_history
from tba.trainer.replay import replay


def progress(port_file: Path) -> dict:
    with urllib.request.urlopen(f"http://127.0.0.1:{port_file.read_text()}/progress", timeout=5) as answer:
        return json.loads(answer.read())


def wait_until(condition, timeout_seconds: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "not reached in time"
        time.sleep(0.1)


def trainer_with_http(run: Cluster, tmp_path: Path):
    port_file = tmp_path / "port"
    trainer = run.trainer(TBA_PORT="0", TBA_PORT_FILE=str(port_file), TBA_HTTP_HOST="127.0.0.1")
    wait_until(lambda: port_file.exists() and port_file.read_text())
    return trainer, port_file


def test_a_second_searcher_joins_and_while_both_stand_still_the_trainer_waits_at_the_replay_cap(tmp_path):
    job = job_for(
        tmp_path, f"file://{tmp_path}/store", objective={"totalSteps": 100000}, buffer={"maxReplayRatio": 2.0}
    )
    with cluster(tmp_path, job) as run:
        searchers = [run.searcher("searcher-0")]
        trainer, port_file = trainer_with_http(run, tmp_path)
        run.wait_for(lambda latest: latest.step >= 10)
        searchers.append(run.searcher("searcher-1"))
        run.wait_for_shards(searchers=2)
        joined = run.latest().step
        run.wait_for(lambda latest: latest.step >= joined + 30)
        assert len({p.pid for p in (*searchers, trainer)}) == 3

        for searcher in searchers:
            os.kill(searcher.pid, signal.SIGSTOP)
        stopped_at, before = time.monotonic(), progress(port_file)["step"]
        wait_until(lambda: progress(port_file)["state"] == "WaitingForData")
        waiting = progress(port_file)
        assert waiting["step"] >= before
        assert "replay ratio" in waiting["detail"].lower()
        time.sleep(max(0.0, 30.0 - (time.monotonic() - stopped_at)))
        assert progress(port_file)["state"] == "WaitingForData"
        for searcher in searchers:
            os.kill(searcher.pid, signal.SIGCONT)
        wait_until(lambda: progress(port_file)["step"] >= waiting["step"] + 5)
        assert run.stop(trainer) == [143], run.tail()

        torch.set_num_threads(1)
        batches: list[set[str]] = []

        def note(learner, result) -> None:
            batches.append({i.incarnation for i in learner.buffer.trajectory_ids(np.unique(result.plan.rows))})

        replay(run.store, on_step=note)
        assert any(len(b) == 2 for b in batches), "rows of both stand in one batch"
        assert {s.searcher for s in read_history(run.store).searchers} == {"searcher-0", "searcher-1"}


def expand(histogram: Counter) -> np.ndarray:
    return np.repeat(list(histogram), list(histogram.values()))


@pytest.mark.parametrize("deduplicate", [True, False])
def test_trained_lengths_are_distributed_as_generated_ones(tmp_path, deduplicate):
    engine = {
        "type": "fake",
        "extraArgs": {"vocabulary": 12, "tokensPerSecond": 4000, "lengths": {"median": 8, "sigma": 0.8}, "distinct": 4},
    }
    job = job_for(
        tmp_path,
        f"file://{tmp_path}/store",
        task={"sampling": {"maxTokens": 28}},
        objective={"totalSteps": 150},
        buffer={"onPolicyProbability": 1.0, "deduplicate": deduplicate, "maxReplayRatio": 1.0},
        searcher={"engine": engine},
    )
    with cluster(tmp_path, job) as run:
        run.searcher()
        assert run.trainer().wait(120) == 0, run.tail()
        history = read_history(run.store)
        generated, trained = expand(history.lengths.generated), expand(history.lengths.trained)
        assert len(trained) >= 2000 and len(set(generated.tolist())) > 8
        if deduplicate:
            assert history.steps[-1].duplicate_rows > 100
        assert ks_2samp(generated, trained).statistic < 0.05
