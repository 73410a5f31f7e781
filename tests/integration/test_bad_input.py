"""Bad rewards cost their own samples, bad shards are quarantined and shown, and the run goes on to its end."""

import time

from support.processes import cluster, job_for

from tba.contracts.keys import ShardKey, new_nonce
from tba.contracts.records import RunState
from tba.report.history import read_history
from tba.report.page import build_report

REWARD = """
import os, time

def reward(prompt, response, answer):
    kind = sum(map(ord, prompt)) % 5
    if kind == 0:
        while True:
            time.sleep(1)
    if kind == 1:
        os._exit(7)
    if kind == 2:
        raise RuntimeError("no reward for you")
    return float(len(response) % 2)
"""


def test_rewards_that_loop_crash_or_raise_cost_only_their_own_samples(tmp_path, monkeypatch):
    (tmp_path / "bad_reward.py").write_text(REWARD)
    job = job_for(
        tmp_path,
        f"file://{tmp_path}/store",
        task={"reward": {"name": None, "entrypoint": "bad_reward:reward", "timeoutSeconds": 0.3}},
        objective={"totalSteps": 20},
        searcher={"engine": {"extraArgs": {"rewardMean": None}}},
    )
    with cluster(tmp_path, job, env={"PYTHONPATH": str(tmp_path)}) as run:
        run.searcher()
        assert run.trainer().wait(120) == 0, run.tail()
        history = read_history(run.store)
        assert run.latest().state is RunState.COMPLETE
        last = history.steps[-1]
        assert last.failed_rows > 0 and last.ingested_rows > last.failed_rows
        assert {s.reward_mean for s in history.steps} != {0.0}


def test_truncated_and_foreign_shards_are_quarantined_and_shown_in_the_report(tmp_path):
    job = job_for(tmp_path, f"file://{tmp_path}/store", objective={"totalSteps": 60}, buffer={"maxReplayRatio": 1.0})
    with cluster(tmp_path, job) as run:
        run.searcher()
        trainer = run.trainer()
        latest = run.wait_for(lambda latest: latest.step >= 10)
        shard = next(iter(run.store.list_after("shards/"))).key
        good = run.store.get(shard).data
        truncated = ShardKey(latest.commit, "evil", new_nonce(), 0).path
        run.store.put_once(truncated, good[: len(good) // 2])
        foreign = ShardKey(latest.commit, "evil", new_nonce(), 0).path
        run.store.put_once(foreign, good)  # its header names another searcher
        run.store.put_once(f"shards/{latest.commit:010d}/notes.txt", b"hello")
        assert trainer.wait(120) == 0, run.tail()
        history = read_history(run.store)
        reasons = {q.key: q.reason for q in history.quarantines}
        assert {truncated, foreign} <= set(reasons)
        assert any(key.endswith("notes.txt") for key in reasons)
        page = build_report(run.store)
        assert truncated in page and foreign in page


def test_a_live_setting_takes_effect_without_a_restart_and_a_broken_file_is_refused(tmp_path):
    job = job_for(tmp_path, f"file://{tmp_path}/store", objective={"totalSteps": 100000})
    with cluster(tmp_path, job) as run:
        run.searcher()
        trainer = run.trainer()
        run.wait_for(lambda latest: latest.version >= 4)
        live = tmp_path / "config" / "live.json"
        text = live.read_text()
        live.write_text("{")
        deadline = time.monotonic() + 20
        while "config_refused" not in run.log_of(trainer):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        live.write_text(text.replace('"intervalSteps": 2', '"intervalSteps": 7'))
        while "config_reloaded" not in run.log_of(trainer):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        run.wait_for(lambda latest: latest.version % 7 == 0 and latest.version % 2 == 1)
        assert trainer.poll() is None
